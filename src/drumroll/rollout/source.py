"""Where groups come from: the endless stream of training tasks, a mixture of several, or a list to be evaluated."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, Protocol

from drumroll.data.curriculum import Curriculum
from drumroll.data.cursor import TaskCursor
from drumroll.types import SampleInfo, Sampling, Task

PLAIN = Sampling()


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One task to be attempted `size` times."""

    group_id: str
    task: Task
    size: int
    seed_parts: tuple[str | int, ...]
    """What the samples' seeds depend on, besides the root seed, the task and the sample's number."""
    sampling: Sampling = PLAIN
    times_put_off: int = 0
    """How often it was begun and put off to a later round."""
    has_greedy: bool = False
    """The first attempt is greedy, for the others to be compared with."""

    def sampling_of(self, number: int) -> Sampling:
        """How attempt `number` is sampled."""
        return replace(self.sampling, temperature=0.0) if self.has_greedy and number == 0 else self.sampling

    @property
    def name(self) -> str:
        """Of the group that it becomes: one that comes back after being put off is a new one."""
        return f"{self.group_id}+{self.times_put_off}" if self.times_put_off else self.group_id


Fate = Literal["consumed", "rejected", "surplus", "quarantined"]
"""What became of a group: trained on, of no use, more than a step needed, or of a task that always fails."""


class Source(Protocol):
    """What the scheduler draws groups from, on its own thread."""

    def draw(self) -> GroupRequest | None:
        """The next group; None when there is none left."""
        ...

    def settle(self, group_id: str, fate: Fate, samples: Sequence[SampleInfo]) -> None:
        """The group will not be asked for again; `samples` are its members that have ended by themselves."""
        ...


class ListSource:
    """Exactly these groups."""

    def __init__(self, requests: Sequence[GroupRequest]) -> None:
        self._requests = deque(requests)

    def draw(self) -> GroupRequest | None:
        return self._requests.popleft() if self._requests else None

    def settle(self, group_id: str, fate: Fate, samples: Sequence[SampleInfo]) -> None:
        pass


