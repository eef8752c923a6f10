"""The scheduler in virtual time: what each policy promises, one promise at a time. Random schedules with faults are in test_simulation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.errors import RolloutError, WorkerLost
from drumroll.life import Departure, unpack_life
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.rollout.scheduler import CALL_S, LINGER_S, Limits, RolloutScheduler
from drumroll.rollout.simulation import Script, SimulatedCluster, Workload, simulate
from drumroll.rollout.source import Fate, GroupRequest, ListSource
from drumroll.rollout.stream import Policy, Rollout, Stream
from drumroll.types import Group, SampleInfo, Task, sample_seed

TOKEN_S = 0.02


class Groups:
    """Groups without end, `g000`, `g001`, …"""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.num_drawn = 0
        self.settled: list[str] = []

    def draw(self) -> GroupRequest:
        number = self.num_drawn
        self.num_drawn += 1
        return GroupRequest(f"g{number:03d}", Task(id=f"t{number}", prompt="?"), self.size, ("train", number))

    def settle(self, group_id: str, fate: Fate, samples: Sequence[SampleInfo]) -> None:
        assert group_id not in self.settled, f"{group_id} is settled twice"
        self.settled.append(group_id)


@dataclass
class Stage:
    """A cluster and a scheduler in virtual time."""

    cluster: SimulatedCluster
    scheduler: RolloutScheduler
    leases: list[Lease]

    @property
    def now(self) -> float:
        return self.cluster.loop.now

    def open(self, source: Any, **policy: Any) -> Stream:
        return self.scheduler.open(source, Policy(**{"max_rejected": 20} | policy))


Play = Callable[[Stage], Awaitable[Any]]


def play(
    scene: Play,
    workload: Workload = lambda lease: Script(((10, 0.0),)),
    *,
    engines: int = 2,
    slots: int = 4,
    workers: int = 2,
    limits: Limits = Limits(deadline_s=100.0, stall_s=5.0),  # noqa: B008
    max_in_flight: int | None = None,
    is_supervised: bool = False,
    seed: int = 7,
    **cluster: Any,
) -> Any:
    """Run a scene; afterwards the scheduler stops, and nothing may be left."""
    leases: list[Lease] = []

    def recorded(lease: Lease) -> Script:
        leases.append(lease)
        return workload(lease)

    async def main() -> Any:
        simulated = SimulatedCluster(recorded, num_engines=engines, slots=slots, num_workers=workers, token_s=TOKEN_S, **cluster)
        scheduler = RolloutScheduler(
            simulated, seed=seed, limits=limits, max_in_flight=max_in_flight, is_supervised=is_supervised, clock=simulated.clock
        )
        stage = Stage(simulated, scheduler, leases)
        async with asyncio.timeout(1e6):
            result = await scene(stage)
        await scheduler.stop()
        assert len(scheduler.ledger) == 0
        assert not any(scheduler.router.engines.in_flight)
        return result

    return simulate(main())


def number_of(lease: Lease) -> tuple[int, int]:
    """Group and member."""
    group, member = lease.sample_id.split("/")
    return int(group.partition("+")[0][1:]), int(member)


def tokens_by(lengths: Callable[[int, int], int]) -> Workload:
    """Samples of one reply, whose length is a function of group and member."""
    return lambda lease: Script(((lengths(*number_of(lease)), 0.0),))


def names(rollout: Rollout) -> list[str]:
    return [group.group_id for group in rollout.groups]


def by_state(departures: Sequence[Departure]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for departure in departures:
        found.setdefault(departure.state, []).append(departure.sample_id)
    return {state: sorted(ids) for state, ids in found.items()}


def slot_times(departures: Sequence[Departure]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """When each engine slot was occupied."""
    times: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for departure in departures:
        stamps = unpack_life(departure.life)
        for this, following in pairwise(stamps):
            if this.state == "generating":
                times.setdefault((this.place, this.slot), []).append((this.time, following.time))
    return {slot: sorted(spans) for slot, spans in times.items()}


# Synchronous steps.


def test_a_step_brings_whole_groups_in_the_order_of_admission() -> None:
    async def scene(stage: Stage) -> None:
        source = Groups(size=3)
        stream = stage.open(source)
        for step in range(3):
            rollout = await stage.scheduler.take(stream, 5, version=step)
            assert names(rollout) == [f"g{number:03d}" for number in range(5 * step, 5 * step + 5)]
            for group in rollout.groups:
                assert [sample.sample_id for sample in group.samples] == [f"{group.group_id}/{member:03d}" for member in range(3)]
            assert by_state(rollout.departures) == {"consumed": sorted(sample.sample_id for sample in rollout.samples)}
            assert source.settled[5 * step :] == names(rollout)
            await asyncio.sleep(1.0)
            stage.cluster.push(step + 1)
        assert source.num_drawn == 15

    play(scene, tokens_by(lambda group, member: 1 + (7 * group + 13 * member) % 29), slots=2)


def test_nothing_is_begun_between_two_synchronous_steps() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups())
        await stage.scheduler.take(stream, 2, version=0)
        num_leases = len(stage.leases)
        await asyncio.sleep(100.0)
        assert len(stage.leases) == num_leases == 8

    play(scene)


def test_a_slot_that_frees_is_taken_at_once() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=2)), 20, version=0)
        times = slot_times(rollout.departures)
        assert len(times) == 3
        for spans in times.values():
            assert spans[0][0] == 0.0
            assert all(before[1] == after[0] for before, after in pairwise(spans))

    play(scene, tokens_by(lambda group, member: 1 + (7 * group + 13 * member) % 29), engines=3, slots=1)


def test_slots_that_free_together_wait_for_one_poll_at_most() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=4)), 10, version=0)
        for spans in slot_times(rollout.departures).values():
            assert all(after[0] - before[1] <= LINGER_S + 1e-9 for before, after in pairwise(spans))

    play(scene, engines=2, slots=4)


def test_a_reward_begins_with_the_last_token_of_its_sample() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=2)), 3, version=0)
        for departure in rollout.departures:
            stamps = unpack_life(departure.life)
            ended = [after.time for before, after in pairwise(stamps) if before.state == "generating"]
            assert [stamp.time for stamp in stamps if stamp.state == "reward"] == ended[-1:]

    play(scene, lambda lease: Script(((5 * (1 + number_of(lease)[1]), 0.0),), reward_s=3.0))


def test_members_of_a_group_share_an_engine_and_engines_share_the_load() -> None:
    async def scene(stage: Stage) -> None:
        await stage.scheduler.take(stage.open(Groups(size=4)), 6, version=0)
        engines: dict[str, set[int]] = {}
        for lease in stage.leases:
            engines.setdefault(lease.group_id, set()).add(lease.engine)
        assert all(len(used) == 1 for used in engines.values())
        assert Counter(lease.engine for lease in stage.leases) == {0: 8, 1: 8, 2: 8}

    play(scene, engines=3, slots=8)


def test_no_more_samples_are_leased_than_allowed() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=2)), 6, version=0)
        events = []
        for departure in rollout.departures:
            stamps = unpack_life(departure.life)
            events += [(stamp.time, 1) for stamp in stamps if stamp.state == "leased"]
            events += [(stamp.time, -1) for stamp in stamps if stamp.state == "done"]
        most = running = 0
        for _, change in sorted(events):
            running += change
            most = max(most, running)
        assert most == 3

    play(scene, max_in_flight=3)


# Redundancy.


def test_the_first_complete_groups_are_taken_and_the_rest_aborted_at_once() -> None:
    async def scene(stage: Stage) -> None:
        source = Groups(size=2)
        stream = stage.open(source, extra_groups=2)
        rollout = await stage.scheduler.take(stream, 3, version=0)
        assert names(rollout) == ["g001", "g003", "g004"]
        assert stage.now < 1.0
        await asyncio.sleep(TOKEN_S)
        assert not any(engine.running or engine.waiting for engine in stage.cluster.engines)
        assert stage.scheduler.router.engines.in_flight == [0, 0]
        assert sorted(source.settled) == [f"g{number:03d}" for number in range(5)]
        later = await stage.scheduler.take(stream, 1, version=0)
        assert by_state(later.departures)["aborted"][:4] == ["g000/000", "g000/001", "g002/000", "g002/001"]
        assert rollout.report["rollout/kept_length_ratio"] == 1.0  # nobody had been cut off yet
        assert later.report["rollout/wasted_tokens"] > 0

    play(scene, tokens_by(lambda group, member: 10_000 if group in (0, 2) else 20), slots=8)


def test_the_first_members_of_a_group_are_taken_and_the_rest_aborted() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=3), extra_samples=2), 2, version=0)
        assert [[sample.sample_id[-3:] for sample in group.samples] for group in rollout.groups] == [["002", "003", "004"]] * 2
        await asyncio.sleep(TOKEN_S)
        assert not any(engine.running for engine in stage.cluster.engines)
        left = await stage.scheduler.stop()
        assert by_state(left.departures)["aborted"] == ["g000/000", "g000/001", "g001/000", "g001/001"]

    play(scene, tokens_by(lambda group, member: 10_000 if member < 2 else 20), slots=8)


def test_redundancy_covers_for_members_that_fail() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=3), extra_samples=1), 2, version=0)
        assert [[sample.sample_id[-3:] for sample in group.samples] for group in rollout.groups] == [["000", "002", "003"]] * 2
        assert by_state(rollout.departures)["failed"] == ["g000/001", "g001/001"]

    play(scene, lambda lease: Script(((10 if number_of(lease)[1] == 1 else 200, 0.0),), fails="reward" if number_of(lease)[1] == 1 else ""))


def test_what_is_put_off_comes_back_in_a_round_of_its_own_and_nothing_is_lost() -> None:
    async def scene(stage: Stage) -> list[list[str]]:
        source = Groups(size=2)
        stream = stage.open(source, extra_groups=1, tail_batching=True)
        rounds = []
        for step in range(6):
            rollout = await stage.scheduler.take(stream, 2, version=step)
            rounds.append(names(rollout))
            stage.cluster.push(step + 1)
        assert len(source.settled) == 12
        waiting = {request.group_id for request in (*stream.put_off, *stream.again)}
        assert waiting | set(source.settled) == {f"g{number:03d}" for number in range(source.num_drawn)}
        assert not waiting & set(source.settled)
        return rounds

    # Every third group is long.
    rounds = play(scene, tokens_by(lambda group, member: 3000 if group % 3 == 0 else 20 + group), slots=8)
    assert rounds[:2] == [["g001", "g002"], ["g004", "g005"]]
    assert rounds[2] == ["g000+1", "g003+1"]  # both long ones, without company that would leave before them
    assert len({name.partition("+")[0] for names in rounds for name in names}) == 12


def test_a_group_that_comes_back_has_the_seeds_that_it_had() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=1), extra_groups=1, tail_batching=True)
        for step in range(2):
            await stage.scheduler.take(stream, 1, version=step)
            stage.cluster.push(step + 1)
        seeds = {lease.sample_id: lease.seed for lease in stage.leases}
        assert seeds["g000/000"] == seeds["g000+1/000"]

    play(scene, tokens_by(lambda group, member: 3000 if group == 0 else 20))


# Filters.


def test_rejected_groups_are_replaced_and_counted() -> None:
    def odd(group: Group) -> str | None:
        return "odd: too odd" if int(group.group_id[1:]) % 2 else None

    async def scene(stage: Stage) -> None:
        source = Groups(size=2)
        rollout = await stage.scheduler.take(stage.open(source, filters=odd), 4, version=0)
        assert names(rollout) == ["g000", "g002", "g004", "g006"]
        assert rollout.report["rollout/num_rejected"] == rollout.report["rollout/num_rejected_odd"] >= 3
        rejected = [departure for departure in rollout.departures if departure.state == "filtered"]
        assert {departure.reason for departure in rejected} == {"odd: too odd"}
        assert len(rejected) == 2 * rollout.report["rollout/num_rejected"]
        assert rollout.report["rollout/wasted_tokens"] >= 10 * len(rejected)

    play(scene)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_filter_that_rejects_everything_ends_in_an_error_that_says_how_many_and_why(staleness: int) -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(), filters=lambda group: "hopeless: really", max_rejected=9, max_staleness=staleness)
        with pytest.raises(
            RolloutError, match=r"10 groups were rejected in one step, while 0 of the 3 .*: 10 × hopeless\. .*`rollout\.max_rejected`"
        ):
            await stage.scheduler.take(stream, 3, version=0)

    play(scene)


def test_the_cap_is_of_one_take() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=1), filters=lambda group: "no" if int(group.group_id[1:]) % 3 else None, max_rejected=8)
        for step in range(10):
            await stage.scheduler.take(stream, 3, version=step)
            stage.cluster.push(step + 1)

    play(scene)


def test_a_hunt_for_more_than_the_step_needs_does_not_end_the_run() -> None:
    """Between two takes the buffer fills: what is rejected meanwhile counts only while the next step lacks something."""

    async def scene(stage: Stage) -> None:
        picky = lambda group: "no" if group.group_id > "g002" and int(group.group_id[1:]) % 8 else None  # noqa: E731
        stream = stage.open(Groups(size=1), filters=picky, max_staleness=4, max_rejected=9)
        for step in range(8):
            await stage.scheduler.take(stream, 1, version=step)
            await asyncio.sleep(100.0)
            stage.cluster.push(step + 1)

    play(scene)


@pytest.mark.parametrize("error", [RolloutError("group filter 'mine' failed on group 'g000'"), ZeroDivisionError("by zero")])
def test_a_filter_that_raises_is_heard(error: Exception) -> None:
    def broken(group: Group) -> str | None:
        raise error

    async def scene(stage: Stage) -> None:
        with pytest.raises(type(error), match=str(error)):
            await stage.scheduler.take(stage.open(Groups(), filters=broken), 2, version=0)

    play(scene)


def test_a_source_that_raises_is_heard() -> None:
    class Broken(Groups):
        def draw(self) -> GroupRequest:
            raise OSError("the tasks are gone")

    async def scene(stage: Stage) -> None:
        with pytest.raises(OSError, match="the tasks are gone"):
            await stage.scheduler.take(stage.open(Broken()), 2, version=0)

    play(scene)


def test_a_list_that_ends_too_soon_says_so() -> None:
    async def scene(stage: Stage) -> None:
        requests = [GroupRequest(f"g{n:03d}", Task(id=f"t{n}"), 2, (n,)) for n in range(3)]
        stream = stage.open(ListSource(requests))
        with pytest.raises(RolloutError, match=r"there are no more groups: 3 of 4 are complete\. None was rejected\."):
            await stage.scheduler.take(stream, 4, version=0)

    play(scene)


# Failures.


def test_a_sample_that_fails_is_leased_again_with_its_seed() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=2)), 4, version=0)
        assert len(rollout.samples) == 8
        attempts = [lease for lease in stage.leases if lease.sample_id == "g002/001"]
        assert [lease.attempt for lease in attempts] == [0, 1]
        assert len({lease.seed for lease in attempts}) == 1
        assert {sample.sample_id: sample.attempt for sample in rollout.samples}["g002/001"] == 1
        assert rollout.report["rollout/num_retried"] == 1
        assert rollout.quarantined == ()

    play(scene, lambda lease: Script(((10, 0.0),), fails="reward" if lease.sample_id == "g002/001" and lease.attempt < 1 else ""))


def test_a_task_that_always_fails_is_tried_twice_and_quarantined() -> None:
    async def scene(stage: Stage) -> None:
        source = Groups(size=4)
        rollout = await stage.scheduler.take(stage.open(source, max_failed=3), 4, version=0)
        assert len(rollout.samples) == 16, "another group has taken its place"
        (found,) = rollout.quarantined
        assert (found.task_id, found.attempts, found.reason.partition(":")[0]) == ("t1", 2, "failed")
        assert max(lease.attempt for lease in stage.leases if lease.group_id == "g001") == 1, "two attempts at most"

    play(scene, lambda lease: Script(((10, 0.0),), fails="environment" if lease.group_id == "g001" else ""))


def test_a_task_is_quarantined_though_one_member_has_failed_twice_before_the_others_have_failed_once() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=4), max_failed=3), 4, version=0)
        assert len(rollout.samples) == 16
        assert [(found.task_id, found.attempts) for found in rollout.quarantined] == [("t1", 2)]

    def failing(lease: Lease) -> Script:
        return Script(((1 if number_of(lease)[1] == 0 else 60, 0.0),), fails="environment" if lease.group_id == "g001" else "")

    play(scene, failing, slots=32)


def test_a_task_that_fails_now_and_then_is_not_quarantined() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=4), max_failed=3), 4, version=0)
        assert rollout.quarantined == ()
        assert rollout.report["rollout/num_rejected_failed"] == 1

    play(scene, lambda lease: Script(((10, 0.0),), fails="environment" if lease.sample_id == "g001/002" else ""), slots=8)


def test_a_step_may_go_on_with_its_least_share_when_tasks_keep_failing() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=2), max_failed=2, min_share=0.5), 4, version=0)
        assert 2 <= len(rollout.groups) < 4
        with pytest.raises(RolloutError, match="failed 2 times"):
            await stage.scheduler.take(stage.open(Groups(size=2), max_failed=2), 4, version=0)

    play(scene, lambda lease: Script(((10, 0.0),), fails="environment" if number_of(lease)[0] % 2 else ""))


def test_a_step_that_waits_draws_until_it_has_its_share() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=2), max_failed=0, max_rejected=1, waits=True)
        assert len((await stage.scheduler.take(stream, 4, version=0)).groups) == 4

    play(scene, lambda lease: Script(((10, 0.0),), fails="environment" if number_of(lease)[0] % 3 else ""))


def test_an_engine_that_is_out_gets_nothing_until_it_is_back() -> None:
    async def scene(stage: Stage) -> None:
        stage.scheduler.engine_out(0)
        stream = stage.open(Groups(size=2))
        await stage.scheduler.take(stream, 4, version=0)
        assert {lease.engine for lease in stage.leases} == {1}
        stage.scheduler.engine_back(0)
        await stage.scheduler.take(stream, 4, version=1)
        assert {lease.engine for lease in stage.leases} == {0, 1}

    play(scene)


def test_a_sample_that_keeps_failing_is_named() -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(
            RolloutError, match=r"sample g001/001 of task 't1' failed 2 times \(`rollout\.max_attempts`\); last: failed: it fails"
        ):
            await stage.scheduler.take(stage.open(Groups(size=2)), 4, version=0)

    play(scene, lambda lease: Script(((10, 0.0),), fails="environment" if lease.sample_id == "g001/001" else ""))


def test_a_group_with_enough_members_left_goes_on() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=3), min_group_size=2), 3, version=0)
        assert [len(group.samples) for group in rollout.groups] == [3, 2, 3]
        assert by_state(rollout.departures)["failed"] == ["g001/001"]

    play(scene, lambda lease: Script(((10, 0.0),), fails="environment" if lease.sample_id == "g001/001" else ""))


def test_a_group_with_too_few_members_left_is_replaced_within_the_cap() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=3), max_failed=1), 3, version=0)
        assert names(rollout) == ["g000", "g002", "g003"]
        assert rollout.report["rollout/num_rejected_failed"] == 1

    play(scene, lambda lease: Script(((10, 0.0),), fails="environment" if lease.sample_id == "g001/001" else ""))


@pytest.mark.parametrize("script", [Script(((10, 1e9),)), Script(((10, 0.0),), reward_s=1e9), Script(((10**9, 0.0),))])
def test_an_environment_a_reward_or_a_reply_without_end_is_given_up(script: Script) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(RolloutError, match=r"sample g000/000 .* the episode took longer than 100 s"):
            await stage.scheduler.take(stage.open(Groups(size=1)), 1, version=0)
        assert stage.now < 12 * 2 * (100.0 + CALL_S)

    play(scene, lambda lease: script)


def test_a_reply_that_stops_growing_is_begun_again_elsewhere() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=2)), 4, version=0)
        assert {sample.sample_id for sample in rollout.samples if sample.attempt} == {"g001/000"}
        assert stage.now == pytest.approx(5.0, abs=1.0)

    play(scene, lambda lease: Script(((10, 0.0),), hangs_at=0.5 if lease.sample_id == "g001/000" and lease.attempt == 0 else None))


def test_an_engine_that_fails_gets_nothing_but_a_trial_now_and_then() -> None:
    async def scene(stage: Stage) -> None:
        stage.cluster.engines[0].kill()
        rollout = await stage.scheduler.take(stage.open(Groups(size=4)), 25, version=0)
        assert all(sample.stop_reason == "stop" for sample in rollout.samples)
        assert sum(lease.engine == 0 for lease in stage.leases) < 20
        stage.cluster.engines[0].revive()
        await asyncio.sleep(100.0)
        stage.leases.clear()
        await stage.scheduler.take(stage.open(Groups(size=4)), 25, version=0)
        assert sum(lease.engine == 0 for lease in stage.leases) > 20

    play(scene, slots=2)


def test_samples_of_a_worker_that_vanishes_go_to_the_others() -> None:
    async def scene(stage: Stage) -> None:
        stage.cluster.loop.call_later(1.0, stage.cluster.workers[1].kill)
        rollout = await stage.scheduler.take(stage.open(Groups(size=4)), 2, version=0)
        assert len(rollout.samples) == 8
        assert {lease.attempt for lease in stage.leases} == {0, 1}
        assert stage.now < 10.0

    play(scene, tokens_by(lambda group, member: 100), slots=8)


def test_samples_of_a_worker_that_is_cut_off_go_to_the_others_and_its_late_results_count_for_nothing() -> None:
    async def scene(stage: Stage) -> None:
        host = stage.cluster.workers[1]
        stage.cluster.loop.call_later(0.5, host.reachable.clear)
        stage.cluster.loop.call_later(200.0, host.reachable.set)
        stream = stage.open(Groups(size=4))
        first = await stage.scheduler.take(stream, 2, version=0)
        assert len(first.samples) == 8
        assert stage.now < 60.0
        await asyncio.sleep(300.0 - stage.now)
        second = await stage.scheduler.take(stream, 10, version=0)
        assert second.report["queue/num_outdated"] > 0
        assert {departure.sample_id for departure in second.departures} == {sample.sample_id for sample in second.samples}

    play(scene, tokens_by(lambda group, member: 100), slots=8)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_task_that_ends_its_worker_is_found_and_the_others_lose_nothing(num_workers: int) -> None:
    """Each time that a worker is lost its samples are tried again among half as many, until the one that does it is alone."""

    def workload(lease: Lease) -> Script:
        return Script(((50, 0.0),))

    async def scene(stage: Stage) -> None:
        scheduler, hosts, num_lost = stage.scheduler, stage.cluster.workers, 0
        lease = stage.cluster.lease

        async def deadly(worker: int, leases: Sequence[Lease]) -> None:
            nonlocal num_lost
            await lease(worker, leases)
            if any(each.task.id == "t2" for each in leases):
                await asyncio.sleep(0.1)
                num_lost += 1
                hosts[worker].kill()
                hosts[worker].is_dead = False
                scheduler.worker_out(worker, WorkerLost("it ended its process"))
                scheduler.worker_back(worker)

        stage.cluster.lease = deadly  # type: ignore[method-assign]
        rollout = await scheduler.take(stage.open(Groups(size=4), max_failed=4), 6, version=0)
        assert [task.task_id for task in rollout.quarantined] == ["t2"]
        assert names(rollout) == ["g000", "g001", "g003", "g004", "g005", "g006"]
        assert all(len(group.samples) == 4 for group in rollout.groups)
        assert num_lost < 20, "a budget of restarts is not used up by one task"

    play(scene, workload, slots=16, workers=num_workers, is_supervised=True)


def test_samples_that_are_drawn_again_while_an_attempt_is_still_under_way_are_told_apart() -> None:
    """A run that goes back begins its demand anew, while environments of the old one have not ended yet."""

    async def scene(stage: Stage) -> None:
        stage.cluster.abort = ignored  # type: ignore[method-assign]
        old = stage.open(Groups(size=4), max_staleness=1)
        taking = asyncio.create_task(stage.scheduler.take(old, 2, version=0))
        await asyncio.sleep(0.5)
        stage.scheduler.close(old)
        with pytest.raises(RolloutError, match="was closed"):
            await taking
        rollout = await stage.scheduler.take(stage.open(Groups(size=4), max_staleness=1), 4, version=0)
        assert len({sample.sample_id for sample in rollout.samples}) == 16
        assert {sample.attempt for sample in rollout.samples} >= {1}, "the first attempts belong to the old demand"

    async def ignored(worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        pass

    play(scene, tokens_by(lambda group, member: 100), slots=8)


@pytest.mark.parametrize("staleness", [0, 1])
def test_without_workers_every_take_raises_also_of_streams_that_come_later(staleness: int) -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=4), max_staleness=staleness)
        for host in stage.cluster.workers:
            stage.cluster.loop.call_later(1.0, host.kill)
        with pytest.raises(WorkerLost, match="is gone"):
            await stage.scheduler.take(stream, 2, version=0)
        with pytest.raises(WorkerLost, match="is gone"):
            await stage.scheduler.take(stage.open(Groups(size=4), is_urgent=True), 1, version=0)

    play(scene, tokens_by(lambda group, member: 100), slots=8)


def test_a_worker_that_keeps_silent_about_a_sample_loses_it() -> None:
    """Not even the worker's own deadline is relied upon."""

    async def scene(stage: Stage) -> None:
        honest = stage.cluster.poll

        async def forgetful(worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, Any]:
            report, block = await honest(worker, wait_s, linger_s)
            kept = [info for info in report.infos if (info.sample_id, info.attempt) != ("g000/000", 0)]
            return WorkerReport(kept, report.cpu_s), block

        stage.cluster.poll = forgetful  # type: ignore[method-assign]
        rollout = await stage.scheduler.take(stage.open(Groups(size=2)), 1, version=0)
        assert [sample.attempt for sample in rollout.samples] == [1, 0]
        assert 100.0 + CALL_S <= stage.now < 100.0 + CALL_S + 1.0

    play(scene)


