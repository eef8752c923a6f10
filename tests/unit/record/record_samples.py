"""Trajectories to record."""

from __future__ import annotations

from typing import Any

import numpy as np

from drumroll.types import Sampling, Task, Trajectory, Turn


def make_trajectory(sample_id: str = "train/1/t0/0", reply: str = "1234", task: Task | None = None, **changes: Any) -> Trajectory:
    """Three prompt tokens and two of the policy, unless `changes` say otherwise."""
    values: dict[str, Any] = {
        "sample_id": sample_id,
        "group_id": "train/1/t0",
        "task": task or Task(id="t0", prompt="sort 3142=", data={"answer": "1234"}),
        "turns": (Turn("environment", 0, 3, "sort 3142="), Turn("policy", 3, 5, reply)),
        "token_ids": np.array([5, 6, 7, 8, 2], np.int32),
        "loss_mask": np.array([0, 0, 0, 1, 1], np.bool_),
        "logp": np.array([0, 0, 0, -0.5, -0.25], np.float32),
        "token_version": np.array([-1, -1, -1, 0, 1], np.int32),
        "sampling": Sampling(temperature=1.0, stop=("\n",)),
        "seed": 2**62 + 1,
        "reward": 1.0,
        "stop_reason": "stop",
        "reward_parts": {"exact_match": 1.0},
        "success": True,
        "timings": {"leased": 100.0, "finished": 101.5, "generate_s": 1.25},
        "metrics": {"turns": 1.0},
    }
    return Trajectory(**{**values, **changes})
