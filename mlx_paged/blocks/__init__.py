"""The bookkeeping of a paged KV cache: integers and token lists, no arrays.

Nothing here imports mlx, so the allocator can be read, tested and simulated alone.
"""

from mlx_paged.blocks.block_pool import BlockPool, OutOfBlocks
from mlx_paged.blocks.sequence import Sequence

__all__ = ["BlockPool", "OutOfBlocks", "Sequence"]
