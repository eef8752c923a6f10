"""FrozenLake whose ice is slow: every move is answered after a time drawn from a lognormal distribution, as tools and web pages are."""

import asyncio
import math
import random
from statistics import NormalDist

from drumroll.envs.base import Step
from drumroll.envs.frozen_lake import FrozenLake
from drumroll.registry import register
from drumroll.types import Task

TEN_TIMES = math.log(10) / NormalDist().inv_cdf(0.99)
"""Standard deviation of the logarithm where the 99th percentile is ten times the median."""


@register.env("slow_lake")
class SlowLake(FrozenLake):
    """Pauses that depend on the map and on the moves so far alone."""

    class Config(FrozenLake.Config):
        kind: str = "slow_lake"
        median_s: float = 0.2
        """Half of the pauses are shorter."""

    config: Config

    async def start(self, task: Task) -> Step:
        self.story = task.id
        return await super().start(task)

    async def step(self, reply: str) -> Step:
        self.story += f" {reply}"
        await asyncio.sleep(self.config.median_s * math.exp(TEN_TIMES * random.Random(self.story).gauss(0.0, 1.0)))
        return await super().step(reply)
