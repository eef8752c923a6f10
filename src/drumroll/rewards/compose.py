"""Several rewards as one verdict.

A reward is a function of a trajectory that returns a number, a mapping of named numbers, or None where it does not apply.
Plain functions run in threads, so that a slow one does not hold up other episodes: they may be called from several threads
at the same time. `async` functions run on the event loop. Whatever goes wrong in one is an error, and never a reward of zero.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from drumroll.config.models import RewardConfig
from drumroll.errors import RewardError, place_of
from drumroll.registry import REGISTRY, Entry, bind
from drumroll.types import Trajectory

LARGEST = 1e6
"""A reward beyond this is a mistake: training on it would destroy the model."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rewards say of a trajectory.

    Example: exact_match with weight 2 and a mapping: `Verdict(2.5, {"exact_match": 1.0, "style/short": 0.5}, True)`.
    """

    reward: float | None = None
    """Weighted sum; None when no reward applies."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Every reward by its name, before its weight; the parts of a mapping as `name/part`."""
    success: bool | None = None
    """Whether every applicable reward with `success_at` reached it; None when there is none."""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    function: Callable[[Trajectory], Any]
    is_async: bool
    weight: float
    success_at: float | None


class RewardSet:
    """The rewards of a config, ready to judge. Built once in each process."""

    def __init__(self, configs: Sequence[RewardConfig], deadline_s: float = 60.0) -> None:
        """`deadline_s` is how long one reward may think about one trajectory."""
        self._deadline_s = deadline_s
        self._parts: list[_Part] = []
        for config in configs:
            entry = REGISTRY.lookup("reward", config.kind)
            function = _build(entry, config)
            name = _unique(entry.short_name, [part.name for part in self._parts])
            self._parts.append(_Part(name, function, _is_async(function), config.weight, config.success_at))

    @property
    def names(self) -> list[str]:
        """Names of the parts, in the order of the config."""
        return [part.name for part in self._parts]

    async def score(self, trajectory: Trajectory) -> Verdict:
        """Ask every reward; a `RewardError` when one fails, takes too long, or returns something that is no reward."""
        values = await asyncio.gather(*(self._ask(part, trajectory) for part in self._parts))
        parts: dict[str, float] = {}
        total: float | None = None
        success: bool | None = None
        for part, named in zip(self._parts, values, strict=True):
            if not named:
                continue
            parts |= named
            value = sum(named.values())
            total = (total or 0.0) + part.weight * value
            if part.success_at is not None:
                success = success is not False and value >= part.success_at
        return Verdict(total, parts, success)

    async def _ask(self, part: _Part, trajectory: Trajectory) -> dict[str, float]:
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                value = await _call(part, trajectory)
        except Exception as error:
            if deadline.expired():
                raise RewardError(
                    f"reward '{part.name}' on task '{trajectory.task.id}' took longer than {self._deadline_s:g} s."
                ) from error
            raise RewardError(
                f"reward '{part.name}' failed on task '{trajectory.task.id}': {type(error).__name__}: {error}{place_of(error)}"
            ) from error
        if not isinstance(value, Mapping):
            return {} if value is None else {part.name: _number(value, part.name, trajectory)}
        named = {f"{part.name}/{key}": item for key, item in value.items() if item is not None}
        return {name: _number(item, name, trajectory) for name, item in named.items()}


def _options(config: RewardConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in type(config).model_fields if name not in RewardConfig.model_fields}


def _build(entry: Entry, config: RewardConfig) -> Callable[[Trajectory], Any]:
    is_class = inspect.isclass(entry.target)
    return cast(Callable[[Trajectory], Any], entry.target(config)) if is_class else bind(entry, _options(config))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _call(part: _Part, trajectory: Trajectory) -> Awaitable[Any]:
    if part.is_async:
        return part.function(trajectory)  # type: ignore[no-any-return]
    return asyncio.get_running_loop().run_in_executor(None, part.function, trajectory)


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


def _unique(name: str, taken: Sequence[str]) -> str:
    candidates = (name if count == 1 else f"{name}_{count}" for count in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
