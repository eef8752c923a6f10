"""The recorder: the one process that writes the run's trajectory store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from drumroll.life import Departure, Span
from drumroll.record.store import Writer
from drumroll.types import RankInfo, Trajectory


class RecorderWorker:
    """Takes blocks by reference, so that trajectories reach the disk without passing through the controller.

    `after` is the result of the write before. It is not used: that it must be there first puts the calls in order, which the
    order in which they were made does not."""

    def __init__(self, rank: RankInfo, *, folder: str) -> None:
        self._writer = Writer(Path(folder))

    def add(self, after: object, phase: str, step: int, departures: Sequence[Departure], *blocks: list[Trajectory]) -> int:
        """Write every sample that has left the ledger, with its trajectory where the blocks hold it; returns how many."""
        self._writer.add(phase, step, departures, chain.from_iterable(blocks))
        return len(departures)

    def add_spans(self, after: object, spans: Sequence[Span]) -> int:
        """Write what roles did, and when; returns how many spans that are."""
        self._writer.add_spans(spans)
        return len(spans)

    def mark(self, after: object) -> int:
        """The place that the store has grown to; everything before it is safe on disk."""
        return self._writer.mark()

    def supersede(self, after: object, mark: int) -> int:
        """Mark what was written since `mark` as superseded; returns how many samples that are."""
        return self._writer.supersede(mark)

    def close(self, after: object = None) -> None:
        """What is written from now on would not reach the store."""
        self._writer.close()
