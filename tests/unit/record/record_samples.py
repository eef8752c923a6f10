"""Trajectories and departures to record."""

from __future__ import annotations

from typing import Any

import numpy as np

from drumroll.life import Departure, stamp
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
        "metrics": {"turns": 1.0},
    }
    return Trajectory(**{**values, **changes})


LIFE = b"".join(
    (
        stamp("admitted", 100.0, 4),
        stamp("leased", 100.25, 4, 2),
        stamp("waiting", 100.5, 4, 3),
        stamp("generating", 101.0, 5, 3, 7),
        stamp("reward", 102.5, 5, 2),
        stamp("done", 103.0, 5, 2),
        stamp("consumed", 104.0, 6),
    )
)


def leave(sample_id: str, state: str = "consumed", attempt: int = 0, **changes: Any) -> Departure:
    """The sample leaves the ledger."""
    values: dict[str, Any] = {"group_id": "train/1/t0", "task_id": "t0", "domain": "default", "life": LIFE}
    return Departure(**{"sample_id": sample_id, "state": state, "attempt": attempt, **values, **changes})


def consumed(*trajectories: Trajectory) -> tuple[list[Departure], list[Trajectory]]:
    """What `Writer.add` takes of samples that were all consumed."""
    departures = [
        leave(each.sample_id, attempt=each.attempt, group_id=each.group_id, task_id=each.task.id, domain=each.task.domain)
        for each in trajectories
    ]
    return departures, list(trajectories)
