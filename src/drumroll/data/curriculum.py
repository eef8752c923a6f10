"""Tasks of the right difficulty first, as far as samples have shown it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumroll.config.models import CurriculumConfig
from drumroll.data.cursor import TaskCursor
from drumroll.errors import DataError
from drumroll.types import Task


class Curriculum:
    """Draws from a cursor, and prefers tasks whose measured success rate is near the target.

    The next tasks of the cursor wait in a window. Every draw takes those out of it that have been passed over too often, then
    those nearest to the target; a task of which nothing is known counts as right on it. So every task has its turn in every
    epoch, only sooner or later. The order is a function of the cursor's seed and of what was measured before each draw.
    """

    def __init__(self, cursor: TaskCursor, config: CurriculumConfig) -> None:
        self._cursor = cursor
        self._config = config
        self._window: list[list[int]] = []
        """Number of the task and draws that have passed over it, in the order of the cursor."""
        self._rates: dict[str, float] = {}
        """Success rate of each level, or of each task where there are no levels."""

    @property
    def tasks(self) -> list[Task]:
        return list(self._cursor.tasks)

    def __len__(self) -> int:
        return len(self._cursor)

    def take_numbers(self, n: int) -> list[int]:
        """The next `n` tasks, as places in `tasks`."""
        self._window += [[number, 0] for number in self._cursor.take_numbers(max(0, self._config.lookahead * n - len(self._window)))]
        order = sorted(range(len(self._window)), key=lambda place: self._rank(*self._window[place]))
        taken = sorted(order[:n])
        numbers = [self._window[place][0] for place in taken]
        self._window = [[number, passed + 1] for place, (number, passed) in enumerate(self._window) if place not in set(taken)]
        return numbers

    def learn(self, number: int, rate: float) -> None:
        """A group of samples of this task had this success rate."""
        level = self._level(number)
        keep = self._config.memory if level in self._rates else 0.0
        self._rates[level] = keep * self._rates.get(level, 0.0) + (1.0 - keep) * rate

    def state(self) -> dict[str, Any]:
        return {"cursor": self._cursor.state(), "window": self._window, "rates": self._rates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state(state["cursor"])
        self._window = [list(entry) for entry in state["window"]]
        self._rates = dict(state["rates"])

    def _rank(self, number: int, passed: int) -> tuple[bool, float]:
        """The smallest go first; equal ones in the order of the cursor."""
        rate = self._rates.get(self._level(number), self._config.target)
        if passed >= self._config.patience:
            return False, -passed
        return True, abs(rate - self._config.target)

    def _level(self, number: int) -> str:
        task, column = self._cursor.tasks[number], self._config.level_field
        if column is None:
            return task.id
        if column not in task.data:
            raise DataError(f"task '{task.id}' has no column '{column}' (`curriculum.level_field`).")
        return str(task.data[column])
