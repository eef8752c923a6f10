"""The recorder: the one process that writes the run's trajectory store."""

from __future__ import annotations

from pathlib import Path

from drumroll.record.store import Writer
from drumroll.types import RankInfo, Trajectory


class RecorderWorker:
    """Takes blocks by reference, so that trajectories reach the disk without passing through the controller."""

    def __init__(self, rank: RankInfo, *, folder: str) -> None:
        self._writer = Writer(Path(folder))

    def add(self, phase: str, step: int, *blocks: list[Trajectory]) -> int:
        """Write every trajectory; returns how many."""
        trajectories = [trajectory for block in blocks for trajectory in block]
        self._writer.add(trajectories, phase, step)
        return len(trajectories)

    def close(self) -> None:
        self._writer.close()
