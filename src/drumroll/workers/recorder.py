"""The recorder: the one process that writes the run's trajectory store."""

from __future__ import annotations

from pathlib import Path

from drumroll.record.store import Writer
from drumroll.types import RankInfo, Trajectory


class RecorderWorker:
    """Takes blocks by reference, so that trajectories reach the disk without passing through the controller.

    `after` is the result of the write before. It is not used: that it must be there first puts the calls in order, which the
    order in which they were made does not."""

    def __init__(self, rank: RankInfo, *, folder: str) -> None:
        self._writer = Writer(Path(folder))

    def add(self, after: object, phase: str, step: int, *blocks: list[Trajectory]) -> int:
        """Write every trajectory; returns how many."""
        trajectories = [trajectory for block in blocks for trajectory in block]
        self._writer.add(trajectories, phase, step)
        return len(trajectories)

    def mark(self, after: object) -> int:
        """The place that the store has grown to; everything before it is safe on disk."""
        return self._writer.mark()

    def supersede(self, mark: int) -> int:
        """Mark what was written since `mark` as superseded; returns how many samples that are."""
        return self._writer.supersede(mark)

    def close(self) -> None:
        self._writer.close()
