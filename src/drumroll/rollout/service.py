"""The scheduler on an event-loop thread of its own, so that rollouts go on while the step loop waits for a trainer.

step loop (thread)                          scheduler (thread)
  take(stream, n, version) ── waits ──►  admits, leases, polls, filters
        ▲     ▲                                   │
        │     └───────────── Rollout ◄────────────┘
        └── errands that others leave for the step loop: done while it waits
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from drumroll.errors import RoleLost, WorkerError, WorkerLost
from drumroll.rollout.garbage import seldom_collected
from drumroll.rollout.scheduler import Limits, RolloutScheduler, Transport
from drumroll.rollout.source import Source
from drumroll.rollout.stream import Policy, Rollout, Stream

T = TypeVar("T")

STOP_S = 5.0
"""How long the end waits for the scheduler to unwind."""


class RolloutService:
    """A `RolloutScheduler` whose methods block the caller. A context manager."""

    def __init__(self, transport: Transport, *, seed: int, limits: Limits, max_in_flight: int | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-scheduler", daemon=True)
        self._scheduler = RolloutScheduler(transport, seed=seed, limits=limits, max_in_flight=max_in_flight, is_supervised=True)
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(seldom_collected())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._is_stopped:
            self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=STOP_S)
        self._exit.close()

    def open(self, source: Source, policy: Policy) -> Stream:
        return self._wait(self._open(source, policy))

    def take(self, stream: Stream, num_groups: int, version: int) -> Rollout:
        """What others have left for this thread to do is done meanwhile."""
        taken = asyncio.run_coroutine_threadsafe(self._scheduler.take(stream, num_groups, version), self._loop)
        taken.add_done_callback(lambda _: self._errands.put(None))
        try:
            while not taken.done():
                if (errand := self._errands.get()) is not None:
                    errand()
            return taken.result()
        except BaseException:
            taken.cancel()
            raise

    def leave(self, errand: Callable[[], None]) -> None:
        """Have something done by the thread that takes, while it waits. For what must not happen while that thread does something else."""
        self._errands.put(errand)

    # What a supervisor has to say, from any thread.

    def engine_out(self, rank: int) -> None:
        self._loop.call_soon_threadsafe(self._scheduler.engine_out, rank)

    def engine_back(self, rank: int) -> None:
        self._loop.call_soon_threadsafe(self._scheduler.engine_back, rank)

    def worker_out(self, rank: int, error: WorkerError) -> None:
        lost = error if isinstance(error, WorkerLost) else WorkerLost(str(error))
        self._loop.call_soon_threadsafe(self._scheduler.worker_out, rank, lost)

    def worker_back(self, rank: int) -> None:
        self._loop.call_soon_threadsafe(self._scheduler.worker_back, rank)

    def fail(self, error: RoleLost) -> None:
        self._loop.call_soon_threadsafe(self._scheduler.fail, error)

    def close(self, stream: Stream) -> Rollout:
        return self._wait(self._close(stream))

    def stop(self) -> Rollout:
        """End all rollouts; who was still under way."""
        self._is_stopped = True
        return self._wait(self._scheduler.stop())

    async def _open(self, source: Source, policy: Policy) -> Stream:
        return self._scheduler.open(source, policy)

    async def _close(self, stream: Stream) -> Rollout:
        return self._scheduler.close(stream)

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
