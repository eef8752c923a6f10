"""A loss that hangs on one rank, once, as a plugin file."""

import os
import time
from pathlib import Path

import torch.distributed

from drumroll.algo.loss import ppo_clip
from drumroll.registry import register


@register.loss("hangs_once")
def hangs_once(logp, batch, *, marker: str = "", rank: int = 1, call: int = 3):
    """PPO's clipped surrogate, at whose call of that number one rank sleeps, unless the marker is there already."""
    hangs_once.calls = getattr(hangs_once, "calls", 0) + 1
    if hangs_once.calls == call and torch.distributed.get_rank() == rank and not os.path.exists(marker):
        Path(marker).touch()
        time.sleep(1000)
    return ppo_clip(logp, batch)
