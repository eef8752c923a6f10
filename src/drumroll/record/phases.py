"""Where a run's time goes: seconds by phase, of each step and in total, and when each phase began and ended."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """Charges every moment to the innermost open phase, so that nested phases are never counted twice.

    `on_change` hears the name of the phase that time is charged to from now on, or an empty name between phases.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, on_change: Callable[[str], None] = lambda name: None) -> None:
        self._clock = clock
        self._on_change = on_change
        self._open: list[str] = []
        self._start = self._charged_until = clock()
        self._totals: dict[str, float] = defaultdict(float)
        self._step: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time of the block, less that of the phases inside it, goes to `name`; also when the block raises."""
        self._charge()
        self._open.append(name)
        self._on_change(name)
        began = time.time()
        try:
            yield
        finally:
            self._spans.append((name, began, time.time()))
            self._charge()
            self._open.pop()
            self._on_change(self._open[-1] if self._open else "")

    def take(self) -> dict[str, float]:
        """Metrics `time/<phase>_s`: seconds since the last `take`."""
        self._charge()
        taken, self._step = self._step, defaultdict(float)
        return {f"time/{name}_s": seconds for name, seconds in taken.items()}

    def take_spans(self) -> list[tuple[str, float, float]]:
        """Name, begin and end, in seconds since the epoch, of every phase that has ended since the last call."""
        taken, self._spans = self._spans, []
        return taken

    def totals(self) -> dict[str, float]:
        """Seconds by phase since the beginning, and `total`: all seconds, those between phases included."""
        self._charge()
        return {"total": self._charged_until - self._start, **self._totals}

    def restore(self, totals: Mapping[str, float]) -> None:
        """Count on from the totals of an earlier process."""
        self._charge()
        self._start = self._charged_until - totals["total"]
        self._totals = defaultdict(float, {name: seconds for name, seconds in totals.items() if name != "total"})

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            self._totals[self._open[-1]] += now - self._charged_until
            self._step[self._open[-1]] += now - self._charged_until
        self._charged_until = now
