"""The scheduler against workers that live in this process and fail on demand."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from drumroll.errors import RolloutError
from drumroll.rollout.lease import Lease
from drumroll.rollout.scheduler import GroupRequest, RolloutScheduler
from drumroll.types import SampleInfo, Sampling, Task


class Workers:
    """Ends leases in random order and random batches; `fails(lease)` says how an attempt ends."""

    def __init__(self, num_workers: int = 2, num_engines: int = 3, seed: int = 0, fails: Any = lambda lease: None) -> None:
        self.num_workers, self.num_engines = num_workers, num_engines
        self.random = random.Random(seed)
        self.fails = fails
        self.open: list[list[Lease]] = [[] for _ in range(num_workers)]
        self.leased: list[Lease] = []

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None:
        self.open[worker] += leases
        self.leased += leases

    async def poll(self, worker: int, wait_s: float) -> tuple[list[SampleInfo], Any]:
        await asyncio.sleep(0)
        count = self.random.randint(0, min(5, len(self.open[worker])))
        self.random.shuffle(self.open[worker])
        ended, self.open[worker] = self.open[worker][:count], self.open[worker][count:]
        return [info(lease, self.fails(lease)) for lease in ended], tuple(lease.sample_id for lease in ended)


def info(lease: Lease, failure: str | None) -> SampleInfo:
    return SampleInfo(
        sample_id=lease.sample_id, group_id=lease.group_id, task_id=lease.task.id, domain="default", reward=1.0, success=True,
        stop_reason=failure or "stop", num_prompt_tokens=1, num_new_tokens=1, oldest_version=0, reward_parts={}, metrics={}, timings={},  # type: ignore[arg-type]
        error="the reason" if failure else "",
    )  # fmt: skip


def requests(groups: int, size: int) -> list[GroupRequest]:
    return [GroupRequest(f"g{g:03d}", Task(id=f"t{g}", prompt="?"), size, ("train", g)) for g in range(groups)]


def take(workers: Workers, wanted: list[GroupRequest], max_attempts: int = 3) -> Any:
    with RolloutScheduler(workers, seed=7, max_attempts=max_attempts, deadline_s=10) as scheduler:
        return scheduler.take(wanted, Sampling())


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_ends_exactly_once_and_groups_come_in_order_of_admission(seed: int) -> None:
    workers = Workers(seed=seed)
    rollout = take(workers, requests(9, 4))
    assert [group.group_id for group in rollout.groups] == [f"g{g:03d}" for g in range(9)]
    assert [s.sample_id for s in rollout.samples] == [f"g{g:03d}/{k:03d}" for g in range(9) for k in range(4)]
    arrived = Counter(sample for block in rollout.blocks for sample in block)
    assert set(arrived.values()) == {1}
    assert len(arrived) == 36


def test_a_groups_samples_share_an_engine_and_engines_share_the_load() -> None:
    workers = Workers()
    take(workers, requests(6, 4))
    by_group: dict[str, set[int]] = {}
    for lease in workers.leased:
        by_group.setdefault(lease.group_id, set()).add(lease.engine)
    assert all(len(engines) == 1 for engines in by_group.values())
    assert Counter(lease.engine for lease in workers.leased) == {0: 8, 1: 8, 2: 8}


def test_a_failed_sample_is_leased_again_with_its_seed() -> None:
    workers = Workers(fails=lambda lease: "failed" if lease.sample_id == "g002/001" and lease.attempt < 2 else None)
    rollout = take(workers, requests(4, 2))
    attempts = [lease for lease in workers.leased if lease.sample_id == "g002/001"]
    assert [lease.attempt for lease in attempts] == [0, 1, 2]
    assert len({lease.seed for lease in attempts}) == 1
    assert rollout.num_retried == 2
    assert all(s.stop_reason == "stop" for s in rollout.samples)


def test_a_sample_that_keeps_failing_stops_the_take_and_is_named() -> None:
    workers = Workers(fails=lambda lease: "deadline" if lease.sample_id == "g001/000" else None)
    with pytest.raises(RolloutError, match=r"g001/000.*t1.*3 times.*deadline: the reason"):
        take(workers, requests(3, 2))


def test_seeds_depend_on_sample_and_request_and_nothing_else() -> None:
    few, many = Workers(num_workers=1, num_engines=1), Workers(num_workers=3, num_engines=5, seed=4)
    take(few, requests(5, 3))
    take(many, requests(5, 3))
    seeds = {lease.sample_id: lease.seed for lease in few.leased}
    assert seeds == {lease.sample_id: lease.seed for lease in many.leased}
    assert len(set(seeds.values())) == 15


def test_a_lost_worker_ends_the_take() -> None:
    class Lost(Workers):
        async def poll(self, worker: int, wait_s: float) -> tuple[list[SampleInfo], Any]:
            if worker == 1:
                raise ConnectionError("gone")
            return await super().poll(worker, wait_s)

    with pytest.raises(ConnectionError, match="gone"):
        take(Lost(), requests(3, 2))
