"""A paged KV cache and paged attention for MLX."""
