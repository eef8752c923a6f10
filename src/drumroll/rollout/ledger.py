"""The ledger: every sample that is wanted, from its admission to its departure.

It is the one place where a sample changes its state. Each change is checked against the ways that exist (`life.FOLLOWERS`) and
stamped with time and weight version; a sample that has reached a final state is gone, so none can leave twice.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from drumroll.life import FINAL, FOLLOWERS, Departure, State, retrace, stamp
from drumroll.types import SampleInfo


@dataclass(slots=True, eq=False)
class Sample:
    """One sample while it is in the ledger."""

    sample_id: str
    group: Any
    """What it belongs to; the scheduler's business."""
    number: int
    """Its place in the group."""
    group_id: str
    task_id: str
    domain: str
    seed: int = 0
    state: State = "admitted"
    life: bytes = b""
    attempt: int = -1
    """Of the latest lease."""
    num_failures: int = 0
    """Attempts that ended by its own fault: environment, reward, deadline."""
    num_mishaps: int = 0
    """Attempts that ended because an engine or a worker failed."""
    company: int = sys.maxsize
    """Samples that an environment worker may have at a time while it has this one: half as many after each worker that it took part in
    losing, until it is alone with the one that ends its workers."""
    engine: int = -1
    worker: int = -1
    leased_at: float = 0.0
    is_unwanted: bool = False
    """Whether an abort is under way."""
    info: SampleInfo | None = None
    block: Any = None
    """Where the trajectory of the attempt that counts is."""


class Ledger:
    """Admits samples, moves them, and sees them off."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.version = -1
        """Step of the learner's weights, for stamps."""
        self.counts: Counter[State] = Counter()
        """Samples in each state now; those that have left count by their last one."""
        self._clock = clock
        self._open: dict[str, Sample] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Sample]:
        return iter(list(self._open.values()))

    def admit(self, sample: Sample) -> None:
        if sample.sample_id in self._open:
            raise ValueError(f"sample '{sample.sample_id}' is in the ledger already")
        self._open[sample.sample_id] = sample
        self.counts["admitted"] += 1
        sample.life += stamp("admitted", self._clock(), self.version)

    def move(self, sample: Sample, state: State, place: int = -1) -> None:
        if state not in FOLLOWERS[sample.state]:
            raise ValueError(f"sample '{sample.sample_id}' is {sample.state} and cannot become {state}")
        self.counts[sample.state] -= 1
        self.counts[state] += 1
        sample.state = state
        sample.life += stamp(state, self._clock(), self.version, place)

    def follow(self, sample: Sample, life: bytes) -> dict[State, float]:
        """Add what a worker has stamped since the sample was leased to it; the seconds that it spent in each state there."""
        state, seconds = retrace(sample.state, life)
        self.counts[sample.state] -= 1
        self.counts[state] += 1
        sample.state = state
        sample.life += life
        return seconds

    def leave(self, sample: Sample, state: State, reason: str = "") -> Departure:
        """The sample's last change; exactly one for each."""
        if state not in FINAL:
            raise ValueError(f"{state} is no state to leave in")
        self.move(sample, state)
        del self._open[sample.sample_id]
        return Departure(sample.sample_id, sample.group_id, sample.task_id, sample.domain, state, sample.attempt, sample.life, reason)
