"""What the scheduler hands to environment workers, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass

from drumroll.types import Parcel, SampleInfo, Sampling, Task


@dataclass(slots=True)
class Lease(Parcel):
    """The order to run one sample's episode on one engine. Nobody changes one (see `SampleInfo`)."""

    sample_id: str
    group_id: str
    task: Task
    seed: int
    sampling: Sampling
    engine: int
    """Rank of the engine that generates for it."""
    attempt: int = 0
    """Leases of this sample before this one; the seed stays the same."""
    deadline_s: float = 600.0
    """The whole episode may take this long."""
    stall_s: float = 60.0
    """An engine that is at work may be silent about its reply for this long."""


@dataclass(frozen=True, slots=True)
class WorkerReport(Parcel):
    """What a poll of an environment worker brings, besides the block of trajectories."""

    infos: list[SampleInfo]
    """In the order of the block."""
    cpu_s: float = 0.0
    """Processor time of the worker since its start."""
