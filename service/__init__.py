"""The service: composes engine, KV store and retriever behind HTTP and a command line."""
