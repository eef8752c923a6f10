"""The learning rate of every update."""

from __future__ import annotations

import math

from drumroll.config.models import TrainerConfig


def learning_rate(config: TrainerConfig, peak: float, update: int, total_updates: int) -> float:
    """Of update number `update`, from 0: a linear rise over the warm-up, then the schedule, which ends at the last update."""
    if update < config.warmup_updates:
        return peak * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return peak
    done = (update - config.warmup_updates) / max(1, total_updates - 1 - config.warmup_updates)
    done = min(1.0, done)
    share = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
