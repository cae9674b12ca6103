"""Documents in, chunks for a question out: parsing, chunking, embeddings, index, catalogue."""