def test_a_lease_that_does_not_arrive_goes_elsewhere() -> None:
    async def scene(stage: Stage) -> None:
        honest, refused = stage.cluster.lease, []

        async def refusing(worker: int, leases: Sequence[Lease]) -> None:
            if worker == 0 and len(refused) < 3:
                refused.append(leases)
                raise ConnectionError("no route")
            await honest(worker, leases)

        stage.cluster.lease = refusing  # type: ignore[method-assign]
        rollout = await stage.scheduler.take(stage.open(Groups(size=2)), 6, version=0)
        assert len(rollout.samples) == 12
        assert refused

    play(scene)


def test_what_goes_wrong_in_the_background_is_heard() -> None:
    class Unsettling(Groups):
        def settle(self, group_id: str, fate: Fate, samples: Sequence[SampleInfo]) -> None:
            raise OSError("cannot settle")

    async def scene(stage: Stage) -> None:
        async def refusing(worker: int, leases: Sequence[Lease]) -> None:
            raise ConnectionError("no route")

        stage.cluster.lease = refusing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="cannot settle"):
            await stage.scheduler.take(stage.open(Unsettling(size=2)), 1, version=0)

    play(scene)


def test_a_report_that_makes_no_sense_is_an_error_and_not_a_hang() -> None:
    async def scene(stage: Stage) -> None:
        honest = stage.cluster.poll

        async def nonsense(worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, Any]:
            report, block = await honest(worker, wait_s, linger_s)
            return WorkerReport([replace(info, life=info.life[-19:] + info.life) for info in report.infos]), block

        stage.cluster.poll = nonsense  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="cannot become"):
            await stage.scheduler.take(stage.open(Groups(size=2)), 2, version=0)

    play(scene)