class TaskSource:
    """Training tasks without end, in rounds: names say round and place, such as `train/000003/0017`.

    Its state holds every group that was drawn and not settled, so that none is lost when a run goes on from a checkpoint.
    Without filters, redundancy and staleness a round is a step.
    """

    def __init__(
        self,
        tasks: TaskCursor | Curriculum,
        *,
        groups_per_round: int,
        group_size: int,
        sampling: Sampling = PLAIN,
        label: str = "train",
        attempt: Callable[[], int] = lambda: 0,
        has_greedy: bool = False,
    ) -> None:
        """`label` begins every group's name. `attempt` counts how often the run went back to draw other samples; seeds depend on it.
        With `has_greedy` the first attempt of every group is greedy."""
        self._tasks = tasks
        self._groups_per_round = groups_per_round
        self._group_size = group_size
        self._sampling = sampling
        self._label = label
        self._attempt = attempt
        self._has_greedy = has_greedy
        self._round = 0
        self._queue: deque[tuple[str, int]] = deque()
        """Group id and number of the task."""
        self._drawn: dict[str, int] = {}
        self._quarantined: set[int] = set()
        """Numbers of tasks that are not drawn any more."""
        self._lock = threading.Lock()

    def draw(self) -> GroupRequest | None:
        with self._lock:
            while not self._queue:
                if len(self._quarantined) == len(self._tasks.tasks):
                    return None
                self._round += 1
                numbers = [number for number in self._tasks.take_numbers(self._groups_per_round) if number not in self._quarantined]
                self._queue.extend((f"{self._label}/{self._round:06d}/{place:04d}", number) for place, number in enumerate(numbers))
            group_id, number = self._queue.popleft()
            self._drawn[group_id] = number
            attempt = self._attempt()
            seed_parts = (group_id, f"attempt-{attempt}") if attempt else (group_id,)
            task = self._tasks.tasks[number]
            return GroupRequest(group_id, task, self._group_size, seed_parts, self._sampling, has_greedy=self._has_greedy)

    def settle(self, group_id: str, fate: Fate, samples: Sequence[SampleInfo]) -> None:
        with self._lock:
            number = self._drawn.pop(group_id)
            if fate == "quarantined":
                self._quarantined.add(number)
                self._queue = deque(pair for pair in self._queue if pair[1] != number)
            rate = success_rate(samples)
            if rate is not None and fate != "surplus" and isinstance(self._tasks, Curriculum):
                self._tasks.learn(number, rate)

    def state(self) -> dict[str, Any]:
        with self._lock:
            waiting = [*self._drawn.items(), *self._queue]
            return {
                "cursor": self._tasks.state(),
                "round": self._round,
                "waiting": [list(pair) for pair in waiting],
                "quarantined": sorted(self._quarantined),
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Whatever was drawn and not settled comes first again."""
        with self._lock:
            self._tasks.load_state(state["cursor"])
            self._round = state["round"]
            self._queue = deque((group_id, number) for group_id, number in state["waiting"])
            self._drawn = {}
            self._quarantined = set(state.get("quarantined", ()))


class Mixture:
    """Several sources, drawn from by shares.

    Among the groups that were drawn and not rejected, every source's number is at any time less than one away from its share of
    all: exact whenever its share comes out even. A group that was rejected or not needed is made up for by the same source, so
    that a domain with many rejections has its share of the training all the same, and which groups a synchronous step trains on
    does not depend on the order in which results arrive.
    """

    def __init__(self, sources: Mapping[str, TaskSource], shares: Mapping[str, float]) -> None:
        self._sources = {name: source for name, source in sources.items() if shares[name] > 0}
        self._shares = {name: shares[name] for name in self._sources}
        self._counts: Counter[str] = Counter()
        """Groups drawn from each and not rejected."""
        self._owed: Counter[str] = Counter()
        """Of them, groups whose place is to be taken by another one."""
        self._drawn: dict[str, str] = {}
        """Where each group under way is from."""
        self._lock = threading.Lock()

    def draw(self) -> GroupRequest | None:
        with self._lock:
            name = self._next()
            request = self._sources[name].draw()
            if request is not None:
                self._drawn[request.group_id] = name
            return request

    def settle(self, group_id: str, fate: Fate, samples: Sequence[SampleInfo]) -> None:
        with self._lock:
            name = self._drawn.pop(group_id)
            if fate != "consumed":
                self._owed[name] += 1
            self._sources[name].settle(group_id, fate, samples)

    def state(self) -> dict[str, Any]:
        """Groups under way will be drawn again, so that they are owed like rejected ones."""
        with self._lock:
            return {
                "counts": dict(self._counts),
                "owed": dict(self._owed + Counter(self._drawn.values())),
                "sources": {name: source.state() for name, source in self._sources.items()},
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._counts = Counter(state["counts"])
            self._owed = Counter(state["owed"])
            self._drawn = {}
            for name, source in self._sources.items():
                source.load_state(state["sources"][name])

    def _next(self) -> str:
        """Whose turn it is. Of the sources that are behind their shares by enough, the one that must be served soonest: Tijdeman's
        rule for the chairman assignment problem, which keeps every count within one of its share."""
        for name in self._sources:
            if self._owed[name] > 0:
                self._owed[name] -= 1
                return name
        slack = 1.0 / max(2, 2 * len(self._sources) - 2)
        total = self._counts.total() + 1
        behind = {name: share * total - self._counts[name] for name, share in self._shares.items()}
        due = [name for name in behind if behind[name] >= slack - 1e-9] or [max(behind, key=behind.__getitem__)]
        name = min(due, key=lambda name: (1.0 - slack - behind[name]) / self._shares[name])
        self._counts[name] += 1
        return name


def success_rate(samples: Sequence[SampleInfo]) -> float | None:
    """Share of successes, or the mean reward held between 0 and 1 where nobody states success; None without a verdict."""
    judged = [sample for sample in samples if sample.reward is not None]
    successes = [float(sample.success) for sample in judged if sample.success is not None]
    if successes:
        return fmean(successes)
    return min(1.0, max(0.0, fmean(sample.reward or 0.0 for sample in judged))) if judged else None
