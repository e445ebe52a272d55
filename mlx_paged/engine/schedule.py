"""One step, as it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_paged.engine.request import Sample


@dataclass
class Schedule:
    """One step: rows of the flat batch, and what happens to blocks before it.

    The order is: `swapped_out` blocks are read, `copies` made, `swapped_in` blocks written,
    then the forward pass runs. A block read by one may be written by a later one.

    Attributes:
        samples: one row each, those with one new token first.
        copies: (source, destination) block ids.
        swapped_out: samples that gave their blocks back, with the ids of those that hold K/V.
        swapped_in: samples whose `stored` K/V go into the first blocks of their tables.
        preempted: samples that went back to waiting.
    """

    samples: list[Sample] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swapped_out: list[tuple[Sample, list[int]]] = field(default_factory=list)
    swapped_in: list[Sample] = field(default_factory=list)
    preempted: list[Sample] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_scheduled_tokens for sample in self.samples)

    @property
    def num_decodes(self) -> int:
        """Rows with one new token."""
        return sum(sample.num_scheduled_tokens == 1 for sample in self.samples)