# Asynchronous training.


def test_rollouts_go_on_while_the_learner_learns() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=4), max_staleness=1)
        await stage.scheduler.take(stream, 2, version=0)
        await asyncio.sleep(50.0)
        stage.cluster.push(1)
        before = stage.now
        rollout = await stage.scheduler.take(stream, 2, version=1)
        assert stage.now == before
        assert names(rollout) == ["g002", "g003"]
        assert rollout.report["rollout/age_max"] == 1.0

    play(scene)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_no_more_groups_are_under_way_than_staleness_allows(staleness: int) -> None:
    async def scene(stage: Stage) -> None:
        source = Groups(size=2)
        stream = stage.open(source, max_staleness=staleness)
        for step in range(6):
            await stage.scheduler.take(stream, 3, version=step)
            await asyncio.sleep(100.0)
            assert source.num_drawn - len(source.settled) == len(stream.running) + len(stream.ready) == 3 * (staleness + 1)
            stage.cluster.push(step + 1)

    play(scene)


def test_a_sample_whose_every_token_is_too_old_is_never_taken() -> None:
    """Replies keep the weights that they began with, and some take longer than a version is good for."""

    async def scene(stage: Stage) -> float:
        stream = stage.open(Groups(size=2), max_staleness=1, min_group_size=1, max_rejected=100)
        stale_tokens = 0.0
        for step in range(12):
            rollout = await stage.scheduler.take(stream, 2, version=step)
            for sample in rollout.samples:
                assert sample.newest_version >= step - 1
                assert stage.cluster.tokens_older_than(step - 1, sample) == 0.0
            stale_tokens += rollout.report["rollout/stale_tokens"]
            await asyncio.sleep(1.0)
            stage.cluster.push(step + 1)
        return stale_tokens

    assert play(scene, tokens_by(lambda group, member: 400 if (group + member) % 5 == 0 else 20), continues=False) > 0


