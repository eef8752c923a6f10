"""A dataset row as an environment of one turn."""

from __future__ import annotations

from typing import ClassVar

from drumroll.envs.base import Env, Step
from drumroll.registry import register
from drumroll.types import Task


@register.env("single_turn")
class SingleTurn(Env):
    """Shows the task's prompt and is done after the first reply; the reward functions judge it."""

    needs_prompt: ClassVar[bool] = True

    async def start(self, task: Task) -> Step:
        return Step(prompt=task.prompt, messages=task.messages)

    async def step(self, reply: str) -> Step:
        return Step(done=True)
