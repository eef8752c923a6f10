"""Environments that go wrong for some seeds, as a plugin file."""

import asyncio

import numpy as np

from drumroll.config.models import EnvConfig
from drumroll.envs.base import Env, Step
from drumroll.envs.blocking import BlockingConfig, BlockingEnv
from drumroll.registry import register

LEAKED: list[np.ndarray] = []


@register.env("bad_room")
class BadRoom(Env):
    """Raises at seed 1, hangs at seed 2, returns a text at seed 3, never ends at seed 4; others are done after two replies."""

    class Config(EnvConfig):
        kind: str = "bad_room"

    async def start(self, task):
        self.seed, self.left = task.data["seed"], 2
        return Step(prompt="1=")

    async def step(self, reply):
        self.left -= 1
        match self.seed:
            case 1:
                raise OSError("the door is stuck")
            case 2:
                await asyncio.Event().wait()
            case 3:
                return "a text"
            case 4:
                return Step(prompt="2=", reward=0.0)
        return Step(prompt="2=", done=self.left == 0, reward=0.1 * len(set(reply)), success=bool(reply))


@register.env("leaking_room")
class LeakingRoom(BlockingEnv):
    """Takes memory that it never gives back, at seed 5."""

    class Config(BlockingConfig):
        kind: str = "leaking_room"
        runs_in: str = "process"
        num_processes: int = 1
        process_memory_mib: int = 1024

    def begin(self, task):
        self.seed = task.data["seed"]
        return Step(prompt="1=")

    def act(self, reply):
        if self.seed == 5:
            while True:
                LEAKED.append(np.empty(64 << 20, dtype=np.uint8))  # not touched, which would take seconds on a busy machine
        return Step(done=True, reward=0.1 * len(set(reply)), success=bool(reply))