def test_waiting_for_the_environment_makes_tokens_old_as_well() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=1), max_staleness=1, max_rejected=100)
        for step in range(8):
            rollout = await stage.scheduler.take(stream, 2, version=step)
            assert all(sample.newest_version >= step - 1 for sample in rollout.samples)
            await asyncio.sleep(1.0)
            stage.cluster.push(step + 1)

    play(scene, lambda lease: Script(((10, 20.0 if number_of(lease)[0] == 3 else 0.0),)))


def test_a_group_is_taken_without_its_last_members_when_the_others_would_be_too_old_next_time() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=3), max_staleness=1, min_group_size=2, keeps_stragglers=False)
        await stage.scheduler.take(stream, 1, version=0)  # g000; g001 is under way
        await asyncio.sleep(5.0)
        stage.cluster.push(1)
        rollout = await stage.scheduler.take(stream, 1, version=1)
        assert names(rollout) == ["g001"]
        assert [sample.sample_id[-3:] for sample in rollout.samples] == ["000", "001"]
        assert {sample.oldest_version for sample in rollout.samples} == {0}
        await asyncio.sleep(TOKEN_S)
        assert "g001/002" not in {lease.sample_id for lease in _running(stage)}
        left = await stage.scheduler.stop()
        assert "g001/002" in by_state(left.departures)["aborted"]

    play(scene, tokens_by(lambda group, member: 5000 if (group, member) == (1, 2) else 20), slots=8)


