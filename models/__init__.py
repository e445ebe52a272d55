"""Models whose attention runs on a paged KV cache, one file per architecture."""
