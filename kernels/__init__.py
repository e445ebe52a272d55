"""Metal kernels that attend over scattered blocks, and the Python that launches them."""