def test_stragglers_are_taken_when_they_end_and_compared_with_the_members_before_them() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=3), max_staleness=1, min_group_size=2)
        await stage.scheduler.take(stream, 1, version=0)  # g000; g001 is under way
        await asyncio.sleep(5.0)
        stage.cluster.push(1)
        early = await stage.scheduler.take(stream, 1, version=1)
        assert [(group.group_id, len(group.samples), group.witnesses) for group in early.groups] == [("g001", 2, ())]
        assert "g001/002" in {lease.sample_id for lease in _running(stage)}
        await asyncio.sleep(5000 * TOKEN_S)
        stage.cluster.push(2)
        late = await stage.scheduler.take(stream, 1, version=2)
        assert [(len(group.samples), len(group.witnesses)) for group in late.groups] == [(1, 2), (3, 0)]
        assert [sample.sample_id for sample in late.groups[0].samples] == ["g001/002"]
        await stage.scheduler.stop()

    play(scene, tokens_by(lambda group, member: 5000 if (group, member) == (1, 2) else 20), slots=8, limits=Limits(deadline_s=1e5))


def _running(stage: Stage) -> list[Lease]:
    return [episode.lease for worker in stage.cluster.workers for episode in worker.episodes.values()]


def test_late_groups_that_the_filters_reject_are_replaced() -> None:
    async def scene(stage: Stage) -> None:
        seen: list[int] = []

        def only_whole(group: Group) -> str | None:
            seen.append(len(group.samples))
            return None if len(group.samples) == 2 else "in pieces"

        stream = stage.open(Groups(size=2), max_staleness=1, min_group_size=1, filters=only_whole)
        await stage.scheduler.take(stream, 1, version=0)
        await asyncio.sleep(5.0)
        stage.cluster.push(1)
        rollout = await stage.scheduler.take(stream, 1, version=1)
        assert names(rollout) == ["g002"]
        assert 1 in seen

    play(scene, tokens_by(lambda group, member: 10_000 if (group, member) == (1, 1) else 20), slots=8, limits=Limits(deadline_s=1e5))


