"""Replies to judge, and the built-in rewards that judge them."""

from typing import Any

import numpy as np

from drumroll.config.models import RewardConfig
from drumroll.registry import REGISTRY
from drumroll.types import Sampling, Task, Trajectory, Turn


def trajectory(reply: str, num_tokens: int = 1, max_new_tokens: int = 128, **data: Any) -> Trajectory:
    """A reply of so many tokens to a task with these columns."""
    return attempt(Task("t-7", prompt="?", data=data), reply, num_tokens, max_new_tokens)


def attempt(task: Task, reply: str, num_tokens: int = 1, max_new_tokens: int = 128) -> Trajectory:
    """A reply of so many tokens to this task."""
    mask = np.array([False] + [True] * num_tokens)
    return Trajectory(
        sample_id=f"train/1/{task.id}/0",
        group_id=f"train/1/{task.id}",
        task=task,
        turns=(Turn("environment", 0, 1, "?"), Turn("policy", 1, 1 + num_tokens, reply)),
        token_ids=mask.astype(np.int32),
        loss_mask=mask,
        logp=np.zeros(len(mask), np.float32),
        token_version=np.zeros(len(mask), np.int32),
        sampling=Sampling(max_new_tokens=max_new_tokens),
        seed=0,
        reward=None,
        stop_reason="stop",
    )


def reward(kind: str, **options: Any) -> Any:
    """A built-in reward that is a class, with its options checked as those of a config."""
    entry = REGISTRY.lookup("reward", kind)
    return entry.target(entry.schema(RewardConfig)(kind=kind, **options))
