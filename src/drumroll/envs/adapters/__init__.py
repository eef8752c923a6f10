"""Environments of other packages, one module for each package. All are optional: a missing package gives the line that installs it."""

from __future__ import annotations

from collections.abc import Mapping

from drumroll.envs.base import Step


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
