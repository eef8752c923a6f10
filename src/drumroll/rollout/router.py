"""Which engine and which environment worker a sample goes to, and how many samples may be under way.

Engines are filled by load: the one with the smallest share of its slots in use comes first. Samples of one group prefer the
engine that holds their prompt's cache as long as a slot there is free. Beyond its slots an engine gets a few samples in
reserve, so that a slot that frees is taken at once, and never more: what has to wait waits here, where it can still go anywhere.

An episode occupies a slot only part of its life: it also steps through its environment, is judged, and travels. The limit on
samples under way follows from Little's law: slots × (time alive, waiting for slots not counted) ÷ (time in slots), both as
reported with every result.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from math import ceil, inf

RESERVE = 8
"""An engine has one sample in reserve for this many slots, at least one."""
MAX_STRETCH = 64.0
"""Samples under way for each slot, at most."""
BENCH_AFTER = 2
"""Failures in a row after which an engine gets nothing for a while."""
BENCH_S = 1.0
"""The first time; each further failure doubles it."""
MAX_BENCH_S = 60.0
MAX_ENTRIES = 8
"""Of the heap, for each member, before it is built anew."""


class Pool:
    """Members that take samples, the least loaded first. Each change costs the logarithm of their number."""

    def __init__(self, capacities: Sequence[int], rng: random.Random, bench_after: int = BENCH_AFTER) -> None:
        """A member that fails `bench_after` times in a row gets nothing for a while."""
        self._bench_after = bench_after
        self.capacities = list(capacities)
        self.in_flight = [0] * len(capacities)
        self._failures = [0] * len(capacities)
        self._benched: set[int] = set()
        self._lost: set[int] = set()
        order = list(range(len(capacities)))
        rng.shuffle(order)
        self._tie = order
        self._heap: list[tuple[float, int, int]] = []
        """Entries of load, tie, member. The load is that of some time ago, and never more than it is now."""
        self._listed = [inf] * len(order)
        """The load of each member's entry that counts; no end where it has none."""
        self._eased: set[int] = set()
        """Members whose load may have become less than listed."""
        self._list_all()

    def __len__(self) -> int:
        """Members that are not lost."""
        return len(self.capacities) - len(self._lost)

    def is_usable(self, rank: int) -> bool:
        is_on_trial = self._failures[rank] >= self._bench_after
        return rank not in self._benched and rank not in self._lost and not (is_on_trial and self.in_flight[rank])

    def least_loaded(self) -> int | None:
        """The usable member with the smallest share of its capacity in use."""
        while self._eased:
            self._list(self._eased.pop())
        heap = self._heap
        while heap:
            listed, tie, rank = heap[0]
            load = self.in_flight[rank] / self.capacities[rank]
            if listed != self._listed[rank]:
                heapq.heappop(heap)
            elif not self.is_usable(rank):
                heapq.heappop(heap)
                self._listed[rank] = inf
            elif listed < load:
                heapq.heapreplace(heap, (load, tie, rank))
                self._listed[rank] = load
            else:
                return rank
        return None

    def add(self, rank: int) -> None:
        self.in_flight[rank] += 1

    def remove(self, rank: int) -> None:
        self.in_flight[rank] -= 1
        self._eased.add(rank)

    def succeeded(self, rank: int) -> None:
        if self._failures[rank]:
            self._failures[rank] = 0
            self.back(rank)

    def failed(self, rank: int) -> float | None:
        """Count a failure; how long the member now gets nothing, if it is to get nothing."""
        if rank in self._benched:  # one failure of the member takes many samples with it
            return None
        self._failures[rank] += 1
        if self._failures[rank] < self._bench_after:
            return None
        self._benched.add(rank)
        return min(MAX_BENCH_S, BENCH_S * 2.0 ** (self._failures[rank] - self._bench_after))

    def back(self, rank: int) -> None:
        """It may be tried again: one sample at first, more once that has succeeded."""
        self._benched.discard(rank)
        self._eased.add(rank)

    def lose(self, rank: int) -> None:
        """It is gone, for good unless somebody brings it back."""
        self._lost.add(rank)

    def regain(self, rank: int) -> None:
        """Another one has taken its place. After failures in a row it is on trial, as its predecessor would be."""
        self._lost.discard(rank)
        self.back(rank)

    def _list(self, rank: int) -> None:
        """See to it that no entry that counts has more than the member's load."""
        load = self.in_flight[rank] / self.capacities[rank]
        if load >= self._listed[rank] or rank in self._lost:
            return
        self._listed[rank] = load
        heapq.heappush(self._heap, (load, self._tie[rank], rank))
        if len(self._heap) > MAX_ENTRIES * len(self.capacities):  # most of them no longer count
            self._list_all()

    def _list_all(self) -> None:
        self._listed = [in_flight / capacity for in_flight, capacity in zip(self.in_flight, self.capacities, strict=True)]
        self._heap = list(zip(self._listed, self._tie, range(len(self._tie)), strict=True))
        heapq.heapify(self._heap)


class Router:
    """Places samples on engines as long as there is room."""

    def __init__(self, slots: Sequence[int], rng: random.Random, max_in_flight: int | None = None) -> None:
        self.engines = Pool(slots, rng)
        self.num_slots = sum(slots)
        self.stretch = 1.0
        """Samples under way for each slot that keep it busy."""
        self._max_in_flight = max_in_flight
        self._num_in_flight = 0
        self._alive_s = self._in_slot_s = 0.0
        self._decay = 1.0 - 1.0 / max(64, self.num_slots)

    @property
    def limit(self) -> int:
        """Samples that may be under way in all."""
        limit = sum(ceil(self.stretch * slots) + self._reserve(slots) for slots in self.engines.capacities)
        return limit if self._max_in_flight is None else min(limit, self._max_in_flight)

    def pick(self, preferred: int = -1) -> int | None:
        """The engine for one more sample; None when there is no room anywhere."""
        if self._max_in_flight is not None and self._num_in_flight >= self._max_in_flight:
            return None
        engines = self.engines
        if preferred >= 0 and engines.in_flight[preferred] < self.stretch * engines.capacities[preferred] and engines.is_usable(preferred):
            return preferred
        rank = engines.least_loaded()
        if rank is None:
            return None
        slots = engines.capacities[rank]
        return rank if engines.in_flight[rank] < ceil(self.stretch * slots) + self._reserve(slots) else None

    def leased(self, engine: int) -> None:
        self._num_in_flight += 1
        self.engines.add(engine)

    def ended(self, engine: int) -> None:
        self._num_in_flight -= 1
        self.engines.remove(engine)

    def observe(self, alive_s: float, waiting_s: float, in_slot_s: float) -> None:
        """A sample was under way for `alive_s`, of which it waited for a slot and was in one."""
        self._alive_s = self._alive_s * self._decay + max(0.0, alive_s - waiting_s)
        self._in_slot_s = self._in_slot_s * self._decay + in_slot_s
        if self._in_slot_s > 0:
            self.stretch = min(MAX_STRETCH, max(1.0, self._alive_s / self._in_slot_s))

    @staticmethod
    def _reserve(slots: int) -> int:
        return max(1, slots // RESERVE)
