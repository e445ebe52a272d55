"""The launch choices of the prefill kernel, and those taken where nobody chose.

None of them was measured by this project: they follow from the registers and the threadgroup
memory that a choice needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import metal
from .defaults import REGISTER_BUDGET
from .launch import SAFE_THREADS, DecodeShape

MATRIX = 8  # rows and columns of the matrices that a SIMD group multiplies
KEYS = (32, 16, 8)

# As many as a core has room for at once: of 256 threads each, with up to half of its memory.
THREADGROUPS_PER_CORE = 2

# Half of what Metal allows a threadgroup, so that there is always room for a second on a core.
TILE_BYTES = metal.MAX_THREADGROUP_BYTES // 2


@dataclass(frozen=True)
class PrefillLaunch:
    """The launch choices of the prefill kernel."""

    heads: int  # query heads of a tile's rows, which share each row of K and V that it loads
    keys: int  # tokens of K and V in threadgroup memory at once
    simdgroups: int  # of a threadgroup
    column_splits: int  # SIMD groups that share 8 rows and divide their outputs' columns
    enough: int = 1  # threadgroups: where there are fewer tiles, their keys are split
    split_tokens: int = 256  # keys of a split at least

    @property
    def rows(self) -> int:
        """Rows, of a token and a query head each, of a threadgroup."""
        return MATRIX * self.simdgroups // self.column_splits

    @property
    def num_threads(self) -> int:
        return self.simdgroups * metal.SIMD_WIDTH

    def head_splits(self, group_size: int) -> int:
        """Tiles that divide the query heads of one KV head."""
        return group_size // self.heads

    def tokens_per_split(self, num_threadgroups: int, max_context_len: int) -> int:
        """Keys of each split, which are all where `num_threadgroups` tiles are enough.

        The partial results of enough threadgroups are small, since more are never split.
        """
        wanted = -(-self.enough // num_threadgroups)
        splits = max(1, min(wanted, max_context_len // self.split_tokens))
        tokens = max(1, -(-max_context_len // splits))
        return -(-tokens // self.keys) * self.keys

    def threadgroup_bytes(self, shape: DecodeShape) -> int:
        """K and V of `keys` tokens, 16 bytes more for each row."""
        return 2 * self.keys * (shape.head_dim * shape.dtype.size + 16)

    def live_floats(self, shape: DecodeShape) -> int:
        """Registers that a lane needs through the loop, in floats of 4 bytes."""
        pairs = shape.head_dim // MATRIX  # a lane holds two elements of each matrix
        queries = 2 * pairs * shape.dtype.size // 4
        max_and_sum = 2
        scores = 2 * self.keys // MATRIX
        return queries + 2 * pairs // self.column_splits + scores + max_and_sum

    def check(self, shape: DecodeShape) -> None:
        """Raise ValueError for choices that the kernel's text can't be compiled with."""
        if min(vars(self).values()) < 1:
            raise ValueError(f"each launch choice counts something, so it's at least 1: {self}")
        if shape.group_size % self.heads:
            raise ValueError(
                f"tiles of {self.heads} query heads don't divide the {shape.group_size} that "
                "share a KV head"
            )
        if self.keys % MATRIX:
            raise ValueError(f"keys come in matrices of {MATRIX}, so not {self.keys} at once")
        columns = shape.head_dim // MATRIX
        if self.simdgroups % self.column_splits or columns % self.column_splits:
            raise ValueError(
                f"{self.column_splits} column splits must divide {self.simdgroups} SIMD groups "
                f"and {columns} matrices of {MATRIX} columns"
            )


def default_prefill_launch(shape: DecodeShape, cores: int) -> PrefillLaunch:
    """All heads of a group in a tile, and as many rows as a pipeline is sure to have threads for.

    The more rows, the seldomer K and V are loaded. Columns are split where queries and outputs
    would not fit the registers, at the price of taking the scores twice. Keys are split where a few
    tokens after a long prefix would leave cores idle.
    """
    simdgroups = SAFE_THREADS // metal.SIMD_WIDTH
    enough = THREADGROUPS_PER_CORE * cores
    launch = next(
        launch
        for keys in KEYS
        if (
            launch := PrefillLaunch(
                shape.group_size, keys, simdgroups, column_splits=1, enough=enough
            )
        ).threadgroup_bytes(shape)
        <= TILE_BYTES
        or keys == KEYS[-1]
    )
    if launch.live_floats(shape) <= REGISTER_BUDGET:
        return launch
    return replace(launch, column_splits=2)