def test_a_group_that_lost_old_members_is_judged_again() -> None:
    async def scene(stage: Stage) -> None:
        def only_whole(group: Group) -> str | None:
            return None if len(group.samples) == 2 else "in pieces"

        stream = stage.open(Groups(size=2), max_staleness=1, min_group_size=1, filters=only_whole, max_rejected=100)
        for step in range(10):
            rollout = await stage.scheduler.take(stream, 1, version=step)
            assert [len(group.samples) for group in rollout.groups] == [2]
            await asyncio.sleep(0.3)
            stage.cluster.push(step + 1)

    play(scene, tokens_by(lambda group, member: 20 + 40 * member * (group % 3)), continues=False)


def test_replies_go_on_with_new_weights() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=1), max_staleness=2)
        for step in range(4):
            rollout = await stage.scheduler.take(stream, 2, version=step)
            for sample in rollout.samples:
                old = stage.cluster.tokens_older_than(step - 2, sample)
                assert 0.0 <= old < sample.num_new_tokens
            await asyncio.sleep(2.0)
            stage.cluster.push(step + 1)
        assert any(sample.oldest_version < sample.newest_version for sample in rollout.samples)

    play(scene, tokens_by(lambda group, member: 150), slots=2)


# Several streams.


def test_an_evaluation_goes_before_training() -> None:
    async def scene(stage: Stage) -> None:
        training = stage.open(Groups(size=4), max_staleness=2)
        await stage.scheduler.take(training, 4, version=0)
        evaluation = stage.open(ListSource([GroupRequest(f"e{n:03d}", Task(id=f"e{n}"), 4, ("eval", n)) for n in range(4)]), is_urgent=True)
        first = len(stage.leases)
        rollout = await stage.scheduler.take(evaluation, 4, version=0)
        assert names(rollout) == [f"e{n:03d}" for n in range(4)]
        groups = [lease.group_id[0] for lease in stage.leases[first:]]
        assert groups[0] == "g" or groups[0] == "e"
        # At most the one training sample that was next in line goes before.
        assert "g" not in groups[1 : groups.index("e") + 16]

    play(scene, tokens_by(lambda group, member: 50), slots=1)


