"""Hands samples out as leases and collects their results, on an event loop of its own, so that rollouts go on by themselves.

    step loop (thread)                     scheduler loop (thread)
      take(n groups) ── admit ──►  leases ──► environment workers ──► engines
            ▲                                       │
            └── complete groups ◄── poll: metadata + a reference to a block of trajectories

The scheduler sees metadata alone; blocks stay where they are and travel by reference. It reaches workers only through the
`Transport` that it is given, so that the same code runs against Ray and against a simulation.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from drumroll.errors import RolloutError
from drumroll.rollout.lease import Lease
from drumroll.types import Group, SampleInfo, Sampling, Task, sample_seed

BlockRef = Any
"""Opaque reference to a block: a list of trajectories somewhere in the cluster."""


POLL_WAIT_S = 5.0
"""How long a poll may wait for its first result."""


class Transport(Protocol):
    """How leases reach environment workers and results come back."""

    @property
    def num_workers(self) -> int: ...

    @property
    def num_engines(self) -> int: ...

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None: ...

    async def poll(self, worker: int, wait_s: float) -> tuple[list[SampleInfo], BlockRef]:
        """Results since the last poll: waits for the first one up to `wait_s`."""
        ...


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One task to be attempted `size` times."""

    group_id: str
    task: Task
    size: int
    seed_parts: tuple[str | int, ...]
    """What the samples' seeds depend on, besides the root seed, the task and the sample's number."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Complete groups, in the order of admission, and where their trajectories are."""

    groups: tuple[Group, ...]
    blocks: tuple[BlockRef, ...]
    num_retried: int = 0

    @property
    def report(self) -> dict[str, float]:
        return {"rollout/num_retried": float(self.num_retried)}

    @property
    def samples(self) -> list[SampleInfo]:
        return [sample for group in self.groups for sample in group.samples]


@dataclass
class _Take:
    """A take in progress."""

    leases: dict[str, Lease]
    ended: dict[str, SampleInfo] = field(default_factory=dict)
    blocks: list[BlockRef] = field(default_factory=list)
    num_retried: int = 0


class RolloutScheduler:
    """Runs groups of samples to their ends. `take` blocks the caller; everything else happens on the scheduler's own loop."""

    def __init__(self, transport: Transport, *, seed: int, max_attempts: int, deadline_s: float) -> None:
        self._transport = transport
        self._seed = seed
        self._max_attempts = max_attempts
        self._deadline_s = deadline_s
        self._outstanding = Counter[int]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-scheduler", daemon=True)

    def __enter__(self) -> RolloutScheduler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(timeout=5)

    async def _stop(self) -> None:
        """Let everything that is still under way unwind, then end the loop."""
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._loop.stop()

    def take(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Rollout:
        """Every group complete, or a `RolloutError` that says which samples failed and why."""
        future: Future[Rollout] = asyncio.run_coroutine_threadsafe(self._run(requests, sampling), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _run(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Rollout:
        """Deal the samples to the workers and wait for all of them. Unblocked by the last sample or the first error."""
        leases = self._admit(requests, sampling)
        take = _Take({lease.sample_id: lease for lease in leases})
        workers = self._transport.num_workers
        pollers = [asyncio.create_task(self._work_off(w, leases[w::workers], take)) for w in range(workers)]
        try:
            await asyncio.gather(*pollers)
        finally:
            for poller in pollers:
                poller.cancel()
        groups = tuple(
            Group(request.group_id, tuple(take.ended[_sample_id(request, k)] for k in range(request.size))) for request in requests
        )
        return Rollout(groups, tuple(take.blocks), take.num_retried)

    def _admit(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[Lease]:
        """One lease per sample. A group's samples share an engine, so that they can share its prompt's cache."""
        leases: list[Lease] = []
        for request in requests:
            engine = min(range(self._transport.num_engines), key=lambda rank: (self._outstanding[rank], rank))
            self._outstanding[engine] += request.size
            leases += [
                Lease(
                    sample_id=_sample_id(request, k),
                    group_id=request.group_id,
                    task=request.task,
                    seed=sample_seed(self._seed, *request.seed_parts, request.task.id, k),
                    sampling=sampling,
                    engine=engine,
                    deadline_s=self._deadline_s,
                )
                for k in range(request.size)
            ]
        return leases

    async def _work_off(self, worker: int, leases: Sequence[Lease], take: _Take) -> None:
        """Lease samples to one worker and poll it until all of them have ended; failed ones are leased again."""
        num_running = 0
        while leases or num_running:
            if leases:
                await self._transport.lease(worker, leases)
                num_running += len(leases)
            infos, block = await self._transport.poll(worker, POLL_WAIT_S)
            leases = []
            for info in infos:
                lease = take.leases[info.sample_id]
                self._outstanding[lease.engine] -= 1
                num_running -= 1
                if info.stop_reason in ("failed", "deadline", "aborted"):
                    lease = take.leases[info.sample_id] = self._again(lease, info)
                    leases.append(lease)
                else:
                    take.ended[info.sample_id] = info
            take.num_retried += len(leases)
            if infos:
                take.blocks.append(block)

    def _again(self, lease: Lease, info: SampleInfo) -> Lease:
        """The next lease of a sample that failed: the same seed, the engine that has least to do."""
        attempt = lease.attempt + 1
        if attempt >= self._max_attempts:
            raise RolloutError(
                f"sample {lease.sample_id} of task '{lease.task.id}' failed {attempt} times (`rollout.max_attempts`); "
                f"last: {info.stop_reason}: {info.error.strip()}"
            )
        engine = min(range(self._transport.num_engines), key=lambda rank: (self._outstanding[rank], rank))
        self._outstanding[engine] += 1
        return replace(lease, attempt=attempt, engine=engine)


def _sample_id(request: GroupRequest, k: int) -> str:
    return f"{request.group_id}/{k:03d}"
