"""The running samples' block tables as one matrix, kept from step to step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlx_paged.cache import Batch
from mlx_paged.engine.request import Sample

MIN_COLUMNS = 16


class BlockTables:
    """Rows of block ids that are written once, as blocks join a table, and not every step.

    Most steps run the samples of the step before, whose tables have mostly not changed. The
    matrix then is that step's, with a few new entries.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._samples: list[Sample] = []
        self._num_entries: list[int] = []
        self._tables: npt.NDArray[np.int32] = np.zeros((0, MIN_COLUMNS), np.int32)

    def batch(self, samples: list[Sample]) -> Batch:
        """The flat batch of the samples' scheduled tokens."""
        num_cached = [sample.sequence.num_cached_tokens for sample in samples]
        num_new = [sample.num_scheduled_tokens for sample in samples]
        tables = [sample.sequence.block_table for sample in samples]
        num_entries = [len(table) for table in tables]
        if samples == self._samples and max(num_entries) <= self._tables.shape[1]:
            self._update(tables, num_entries)
        else:
            self._rebuild(samples, tables, num_entries)
        self._num_entries = num_entries
        used = self._tables[:, : max(num_entries)]
        return Batch(
            self.block_size, used, np.array(num_cached, np.int32), np.array(num_new, np.int32)
        )

    def forget(self) -> None:
        """Blocks in the middle of tables have changed."""
        self._samples = []

    def _update(self, tables: list[list[int]], num_entries: list[int]) -> None:
        if num_entries == self._num_entries:
            return
        for row, (before, now) in enumerate(zip(self._num_entries, num_entries, strict=True)):
            if now != before:
                self._tables[row, before:now] = tables[row][before:now]

    def _rebuild(
        self, samples: list[Sample], tables: list[list[int]], num_entries: list[int]
    ) -> None:
        num_columns = MIN_COLUMNS
        while num_columns < max(num_entries):
            num_columns *= 2
        self._tables = np.zeros((len(samples), num_columns), np.int32)
        for row, table in enumerate(tables):
            self._tables[row, : len(table)] = table
        self._samples = list(samples)
