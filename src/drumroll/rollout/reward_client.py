"""An environment worker's way to the reward workers: each sample goes to the least busy one, and elsewhere when that one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from drumroll.errors import RewardError, WorkerError, WorkerLost, WorkerUnreachable
from drumroll.rewards.reward import Parts
from drumroll.types import Trajectory

PING_EVERY_S = 5.0
PING_S = 15.0
"""A reward worker that has questions must answer a ping within this long."""
REPLACED_S = 180.0
"""Where every worker is gone, how long to wait for one that has been replaced."""
MAX_LOST = 2
"""Workers that one question may take along before it is the question's fault."""
PAUSE_S = 30.0
"""A worker that did not answer gets no questions for this long, as long as there are others."""


class Worker(Protocol):
    """One reward worker (see `cluster.Handle`)."""

    @property
    def where(self) -> str: ...

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any: ...

    async def ping(self, deadline_s: float) -> float: ...


class RewardClient:
    """Asks reward workers on behalf of many episodes at a time.

    A worker that is silent is noticed by its pings, so that how long a question may wait for its turn need not be limited: only how
    long the reward thinks about it is, by the worker.
    """

    def __init__(self, workers: Sequence[Worker], clock: Callable[[], float] | None = None) -> None:
        self._workers = list(workers)
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._num_asked = [0] * len(self._workers)
        self._resting_until = [0.0] * len(self._workers)
        self._lost: set[int] = set()
        self._watchers: dict[int, asyncio.Future[None]] = {}
        self._returned = asyncio.Event()

    def replace(self, rank: int, worker: Worker) -> None:
        """The worker of this rank is another one from now on."""
        self._workers[rank] = worker
        self._lost.discard(rank)
        self._resting_until[rank] = 0.0
        self._returned.set()

    async def ask(self, domain: str, number: int, trajectory: Trajectory, asked: list[int]) -> Parts:
        """A worker that is lost says nothing about the question, which goes elsewhere, but not for ever."""
        for _ in range(MAX_LOST):
            try:
                return await self._ask(domain, number, trajectory, asked)
            except WorkerLost as error:
                lost = error
        if not self._alive:
            raise lost
        raise RewardError(f"{MAX_LOST} reward workers in a row ended while they computed it; the last: {lost}") from lost

    async def _ask(self, domain: str, number: int, trajectory: Trajectory, asked: list[int]) -> Parts:
        if not self._alive:
            self._returned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(REPLACED_S):
                    await self._returned.wait()
        rank = self._pick(asked)
        asked.append(rank)
        worker = self._workers[rank]
        self._num_asked[rank] += 1
        question = asyncio.ensure_future(worker.call("judge", domain, number, trajectory, deadline_s=float("inf")))
        silence = self._watch(rank)
        try:
            await asyncio.wait({question, silence}, return_when=asyncio.FIRST_COMPLETED)
            if not question.done():
                raise WorkerLost(f"{worker.where} has not answered a ping for {PING_S:g} s.")
            parts: Parts = question.result()
            return parts
        except WorkerLost:
            if question.done() and self._workers[rank] is worker:
                self._lost.add(rank)
            raise
        except WorkerUnreachable as error:
            self._resting_until[rank] = self._clock() + PAUSE_S
            raise WorkerLost(str(error)) from error
        except WorkerError as error:
            raise RewardError(str(error)) from error
        finally:
            question.cancel()
            self._num_asked[rank] -= 1

    @property
    def _alive(self) -> list[int]:
        return [rank for rank in range(len(self._workers)) if rank not in self._lost]

    def _pick(self, asked: Sequence[int]) -> int:
        """The least busy worker, rather one that has not been asked and that is well."""
        if not self._alive:
            raise WorkerLost("every reward worker is gone.")
        now = self._clock()
        return min(self._alive, key=lambda rank: (rank in asked, self._resting_until[rank] > now, self._num_asked[rank], rank))

    def _watch(self, rank: int) -> asyncio.Future[None]:
        """Done when the worker is silent; one watch for all that wait for it."""
        watch = self._watchers.get(rank)
        if watch is None or watch.done():
            watch = self._watchers[rank] = asyncio.ensure_future(self._listen(rank))
        return watch

    async def _listen(self, rank: int) -> None:
        """Ping while there are questions; ends when a ping is not answered."""
        while self._num_asked[rank]:
            await asyncio.sleep(PING_EVERY_S)
            try:
                await self._workers[rank].ping(PING_S)
            except WorkerLost:
                return
            except WorkerError:
                self._resting_until[rank] = self._clock() + PAUSE_S
                return
