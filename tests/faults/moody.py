"""An environment and a reward that fail in ways that a test asks for, as a plugin file."""

import asyncio
import random
import time

from drumroll.config.models import EnvConfig
from drumroll.envs.base import Step
from drumroll.envs.single_turn import SingleTurn
from drumroll.registry import register

CHANCE = random.SystemRandom()
"""Not seeded: processes that begin alike must not fail alike."""


@register.env("moody")
class Moody(SingleTurn):
    """One turn. Tasks whose row says so are poison; of all others some attempts raise, and some hang."""

    class Config(EnvConfig):
        kind: str = "moody"
        raises: float = 0.0
        hangs: float = 0.0

    async def start(self, task):
        if task.data.get("poison"):
            raise OSError(f"{task.id} is poison")
        mood = CHANCE.random()
        if mood < self.config.raises:
            raise OSError("in no mood")
        if mood < self.config.raises + self.config.hangs:
            await asyncio.Event().wait()
        return Step(prompt=task.prompt, messages=task.messages)


def sometimes_hangs(trajectory, *, share: float = 0.01) -> float:
    """Nothing, after a while that has no end for a share of the samples."""
    if CHANCE.random() < share:
        time.sleep(1000)
    return 0.0
