"""Plain reward functions in processes of their own, which can be ended when one hangs, crashes or eats the memory.

One trajectory at a time in each. A child that does not answer in time is killed, and another one takes its place; until then nobody waits
for it: whoever finds every child at one question for a while gets a further one.
"""

from __future__ import annotations

import asyncio
import time
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


PATIENCE_S = 0.5
"""How long all children may be at one question each before a further one is started for those who wait."""
MOST_CHILDREN = 4


class RewardProcesses:
    """Child processes with rewards. Example: `await RewardProcesses({0: config}, {0: "math"}).ask(0, trajectory, deadline_s=5.0)`."""

    def __init__(self, configs: Mapping[int, RewardConfig], names: Mapping[int, str]) -> None:
        self._configs = dict(configs)
        self._names = dict(names)
        self._idle: asyncio.LifoQueue[Child | RewardError] = asyncio.LifoQueue()
        """Children that wait for a question, and why one did not come up, for somebody who waits for it."""
        self._busy: dict[Child, float] = {}
        """Since when each of the others is at its question."""
        self._starting: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Bring a child up. The first question does that, too."""
        self._idle.put_nowait(await self._take())

    async def ask(self, number: int, trajectory: Trajectory, deadline_s: float) -> Parts:
        """What the reward says; a `RewardError` when it fails, dies, or has not answered `deadline_s` after its turn came."""
        child, name = await self._take(), self._names[number]
        self._busy[child] = time.monotonic()
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
        finally:
            del self._busy[child]
            if child.alive:
                self._idle.put_nowait(child)
            else:
                self._begin()
        if not ok:
            raise RewardError(answer)
        return dict(answer)

    async def close(self) -> None:
        self._is_closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        children = [*self._busy]
        while not self._idle.empty():
            child = self._idle.get_nowait()
            children += [child] if isinstance(child, Child) else []
        for child in children:
            await child.end()

    async def _take(self) -> Child:
        """A child that has nothing to do, as soon as there is one."""
        if not self._busy and not self._starting and self._idle.empty():
            self._begin()
        while True:
            try:
                found = await asyncio.wait_for(self._idle.get(), PATIENCE_S)
            except TimeoutError:
                stuck = all(time.monotonic() - since >= PATIENCE_S for since in self._busy.values())
                if stuck and not self._starting and len(self._busy) < MOST_CHILDREN:
                    self._begin()
                continue
            if isinstance(found, RewardError):
                raise found
            if found.alive:
                return found
            if not self._busy and not self._starting and self._idle.empty():
                self._begin()

    def _begin(self) -> None:
        """Start a further child, for whoever comes first."""
        if self._is_closed:
            return
        task = asyncio.create_task(self._bring_up())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _bring_up(self) -> None:
        kinds = {number: (config.kind, config.model_dump(mode="json")) for number, config in self._configs.items()}
        try:
            self._idle.put_nowait(await Child.start("drumroll.rewards.process:open_rewards", (Luggage.pack(), kinds, self._names)))
        except ChildDied as died:
            reason = f"the process of the rewards {', '.join(self._names.values())} did not start: {died}"
            self._idle.put_nowait(RewardError(reason))


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
