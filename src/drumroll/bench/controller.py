"""What the controller costs: processor time for each sample, with a hundred and with ten thousand engines.

The scheduler runs as in a real run, asynchronously and with recording: leases and results cross to environment workers as pickled
messages, everybody who leaves the ledger is written into a store. Environment workers and engines are played by `Stage`, whose own
work (what it does from a message's arrival to the next one's departure, unpickling and pickling included) is clocked and taken off.
All the rest counts: scheduler, event loop, messages, recorder.
"""

from __future__ import annotations

import asyncio
import heapq
import pickle
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumroll.bench.workload import SLOTS_PER_ENGINE, Groups
from drumroll.life import stamp
from drumroll.record.store import Writer
from drumroll.rollout.garbage import seldom_collected
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.rollout.scheduler import Limits, RolloutScheduler
from drumroll.rollout.simulation import VirtualLoop, simulate
from drumroll.rollout.stream import Policy
from drumroll.types import SampleInfo

ENGINES_PER_WORKER = 64
GROUP_SIZE = 8
REPLY_S = (16.0, 48.0)
"""How long a reply takes at least and at most, in virtual time."""
WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time, in microseconds a sample."""

    controller_us: float
    stage_us: float
    """Of the simulated workers and engines; not the controller's."""


_UnderWay = tuple[float, int, str, str, str, str, int, int, bytes]
"""When a sample ends, a number that breaks ties, its four names, attempt, version, life so far. Nothing in it concerns the garbage
collector, whose work is the controller's here."""


class Stage:
    """Environment workers and engines as a scheduler sees them: each sample ends some time after its lease has come.

    Implements the scheduler's `Transport`. `busy_s` is the processor time that is not the controller's."""

    def __init__(self, num_engines: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.slots = [SLOTS_PER_ENGINE] * num_engines
        self.num_workers = max(2, num_engines // ENGINES_PER_WORKER)
        self.busy_s = 0.0
        self.version = 0
        self.clock = loop.time
        self._loop = loop
        self._rng = random.Random(1)
        self._under_way: list[list[_UnderWay]] = [[] for _ in range(self.num_workers)]
        """Heaps, one for each worker."""
        self._num_leased = 0

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None:
        message = pickle.dumps(leases)
        with self._clocked():
            for lease in pickle.loads(message):
                self._num_leased += 1
                life = stamp("generating", self._loop.now, self.version, lease.engine, 0)
                end = self._loop.now + self._rng.uniform(*REPLY_S)
                names = lease.sample_id, lease.group_id, lease.task.id, lease.task.domain
                heapq.heappush(self._under_way[worker], (end, self._num_leased, *names, lease.attempt, self.version, life))

    async def abort(self, worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        """Those end when they would have."""

    async def poll(self, worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, Any]:
        queue = self._under_way[worker]
        await asyncio.sleep(min(wait_s, max(0.0, queue[0][0] - self._loop.now)) + linger_s if queue else wait_s)
        with self._clocked():
            infos = []
            while queue and queue[0][0] <= self._loop.now:
                infos.append(_result(worker, heapq.heappop(queue)))
            message = pickle.dumps(WorkerReport(infos))
        return pickle.loads(message), message

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self.busy_s += time.process_time() - began


def _result(worker: int, ended: _UnderWay) -> SampleInfo:
    end, _, sample_id, group_id, task_id, domain, attempt, version, life = ended
    return SampleInfo(
        sample_id=sample_id,
        group_id=group_id,
        task_id=task_id,
        domain=domain,
        reward=1.0,
        success=True,
        stop_reason="stop",
        num_prompt_tokens=100,
        num_new_tokens=1000,
        oldest_version=version,
        newest_version=version,
        reward_parts={"exact": 1.0},
        metrics={},
        life=life + stamp("environment", end, -1, worker) + stamp("reward", end, -1, worker) + stamp("done", end, -1, worker),
        attempt=attempt,
    )


async def _run(num_engines: int, num_samples: int, folder: Path) -> Cost:
    """Steps of half as many samples as there are slots, which are busy all the time. A sample counts half when it is admitted and
    half when it leaves; what the first steps cost is not counted."""
    stage = Stage(num_engines)
    scheduler = RolloutScheduler(stage, seed=1, limits=Limits(), clock=stage.clock)
    source = Groups(GROUP_SIZE)
    stream = scheduler.open(source, Policy(max_staleness=4, min_group_size=1, max_rejected=10**6))
    num_groups = sum(stage.slots) // (2 * GROUP_SIZE)
    num_steps = WARMUP_STEPS + max(1, num_samples // (num_groups * GROUP_SIZE))
    began_s = busy_s = num_counted = 0.0
    with Writer(folder) as writer:
        for version in range(num_steps):
            if version == WARMUP_STEPS:
                began_s, busy_s, num_counted = time.process_time(), stage.busy_s, -source.num_drawn * GROUP_SIZE / 2
            rollout = await scheduler.take(stream, num_groups, version)
            writer.add("train", version, pickle.loads(pickle.dumps(rollout.departures)))
            num_counted += len(rollout.departures) / 2
            stage.version = version + 1
        num_counted += source.num_drawn * GROUP_SIZE / 2
        total_s, busy_s = time.process_time() - began_s, stage.busy_s - busy_s
        await scheduler.stop()
    return Cost((total_s - busy_s) / num_counted * 1e6, busy_s / num_counted * 1e6)


def controller_cost(num_engines: int, num_samples: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder, seldom_collected():
        return simulate(_run(num_engines, num_samples, Path(folder)))
