"""How an engine is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_paged.cache.attention import AttentionPath
from mlx_paged.cache.kv_format import KVFormat
from mlx_paged.engine.admission import Policy
from mlx_paged.engine.scheduler import Preemption

PrefixCaching = Literal["hash", "radix", "off"]

GPU_BATCHED_TOKENS = 2048
# A smaller chunk of a prompt, since a CPU takes some seconds for it.
CPU_BATCHED_TOKENS = 512


@dataclass(frozen=True)
class EngineOptions:
    """Options of `Engine` and `LLM`.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks of the pool. By default they follow from `kv_memory`.
        kv_memory: bytes of the pool. By default what the GPU has left, or 1 GiB on a CPU.
        memory_fraction: share of a GPU's recommended working set for weights, activations and
            pool together.
        kv_bits: 8 or 4 stores K and V in codes of so many bits; None as the model computes them.
        kv_group_size: with kv_bits, elements of a head that share a scale and a bias, 32 or 64.
        attention: "metal", "gather", or "auto" for Metal kernels where Metal is.
        prefix_caching: "hash" shares whole blocks, found in a hash table; "radix" finds them
            in a tree and also continues a copy of a block that begins alike; "off".
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of a step, and so of a prompt's chunk at most; by default
            2048 on a GPU and 512 on a CPU.
        max_model_len: tokens of prompt and answer together; by default the model's own.
        policy: who is admitted first: "fcfs", "priority" or "longest-prefix".
        preemption: "recompute" or "swap", where the pool runs out.
        ageing_steps: steps of waiting that outweigh one unit of priority.
        seed: makes requests without a seed of their own repeatable.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    memory_fraction: float = 0.9
    kv_bits: int | None = None
    kv_group_size: int = 32
    attention: AttentionPath = "auto"
    prefix_caching: PrefixCaching = "hash"
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    policy: Policy = "fcfs"
    preemption: Preemption = "recompute"
    ageing_steps: int = 100
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.prefix_caching not in ("hash", "radix", "off"):
            raise ValueError(
                f"prefix_caching is 'hash', 'radix' or 'off', not {self.prefix_caching!r}"
            )
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction must be above 0 and at most 1, not {self.memory_fraction}"
            )
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError(
                f"give num_blocks ({self.num_blocks}) or kv_memory ({self.kv_memory}), not both"
            )
        self.kv_format(mx.float16)  # raises for what it can't be

    def kv_format(self, dtype: mx.Dtype) -> KVFormat:
        """How the K and V of a model that computes in `dtype` are stored."""
        return KVFormat(dtype, self.kv_bits, self.kv_group_size)

    @property
    def num_batched_tokens(self) -> int:
        """`max_num_batched_tokens`, or the default for this device."""
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        default = GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS
        return self.max_num_batched_tokens or max(self.max_num_seqs, default)