def test_an_evaluation_gives_way_to_nothing_and_training_goes_on_afterwards() -> None:
    async def scene(stage: Stage) -> None:
        training = stage.open(Groups(size=2), max_staleness=1)
        first = await stage.scheduler.take(training, 2, version=0)
        evaluation = stage.open(ListSource([GroupRequest(f"e{n:03d}", Task(id=f"e{n}"), 1, ("eval", n)) for n in range(9)]), is_urgent=True)
        await stage.scheduler.take(evaluation, 9, version=0)
        assert stage.scheduler.close(evaluation).departures == ()
        second = await stage.scheduler.take(training, 2, version=0)
        assert names(first) + names(second) == ["g000", "g001", "g002", "g003"]

    play(scene)


# The end.


def test_closing_a_stream_aborts_what_it_has_and_nobody_elses() -> None:
    async def scene(stage: Stage) -> None:
        one, other = stage.open(Groups(size=2), max_staleness=3), stage.open(_named("h"), max_staleness=3)
        first = await stage.scheduler.take(one, 1, version=0)
        second = await stage.scheduler.take(other, 1, version=0)
        closed = stage.scheduler.close(one)
        await asyncio.sleep(30.0)
        assert {sample.group.stream for sample in stage.scheduler.ledger} <= {other}
        assert len(other.ready) == 4
        rest = await stage.scheduler.stop()
        gone = [d.sample_id for rollout in (first, second, closed, rest) for d in rollout.departures]
        assert len(gone) == len(set(gone)) == 2 * (5 + 5)

    play(scene, tokens_by(lambda group, member: 100), engines=1, slots=4)


