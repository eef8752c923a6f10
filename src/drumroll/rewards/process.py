"""Plain reward functions in a process of their own, which can be ended when one hangs, crashes or eats the memory.

One trajectory at a time. A child that does not answer in time is killed; the next question starts another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from drumroll.child import Child, ChildDied
from drumroll.config.models import RewardConfig
from drumroll.errors import RewardError
from drumroll.luggage import Luggage
from drumroll.registry import REGISTRY
from drumroll.rewards.reward import Parts, Reward, overdue
from drumroll.types import Trajectory

Question = tuple[int, Trajectory]
Answer = tuple[bool, Parts | str]
"""Whether there is a verdict, and the verdict or why there is none."""


class RewardProcess:
    """A child process with rewards. Example: `await RewardProcess({0: config}, {0: "math"}).ask(0, trajectory, deadline_s=5.0)`."""

    def __init__(self, configs: Mapping[int, RewardConfig], names: Mapping[int, str]) -> None:
        self._configs = dict(configs)
        self._names = dict(names)
        self._child: Child | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Bring the child up. The first question does that, too."""
        async with self._turn:
            await self._ensure()

    async def ask(self, number: int, trajectory: Trajectory, deadline_s: float) -> Parts:
        """What the reward says; a `RewardError` when it fails, dies, or has not answered `deadline_s` after its turn came."""
        async with self._turn:
            child = await self._ensure()
            name = self._names[number]
            try:
                async with asyncio.timeout(deadline_s):
                    ok, answer = await child.ask((number, trajectory))
            except TimeoutError:
                await child.end()
                raise RewardError(overdue(name, trajectory, deadline_s)) from None
            except ChildDied as died:
                raise RewardError(f"reward '{name}' on task '{trajectory.task.id}': its process died ({died}).") from None
            except BaseException:  # cancelled: its answer would be taken for that to the next question
                await asyncio.shield(child.end())
                raise
            if not ok:
                raise RewardError(answer)
            return dict(answer)

    async def close(self) -> None:
        if self._child is not None:
            await self._child.end()

    async def _ensure(self) -> Child:
        """The child that is there, or a new one."""
        if self._child is None or not self._child.alive:
            kinds = {number: (config.kind, config.model_dump(mode="json")) for number, config in self._configs.items()}
            try:
                self._child = await Child.start("drumroll.rewards.process:open_rewards", (Luggage.pack(), kinds, self._names))
            except ChildDied as died:
                raise RewardError(f"the process of the rewards {', '.join(self._names.values())} did not start: {died}") from None
        return self._child


def open_rewards(
    hello: tuple[Luggage, Mapping[int, tuple[str, dict[str, Any]]], Mapping[int, str]],
) -> Callable[[Question], Answer]:
    """The child's side: rewards by number, with their options and names; the function that asks them."""
    luggage, kinds, names = hello
    luggage.unpack()
    schemas = {number: REGISTRY.lookup("reward", kind).schema(RewardConfig) for number, (kind, _) in kinds.items()}
    rewards = {number: Reward(schemas[number].model_validate(options), names[number]) for number, (_, options) in kinds.items()}

    def answer(question: Question) -> Answer:
        number, trajectory = question
        try:
            return True, rewards[number].compute(trajectory)
        except RewardError as error:
            return False, str(error)

    return answer
