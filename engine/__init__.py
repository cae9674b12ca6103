"""The prefill engine and the decode loop. Knows token ids and tensors; nothing of HTTP, text or documents."""
