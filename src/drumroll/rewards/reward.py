"""One reward as its config says, asked in this process.

A reward is a function of a trajectory that returns a number, a mapping of named numbers, or None where it does not apply.
Plain functions run in threads, so that a slow one does not hold up other episodes: they may be called from several threads
at the same time. `async` functions run on the event loop. How many trajectories a reward thinks about at a time is its attribute
`concurrency`, where it has one; its deadline begins with its turn. Whatever goes wrong is an error, and never a reward of zero.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from drumroll.config.models import RewardConfig
from drumroll.errors import RewardError, place_of
from drumroll.registry import REGISTRY, Entry, bind
from drumroll.rewards.place import Place
from drumroll.types import Task, Trajectory

LARGEST = 1e6
"""A reward beyond this is a mistake: training on it would destroy the model."""

CONCURRENCY = 8
"""Trajectories that a reward thinks about at a time, unless it says otherwise."""

Parts = dict[str, float]
"""What a reward gives, by name; empty where it does not apply."""


class Reward:
    """A reward, ready to be asked. Example: `await Reward(config).ask(trajectory)` → `{"exact_match": 1.0}`."""

    def __init__(self, config: RewardConfig, name: str | None = None) -> None:
        """`name` is for parts and messages; the registered name otherwise."""
        entry = REGISTRY.lookup("reward", config.kind)
        self.name = name or entry.short_name
        self.config = config
        self._function = _build(entry, config)
        self._turns = asyncio.Semaphore(getattr(self._function, "concurrency", CONCURRENCY))
        self._threads: ThreadPoolExecutor | None = None
        self.is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - whether its `__call__` is a coroutine function, not whether it has one
        )

    async def start(self, place: Place) -> None:
        """Let it get ready in the process that will ask it."""
        start = getattr(self._function, "start", None)
        if start is not None:
            await start(place)

    async def close(self) -> None:
        """Let it give back what `start` took."""
        close = getattr(self._function, "close", None)
        if close is not None:
            await close()

    def check_task(self, task: Task) -> None:
        """Let it say, by a `ValueError`, that it could not judge any attempt at this task."""
        check = getattr(self._function, "check_task", None)
        if check is not None:
            check(task)

    def compute(self, trajectory: Trajectory) -> Parts:
        """Ask a plain function, here and now."""
        try:
            value = self._function(trajectory)
        except Exception as error:
            raise self._failed(error, trajectory) from error
        return self._parts(value, trajectory)

    async def ask(self, trajectory: Trajectory, deadline_s: float) -> Parts:
        """What it says, in time; otherwise a `RewardError`."""
        async with self._turns:
            try:
                async with asyncio.timeout(deadline_s) as deadline:
                    if self.is_async:
                        return self._parts(await self._function(trajectory), trajectory)
                    self._threads = self._threads or ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=self.name)
                    return await asyncio.get_running_loop().run_in_executor(self._threads, self.compute, trajectory)
            except RewardError:
                raise
            except Exception as error:
                if not deadline.expired():
                    raise self._failed(error, trajectory) from error
                if self._threads is not None:  # one of them is held up: the next questions get others
                    self._threads.shutdown(wait=False)
                    self._threads = None
                raise RewardError(overdue(self.name, trajectory, deadline_s)) from error

    def _failed(self, error: Exception, trajectory: Trajectory) -> RewardError:
        return RewardError(f"reward '{self.name}' failed on task '{trajectory.task.id}': {type(error).__name__}: {error}{place_of(error)}")

    def _parts(self, value: Any, trajectory: Trajectory) -> Parts:
        if not isinstance(value, Mapping):
            return {} if value is None else {self.name: _number(value, self.name, trajectory)}
        named = {f"{self.name}/{key}": item for key, item in value.items() if item is not None}
        return {name: _number(item, name, trajectory) for name, item in named.items()}


def overdue(name: str, trajectory: Trajectory, deadline_s: float) -> str:
    return f"reward '{name}' on task '{trajectory.task.id}' took longer than {deadline_s:g} s."


def _build(entry: Entry, config: RewardConfig) -> Callable[[Trajectory], Any]:
    if inspect.isclass(entry.target):
        return cast(Callable[[Trajectory], Any], cast(Callable[..., Any], entry.target)(config))
    return bind(entry, {name: getattr(config, name) for name in type(config).model_fields if name not in RewardConfig.model_fields})


def _number(value: Any, name: str, trajectory: Trajectory) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        problem = f"returned {str(value)[:60]!r} ({type(value).__name__})"
    elif math.isfinite(number := float(value)) and abs(number) <= LARGEST:
        return number
    else:
        problem = f"returned {number}"
    raise RewardError(
        f"reward '{name}' on task '{trajectory.task.id}' {problem}: a number between ±{LARGEST:g}, a mapping of names to such numbers, "
        f"or None (does not apply) was expected."
    )
