"""An environment that thinks: every reply is answered after a time drawn from a lognormal distribution, as tools and web pages are."""

import asyncio
import math
import random
from statistics import NormalDist

from drumroll.config.models import EnvConfig
from drumroll.envs.base import Env, Step
from drumroll.registry import register
from drumroll.types import Task

TEN_TIMES = math.log(10) / NormalDist().inv_cdf(0.99)
"""Standard deviation of the logarithm where the 99th percentile is ten times the median."""


@register.env("thinking")
class Thinking(Env):
    """One reply, then a pause whose length depends on task and reply alone."""

    class Config(EnvConfig):
        median_s: float = 0.1
        """Half of the pauses are shorter."""

    needs_prompt = True

    async def start(self, task: Task) -> Step:
        self.task = task
        return Step(prompt=task.prompt)

    async def step(self, reply: str) -> Step:
        chance = random.Random(f"{self.task.id} {reply}")
        await asyncio.sleep(self.config.median_s * math.exp(TEN_TIMES * chance.gauss(0.0, 1.0)))
        return Step(done=True)
