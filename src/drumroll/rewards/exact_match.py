"""The reply must be the answer."""

from __future__ import annotations

from drumroll.registry import register
from drumroll.types import Trajectory


@register.reward("exact_match")
def exact_match(trajectory: Trajectory, *, field: str = "answer", strip: bool = True) -> float:
    """1.0 when the last reply equals the task's answer, else 0.0; `strip` ignores space around both."""
    reply, answer = trajectory.last_reply, str(trajectory.task.data[field])
    return float(reply.strip() == answer.strip() if strip else reply == answer)
