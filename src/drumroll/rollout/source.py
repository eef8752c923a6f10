"""Where groups come from: the endless stream of training tasks, or a list to be evaluated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drumroll.data.cursor import TaskCursor
from drumroll.types import Task


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One task to be attempted `size` times."""

    group_id: str
    task: Task
    size: int
    seed_parts: tuple[str | int, ...]
    """What the samples' seeds depend on, besides the root seed, the task and the sample's number."""
    times_put_off: int = 0
    """How often it was begun and put off to a later round."""

    @property
    def name(self) -> str:
        """Of the group that it becomes: one that comes back after being put off is a new one."""
        return f"{self.group_id}+{self.times_put_off}" if self.times_put_off else self.group_id


class Source(Protocol):
    """What the scheduler draws groups from, on its own thread."""

    def draw(self) -> GroupRequest | None:
        """The next group; None when there is none left."""
        ...

    def settle(self, group_id: str) -> None:
        """The group was consumed or rejected, and will not be asked for again."""
        ...


class ListSource:
    """Exactly these groups."""

    def __init__(self, requests: Sequence[GroupRequest]) -> None:
        self._requests = deque(requests)

    def draw(self) -> GroupRequest | None:
        return self._requests.popleft() if self._requests else None

    def settle(self, group_id: str) -> None:
        pass


class TaskSource:
    """Training tasks without end, in rounds: names say round and place, such as `train/000003/0017`.

    Its state holds every group that was drawn and not settled, so that none is lost when a run goes on from a checkpoint.
    Without filters, redundancy and staleness a round is a step.
    """

    def __init__(self, cursor: TaskCursor, groups_per_round: int, group_size: int, attempt: Callable[[], int] = lambda: 0) -> None:
        """`attempt` counts how often the run went back to draw other samples; seeds depend on it."""
        self._cursor = cursor
        self._groups_per_round = groups_per_round
        self._group_size = group_size
        self._attempt = attempt
        self._round = 0
        self._queue: deque[tuple[str, int]] = deque()
        """Group id and number of the task."""
        self._drawn: dict[str, int] = {}
        self._lock = threading.Lock()

    def draw(self) -> GroupRequest:
        with self._lock:
            if not self._queue:
                self._round += 1
                numbers = self._cursor.take_numbers(self._groups_per_round)
                self._queue.extend((f"train/{self._round:06d}/{place:04d}", number) for place, number in enumerate(numbers))
            group_id, number = self._queue.popleft()
            self._drawn[group_id] = number
            attempt = self._attempt()
            return GroupRequest(
                group_id, self._cursor.tasks[number], self._group_size, (group_id, f"attempt-{attempt}") if attempt else (group_id,)
            )

    def settle(self, group_id: str) -> None:
        with self._lock:
            del self._drawn[group_id]

    def state(self) -> dict[str, Any]:
        with self._lock:
            waiting = [*self._drawn.items(), *self._queue]
            return {"cursor": self._cursor.state(), "round": self._round, "waiting": [list(pair) for pair in waiting]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Whatever was drawn and not settled comes first again."""
        with self._lock:
            self._cursor.load_state(state["cursor"])
            self._round = state["round"]
            self._queue = deque((group_id, number) for group_id, number in state["waiting"])
            self._drawn = {}