def _named(letter: str) -> Groups:
    source = Groups(size=2)
    draw = source.draw

    def renamed() -> GroupRequest:
        request = draw()
        return GroupRequest(letter + request.group_id[1:], request.task, request.size, request.seed_parts)

    source.draw = renamed  # type: ignore[method-assign]
    return source


def test_stopping_empties_the_ledger_the_engines_and_the_workers() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=3), max_staleness=4)
        rollout = await stage.scheduler.take(stream, 3, version=0)
        rest = await stage.scheduler.stop()
        assert len(stage.scheduler.ledger) == 0
        assert set(by_state(rest.departures)) == {"aborted"}
        assert {departure.reason for departure in rest.departures} <= {"no longer wanted", "the run ended"}
        admitted = {f"g{group:03d}/{member:03d}" for group in range(stream.num_admitted) for member in range(3)}
        gone = [departure.sample_id for departure in (*rollout.departures, *rest.departures)]
        assert sorted(gone) == sorted(admitted)
        await asyncio.sleep(TOKEN_S)
        assert _running(stage) == []
        assert not any(engine.running or engine.waiting for engine in stage.cluster.engines)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    play(scene, tokens_by(lambda group, member: 20 + 50 * group), delay_s=0.005)


def test_a_stream_that_was_closed_can_no_longer_be_taken_from() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups())
        await stage.scheduler.take(stream, 1, version=0)
        stage.scheduler.close(stream)
        with pytest.raises(RolloutError, match="closed"):
            await stage.scheduler.take(stream, 1, version=0)

    play(scene)


def test_a_take_that_waits_is_woken_by_the_end() -> None:
    async def scene(stage: Stage) -> None:
        waiting = asyncio.create_task(stage.scheduler.take(stage.open(Groups()), 4, version=0))
        await asyncio.sleep(0.1)
        await stage.scheduler.stop()
        with pytest.raises(RolloutError, match="the run ended"):
            await waiting

    play(scene, tokens_by(lambda group, member: 1000))


# Seeds.


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
def test_what_is_taken_and_every_seed_depend_on_the_request_alone(engines: int, slots: int, workers: int, size: int, seed: int) -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=size))
        taken = [await stage.scheduler.take(stream, 3, version=0) for _ in range(2)]
        assert [name for rollout in taken for name in names(rollout)] == [f"g{number:03d}" for number in range(6)]
        expected = {
            f"g{group:03d}/{member:03d}": sample_seed(seed, "train", group, f"t{group}", member)
            for group in range(6)
            for member in range(size)
        }
        assert {lease.sample_id: lease.seed for lease in stage.leases} == expected

    play(
        scene,
        lambda lease: Script(((1 + lease.seed % 50, 0.0),), fails="reward" if lease.seed % 7 == 0 and lease.attempt == 0 else ""),
        engines=engines,
        slots=slots,
        workers=workers,
        seed=seed,
    )


def test_the_report_tells_how_busy_everybody_was() -> None:
    async def scene(stage: Stage) -> None:
        rollout = await stage.scheduler.take(stage.open(Groups(size=8)), 4, version=0)
        report = rollout.report
        assert report["utilisation/actor_infer"] == pytest.approx(32 * 100 * TOKEN_S / stage.now / 8)
        assert report["queue/in_environment_mean"] == pytest.approx(32 * 1.0 / stage.now)
        assert report["queue/in_reward_mean"] == pytest.approx(32 * 0.5 / stage.now)
        assert report["rollout/kept_length_ratio"] == 1.0
        assert report["rollout/num_rejected"] == report["rollout/num_retried"] == 0.0

    play(scene, lambda lease: Script(((100, 1.0),), reward_s=0.5))


def test_slow_environments_bring_more_samples_under_way() -> None:
    async def scene(stage: Stage) -> None:
        stream = stage.open(Groups(size=4))
        first = await stage.scheduler.take(stream, 20, version=0)
        assert first.report["queue/limit"] > 2 * 10
        later = await stage.scheduler.take(stream, 40, version=0)
        assert later.report["utilisation/actor_infer"] > 0.8

    play(scene, lambda lease: Script(((50, 3.0),)))
