"""Metal kernels that attend over scattered blocks, and the Python that launches them."""

from .decode import contiguous_decode_attention, paged_decode_attention
from .metal import is_available
from .prefill import paged_prefill_attention

__all__ = [
    "contiguous_decode_attention",
    "is_available",
    "paged_decode_attention",
    "paged_prefill_attention",
]
