"""drumroll: reinforcement learning of large language models and agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drumroll.errors import PolicyFault
from drumroll.registry import register
from drumroll.types import Batch, Group, Task, TokenLoss, Trajectory, Turn

if TYPE_CHECKING:
    from drumroll.api import Run, evaluate, preference, resume, train

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Group",
    "PolicyFault",
    "Run",
    "Task",
    "TokenLoss",
    "Trajectory",
    "Turn",
    "evaluate",
    "preference",
    "register",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    """These are imported on first use: workers and `drumroll check` need none of them."""
    if name in ("Run", "evaluate", "preference", "resume", "train"):
        from drumroll import api

        return getattr(api, name)
    raise AttributeError(f"module 'drumroll' has no attribute '{name}'")
