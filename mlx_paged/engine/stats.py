"""What an engine is doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_paged.blocks.prefix_cache import PrefixStats


@dataclass
class Counts:
    """What an engine has done since it was made.

    Attributes:
        num_prompt_tokens: computed in prefills, a preempted answer's own tokens included.
        num_generated_tokens: drawn and kept.
        num_steps: forward passes.
        num_graphs_dropped: steps built ahead in vain.
        num_copies: blocks copied on write, or to continue a prefix that ends inside them.
        max_blocks_used: most blocks in use after a step.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_graphs_dropped: int = 0
    num_copies: int = 0
    max_blocks_used: int = 0


@dataclass
class EngineStats:
    """A snapshot.

    Attributes:
        num_blocks_used: blocks that tables list.
        num_blocks_cached: free blocks that hold a prefix someone may ask for.
        slot_share: share of the used blocks' slots that hold a token.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    block_size: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    slot_share: float
    pool_nbytes: int
    peak_memory_nbytes: int
    counts: Counts = field(default_factory=Counts)
    prefix: PrefixStats = field(default_factory=PrefixStats)
