"""The scheduler on its own thread: results, errors and the end come through to the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from drumroll.errors import RolloutError
from drumroll.life import stamp
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.rollout.scheduler import Limits
from drumroll.rollout.service import RolloutService
from drumroll.rollout.source import GroupRequest, ListSource
from drumroll.rollout.stream import Policy
from drumroll.types import SampleInfo, Task


class Worker:
    """One worker, whose samples end as soon as they are polled for, unless it is `idle`."""

    num_workers = 1
    slots = (4,)

    def __init__(self, idle: bool = False) -> None:
        self.idle = idle
        self.open: list[Lease] = []
        self.aborted: list[tuple[str, int]] = []
        self.threads: set[int] = set()
        self.begun = threading.Event()
        self._news = asyncio.Event()

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None:
        self.threads.add(threading.get_ident())
        self.open += leases
        self._news.set()
        self.begun.set()

    async def abort(self, worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        self.aborted += attempts

    async def poll(self, worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, Any]:
        await self._news.wait()
        if self.idle:
            await asyncio.Event().wait()
        self._news.clear()
        ended, self.open = self.open, []
        infos = [_info(lease) for lease in ended]
        return WorkerReport(infos), infos


def _info(lease: Lease) -> SampleInfo:
    return SampleInfo(
        sample_id=lease.sample_id,
        group_id=lease.group_id,
        task_id=lease.task.id,
        domain=lease.task.domain,
        reward=1.0,
        success=None,
        stop_reason="stop",
        num_prompt_tokens=1,
        num_new_tokens=1,
        oldest_version=0,
        newest_version=0,
        reward_parts={},
        metrics={},
        life=stamp("generating", 0.0) + stamp("done", 0.0),
        attempt=lease.attempt,
    )


def groups(count: int, letter: str = "g") -> ListSource:
    return ListSource([GroupRequest(f"{letter}{n}", Task(id=f"t{n}"), 2, (n,)) for n in range(count)])


def service(worker: Worker) -> RolloutService:
    return RolloutService(worker, seed=1, limits=Limits())


POLICY = Policy(max_rejected=3)


def test_takes_block_until_their_groups_are_there() -> None:
    worker = Worker()
    with service(worker) as rollouts:
        stream = rollouts.open(groups(5), POLICY)
        taken = [rollouts.take(stream, 2, version) for version in range(2)]
        assert [[group.group_id for group in rollout.groups] for rollout in taken] == [["g0", "g1"], ["g2", "g3"]]
        assert rollouts.close(stream).departures == ()
    assert threading.get_ident() not in worker.threads
    assert len(worker.threads) == 1


def test_errors_reach_the_caller_and_the_service_lives_on() -> None:
    with service(Worker()) as rollouts:
        with pytest.raises(RolloutError, match="there are no more groups"):
            rollouts.take(rollouts.open(groups(1), POLICY), 2, 0)
        assert len(rollouts.take(rollouts.open(groups(2, "h"), POLICY), 2, 0).groups) == 2


def test_stopping_tells_who_was_under_way_and_the_workers() -> None:
    worker = Worker(idle=True)
    with service(worker) as rollouts:
        stream = rollouts.open(groups(2), POLICY)
        failures: list[BaseException] = []

        def take() -> None:
            try:
                rollouts.take(stream, 2, 0)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        assert worker.begun.wait(timeout=60)
        rest = rollouts.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert [type(error) for error in failures] == [RolloutError]
        assert sorted(departure.sample_id for departure in rest.departures) == ["g0/000", "g0/001", "g1/000", "g1/001"]
        assert {departure.state for departure in rest.departures} == {"aborted"}
        assert sorted(worker.aborted) == [("g0/000", 0), ("g0/001", 0), ("g1/000", 0), ("g1/001", 0)]


def test_leaving_ends_the_thread_whatever_happened() -> None:
    def fail() -> None:
        with service(Worker()) as rollouts:
            rollouts.take(rollouts.open(groups(1), POLICY), 1, 0)
            raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert threading.active_count() == before
