"""The simulation itself, and the scheduler under random schedules with every fault that it can draw.

A seed that fails is named with the command that replays it; `make simulate` runs many more.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from random_schedules import Schedule, check, draw, replay_command

from drumroll.errors import WorkerLost
from drumroll.life import check_order, unpack_life
from drumroll.rollout.lease import Lease
from drumroll.rollout.simulation import Chaos, Deadlock, Script, SimulatedCluster, simulate
from drumroll.types import SampleInfo, Sampling, Task

SEEDS = 400
BLOCK = 25
"""Seeds in one test."""


# Random schedules.


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_random_schedules_keep_every_promise(first: int) -> None:
    for seed in range(first, first + BLOCK):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\nreplay it: {replay_command(seed)}") from error


def test_the_seeds_draw_every_policy_and_every_fault() -> None:
    schedules = [draw(seed) for seed in range(SEEDS)]
    faces: dict[str, Callable[[Schedule], bool]] = {
        "synchronous": lambda one: one.policy.max_staleness == 0 and not one.policy.extra_groups,
        "redundant": lambda one: one.policy.extra_groups > 0 and not one.policy.tail_batching,
        "extra samples": lambda one: one.policy.extra_samples > 0,
        "tail batching": lambda one: one.policy.tail_batching,
        "filters": lambda one: one.policy.filters is not None,
        "staleness 1, continued": lambda one: one.policy.max_staleness == 1 and one.continues,
        "staleness 1, not continued": lambda one: one.policy.max_staleness == 1 and not one.continues,
        "staleness 4, continued": lambda one: one.policy.max_staleness == 4 and one.continues,
        "staleness 4, not continued": lambda one: one.policy.max_staleness == 4 and not one.continues,
        "many engines": lambda one: one.num_engines > 20,
        "one engine": lambda one: one.num_engines == 1,
        "two speeds": lambda one: len(set(one.speeds)) == 2,
        "turns": lambda one: one.samples.max_turns > 1,
        "calm": lambda one: not one.has_faults,
        "failing samples": lambda one: one.samples.failing > 0,
        "hanging samples": lambda one: one.samples.hanging > 0,
        "engine kills": lambda one: one.chaos.engine_kills > 0,
        "engine hangs": lambda one: one.chaos.engine_hangs > 0,
        "slowdowns": lambda one: one.chaos.engine_slowdowns > 0,
        "worker kills": lambda one: one.chaos.worker_kills > 0,
        "cuts": lambda one: one.chaos.worker_cuts > 0,
        "node losses": lambda one: one.chaos.node_losses > 0,
        "evaluations": lambda one: one.evaluates,
    }
    drawn = {name: sum(map(has, schedules)) for name, has in faces.items()}
    assert all(count >= 10 for count in drawn.values()), drawn


# The loop.


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = []
        for seconds in (0.0, 0.5, 1e6):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    assert simulate(main()) == [0.0, 0.5, 1e6 + 0.5]


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="every task of the simulation waits"):
        simulate(main())


def test_what_a_simulation_raises_comes_out_and_its_tasks_end() -> None:
    ended = []

    async def other() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append(True)

    async def main() -> None:
        task = asyncio.create_task(other())
        await asyncio.sleep(1.0)
        assert not task.done()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        simulate(main())
    assert ended == [True]


# The cluster.


def lease(number: int = 0, engine: int = 0, attempt: int = 0, **limits: float) -> Lease:
    return Lease(f"g/{number:03d}", "g", Task(id="t"), number, Sampling(), engine, attempt, **limits)


def act(scene: Callable[[SimulatedCluster], Any], script: Script | Callable[[Lease], Script], **cluster: Any) -> Any:
    async def main() -> Any:
        options = {"num_engines": 1, "slots": 1, "token_s": 0.1} | cluster
        return await scene(SimulatedCluster(script if callable(script) else lambda _: script, **options))

    return simulate(main())


async def results(cluster: SimulatedCluster, count: int, worker: int = 0) -> list[SampleInfo]:
    infos: list[SampleInfo] = []
    while len(infos) < count:
        report, block = await cluster.poll(worker, 5.0, 0.0)
        assert report.infos == (block or [])
        infos += report.infos
    return infos


def test_replies_take_their_time_in_slots_one_after_another() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await cluster.lease(0, [lease(0), lease(1)])
        first, second = await results(cluster, 2)
        assert [(s.state, s.time) for s in unpack_life(first.life)] == [("generating", 0.0), ("environment", 1.0), ("done", 1.0)]
        assert [(s.state, s.time) for s in unpack_life(second.life)] == [
            ("waiting", 0.0),
            ("generating", 1.0),
            ("environment", 2.0),
            ("done", 2.0),
        ]
        assert first.num_new_tokens == 10

    act(scene, Script(((10, 0.0),)))


def test_turns_environment_and_reward_follow_each_other() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await cluster.lease(0, [lease()])
        (info,) = await results(cluster, 1)
        life = [(s.state, s.time) for s in unpack_life(info.life)]
        assert life == [
            ("generating", 0.0),
            ("environment", 0.5),
            ("generating", 2.5),
            ("environment", 3.0),
            ("reward", 3.0),
            ("done", 7.0),
        ]
        assert check_order("leased", info.life) == "done"
        assert info.reward == 0.25

    act(scene, Script(((10, 2.0), (10, 0.0)), reward_s=4.0, reward=0.25), speeds=(2.0,))


def test_an_abort_frees_the_slot_and_keeps_the_tokens_so_far() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await cluster.lease(0, [lease(0), lease(1)])
        await asyncio.sleep(0.35)
        await cluster.abort(0, [("g/000", 0), ("g/001", 7), ("unknown", 0)])
        first, second = await results(cluster, 2)
        assert (first.stop_reason, first.num_new_tokens, first.reward) == ("aborted", 3, None)
        assert second.stop_reason == "stop"
        assert cluster.loop.now == pytest.approx(1.35)

    act(scene, Script(((10, 0.0),)))


@pytest.mark.parametrize(
    ("script", "stop", "fault", "after_s"),
    [
        (Script(((10, 0.0),), hangs_at=0.5), "deadline", "engine", 5.5),
        (Script(((1000, 0.0),)), "deadline", "engine", 20.0),
        (Script(((10, 1e6),)), "deadline", "environment", 20.0),
        (Script(((10, 0.0),), reward_s=1e6), "deadline", "reward", 20.0),
        (Script(((10, 0.0),), fails="reward"), "failed", "reward", 1.0),
    ],
)
def test_whoever_is_late_or_fails_is_named(script: Script, stop: str, fault: str, after_s: float) -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await cluster.lease(0, [lease(stall_s=5.0, deadline_s=20.0)])
        (info,) = await results(cluster, 1)
        assert (info.stop_reason, info.fault, info.reward) == (stop, fault, None)
        assert cluster.loop.now == pytest.approx(after_s)
        assert not cluster.engines[0].running

    act(scene, script)


def test_engines_that_die_hang_and_come_back() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        engine = cluster.engines[0]
        await cluster.lease(0, [lease(0), lease(1)])
        await asyncio.sleep(0.5)
        engine.kill()
        assert [(i.stop_reason, i.fault) for i in await results(cluster, 2)] == [("failed", "engine")] * 2
        await cluster.lease(0, [lease(2)])
        assert [i.error for i in await results(cluster, 1)] == ["engine 0 is gone"]
        engine.revive()
        await cluster.lease(0, [lease(3, stall_s=5.0)])
        engine.hang()
        assert [i.stop_reason for i in await results(cluster, 1)] == ["deadline"]
        assert cluster.loop.now == pytest.approx(5.5)
        await cluster.lease(0, [lease(4, stall_s=5.0)])
        await asyncio.sleep(1.0)
        engine.recover()
        assert [i.stop_reason for i in await results(cluster, 1)] == ["stop"]
        assert cluster.loop.now == pytest.approx(7.5)

    act(scene, Script(((10, 0.0),)))


def test_a_worker_that_dies_takes_everything_with_it() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await cluster.lease(1, [lease(0), lease(1)])
        await asyncio.sleep(1.5)
        poll = asyncio.create_task(cluster.poll(1, 5.0, 1.0))
        await asyncio.sleep(0.1)
        cluster.workers[1].kill()
        for call in (poll, cluster.lease(1, [lease(2)]), cluster.abort(1, [("g/000", 0)])):
            with pytest.raises(WorkerLost, match="worker 1 is gone"):
                await call
        assert not cluster.engines[0].running

    act(scene, Script(((10, 0.0),)), num_workers=2)


def test_a_worker_that_is_cut_off_goes_on_and_answers_later() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await cluster.lease(0, [lease()])
        cluster.workers[0].reachable.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await cluster.poll(0, 5.0, 0.0)
        cluster.workers[0].reachable.set()
        (info,) = await results(cluster, 1)
        assert unpack_life(info.life)[-1].time == 1.0

    act(scene, Script(((10, 0.0),)))


@given(st.lists(st.booleans(), min_size=1, max_size=12))
@settings(max_examples=20)
def test_messages_take_their_time_and_none_overtakes_another(kinds: list[bool]) -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        told: list[int] = []

        async def send(number: int, is_lease: bool) -> None:
            await (cluster.lease(0, [lease(number)]) if is_lease else cluster.abort(0, [("g/000", 0)]))
            told.append(number)

        await asyncio.gather(*(send(number, kind) for number, kind in enumerate(kinds)))
        assert told == list(range(len(kinds)))
        assert cluster.loop.now == pytest.approx(0.3)

    act(scene, Script(((10, 0.0),)), delay_s=0.3)


@pytest.mark.parametrize("continues", [True, False])
def test_tokens_have_the_version_that_they_were_sampled_with(continues: bool) -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        await cluster.lease(0, [lease()])
        for version in (1, 2):
            await asyncio.sleep(0.3)
            cluster.push(version)
        (info,) = await results(cluster, 1)
        old = [cluster.tokens_older_than(version, info) for version in range(4)]
        if continues:
            assert (info.oldest_version, info.newest_version) == (0, 2)
            assert old == pytest.approx([0.0, 3.0, 6.0, 10.0])
        else:
            assert (info.oldest_version, info.newest_version) == (0, 0)
            assert old == [0.0, 10.0, 10.0, 10.0]

    act(scene, Script(((10, 0.0),)), continues=continues)


# Faults.


def test_faults_strike_within_their_span_and_somebody_survives() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        Chaos(seed=1, span_s=50.0, worker_kills=5, node_losses=5, engine_kills=5, engine_slowdowns=5, lasts_s=1.0).unleash(cluster)
        await asyncio.sleep(1000.0)
        assert [worker.is_dead for worker in cluster.workers] == [False, True, True, True]
        assert not all(engine.is_dead for engine in cluster.engines)
        assert any(engine.is_dead for engine in cluster.engines)
        assert [engine.speed for engine in cluster.engines] == pytest.approx([1.0] * 8)

    act(scene, Script(((10, 0.0),)), num_engines=8, num_workers=4)


def test_nodes_that_are_lost_do_not_come_back() -> None:
    async def scene(cluster: SimulatedCluster) -> None:
        Chaos(seed=2, span_s=10.0, node_losses=1, engine_kills=200, lasts_s=20.0).unleash(cluster)
        await asyncio.sleep(1000.0)
        dead = Counter(engine.rank % 2 for engine in cluster.engines if engine.is_dead)
        assert dead == {1: 3}

    act(scene, Script(((10, 0.0),)), num_engines=6, num_workers=2)
