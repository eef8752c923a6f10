"""The learning rate of every update."""

from __future__ import annotations

import math

from drumroll.types import Schedule


def learning_rate(schedule: Schedule, update: int) -> float:
    """Of update number `update`, from 0: a linear rise over the warm-up, then the decay, which ends at the last update."""
    if update < schedule.warmup_updates:
        return schedule.lr * (update + 1) / schedule.warmup_updates
    if schedule.decay == "constant":
        return schedule.lr
    done = (update - schedule.warmup_updates) / max(1, schedule.total_updates - 1 - schedule.warmup_updates)
    done = min(1.0, done)
    share = 1.0 - done if schedule.decay == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return schedule.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share)
