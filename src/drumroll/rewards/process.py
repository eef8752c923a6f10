"""Plain reward functions in processes of their own, which can be ended when one hangs, crashes or eats the memory.

    question ──► turn: one computes ──► a child that has nothing to do, or another one ──► verdict
                       │ takes far longer than others did                   │ overdue, or dead
                       └──► the next one has its turn beside it             └──► killed

One trajectory at a time, so that a worker uses one core. A question that takes far longer than others did keeps nobody waiting, up to
`MOST_CHILDREN` of them: whoever comes next is answered by another child, forked from a nursery that has imported everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from drumroll.child import Child, ChildDied, Nursery
from drumroll.config.models import RewardConfig
from drumroll.errors import RewardError
from drumroll.luggage import Luggage
from drumroll.registry import REGISTRY
from drumroll.rewards.reward import Parts, Reward, overdue
from drumroll.types import Trajectory

Question = tuple[int, Trajectory]
Answer = tuple[bool, Parts | str]
"""Whether there is a verdict, and the verdict or why there is none."""

MOST_CHILDREN = 8
FAR_LONGER = 4.0
"""Times as long as the longest of late: a question that takes more than this keeps nobody waiting any longer."""
LEAST_PATIENCE_S = 0.25
FORGETTING = 0.98
"""How much of the longest time is left after each question that took less."""


class RewardProcesses:
    """Child processes with rewards. Example: `await RewardProcesses({0: config}, {0: "math"}).ask(0, trajectory, deadline_s=5.0)`."""

    def __init__(self, configs: Mapping[int, RewardConfig], names: Mapping[int, str]) -> None:
        self._configs = dict(configs)
        self._names = dict(names)
        self._nursery: Nursery | None = None
        self._nursery_turn = asyncio.Lock()
        self._idle: list[Child] = []
        self._room = asyncio.Semaphore(MOST_CHILDREN)
        self._turn = asyncio.Semaphore(1)
        self._longest_s: float | None = None
        """That a question took of late; None before the first answer."""

    async def start(self) -> None:
        """Bring a child up. The first question does that, too."""
        self._idle.append(await self._child())

    async def ask(self, number: int, trajectory: Trajectory, deadline_s: float) -> Parts:
        """What the reward says; a `RewardError` when it fails, dies, or has not answered `deadline_s` after its turn came."""
        name = self._names[number]
        async with self._room, self._my_turn(deadline_s):
            child = await self._child()
            began = time.monotonic()
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
            self._longest_s = max(time.monotonic() - began, FORGETTING * (self._longest_s or 0.0))
            self._idle.append(child)
        if not ok:
            raise RewardError(answer)
        return dict(answer)

    async def close(self) -> None:
        for child in self._idle:
            await child.end()
        if self._nursery is not None:
            await self._nursery.end()

    @asynccontextmanager
    async def _my_turn(self, deadline_s: float) -> AsyncIterator[None]:
        """From its turn on, until it is through or has taken so long that others need not wait for it."""
        await self._turn.acquire()
        is_over = False
        patience_s = deadline_s / 2 if self._longest_s is None else max(LEAST_PATIENCE_S, FAR_LONGER * self._longest_s)

        def give_turn_away() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._turn.release()

        patience = asyncio.get_running_loop().call_later(patience_s, give_turn_away)
        try:
            yield
        finally:
            patience.cancel()
            give_turn_away()

    async def _child(self) -> Child:
        """One that has nothing to do, or a new one."""
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
        had_nursery = self._nursery is not None and self._nursery.alive
        try:
            async with self._nursery_turn:
                if self._nursery is None or not self._nursery.alive:
                    kinds = {number: (config.kind, config.model_dump(mode="json")) for number, config in self._configs.items()}
                    self._nursery = await Nursery.start("drumroll.rewards.process:open_rewards", (Luggage.pack(), kinds, self._names))
            return await self._nursery.child()
        except ChildDied as died:
            if had_nursery and self._nursery is not None and not self._nursery.alive:
                return await self._child()
            raise RewardError(f"the process of the rewards {', '.join(self._names.values())} did not start: {died}") from None


def open_rewards(
    hello: tuple[Luggage, Mapping[int, tuple[str, dict[str, Any]]], Mapping[int, str]],
) -> Callable[[], Callable[[Question], Answer]]:
    """The nursery's side: plugins, and the modules of the rewards by number. Its children build them with their options and names."""
    luggage, kinds, names = hello
    luggage.unpack()
    schemas = {number: REGISTRY.lookup("reward", kind).schema(RewardConfig) for number, (kind, _) in kinds.items()}

    def begin() -> Callable[[Question], Answer]:
        rewards = {number: Reward(schemas[number].model_validate(options), names[number]) for number, (_, options) in kinds.items()}

        def answer(question: Question) -> Answer:
            number, trajectory = question
            try:
                return True, rewards[number].compute(trajectory)
            except RewardError as error:
                return False, str(error)

        return answer

    return begin
