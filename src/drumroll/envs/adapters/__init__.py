"""Environments of other packages, one module for each package. All are optional: a missing package gives the line that installs it."""

from __future__ import annotations

from collections.abc import Mapping

from drumroll.envs.base import Step
from drumroll.errors import DataError
from drumroll.types import Task


def seed_of(task: Task) -> int:
    """The task's seed, which alone decides what is random in the episode."""
    seed = task.data.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise DataError(
            f"task '{task.id}' has the seed {seed!r}; a whole number from 0 was expected. "
            f"Give the tasks as `seeds: 0-999`, or a column `seed` in the rows."
        )
    return seed


def show(
    text: str,
    *,
    chat: bool,
    state: str | None = None,
    reward: float | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Step:
    """A step that goes on, as a message of the user or as plain text."""
    message = {"role": "user", "content": text}
    return Step(
        prompt=None if chat else text,
        messages=(message,) if chat else None,
        state=state,
        reward=reward,
        metrics=metrics or {},
    )
