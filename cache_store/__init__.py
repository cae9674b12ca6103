"""Chunk KV: what it is, what it is called, and the tiers that keep it."""
