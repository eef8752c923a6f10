"""An environment worker and two engines in one process: every lease comes back exactly once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drumroll.envs.base import Env, EnvConfig, Step
from drumroll.life import check_order, unpack_life
from drumroll.registry import REGISTRY
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.types import GenRequest, RankInfo, Sampling, Task, Trajectory, Version, sample_seed
from drumroll.workers.engine import EngineWorker
from drumroll.workers.environment import EnvironmentWorker


class Line:
    """What a handle of the cluster is to the environment worker."""

    def __init__(self, engine: EngineWorker) -> None:
        self.engine = engine
        self.calls: list[str] = []

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        answer = await getattr(self.engine, method)(*arguments)
        self.calls.append(method)
        return answer

    async def until(self, method: str, count: int = 1) -> None:
        """Until so many more calls of a method have been answered."""
        wanted = self.calls.count(method) + count
        while self.calls.count(method) < wanted:
            await asyncio.sleep(0.001)


class Gate:
    """Lets an engine make so many decode steps, and then holds it inside the next one until it is opened."""

    def __init__(self, engine: EngineWorker, num_steps: int) -> None:
        runner = engine.backend._ready_runner  # type: ignore[attr-defined]
        self.decode, runner.decode = runner.decode, self
        self.num_steps = num_steps
        self.shut, self.opened = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.num_steps -= 1
        if self.num_steps < 0:
            self.shut.set()
            self.opened.wait(30)
        return self.decode(*arguments, **options)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.shut.wait, 20)


class Moody(Env):
    """Two turns. The task says at which point it fails, if at all."""

    async def start(self, task: Task) -> Step:
        self.mood = task.data.get("mood", "")
        self.turn = 0
        if self.mood == "start":
            raise OSError("cannot start")
        return Step(prompt=str(task.data["shown"]))

    async def step(self, reply: str) -> Step:
        self.turn += 1
        if self.mood == "step":
            raise OSError("cannot step")
        if self.mood == "hang":
            await asyncio.sleep(60)
        return Step(done=True, reward=float(len(reply))) if self.turn == 2 else Step(prompt="7=")

    async def close(self) -> None:
        if self.mood == "close":
            raise OSError("cannot close")


class Unbuildable(Moody):
    def __init__(self, config: EnvConfig) -> None:
        raise OSError("cannot be built")


def digits(trajectory: Trajectory) -> float:
    """Raises for one of the tasks."""
    if trajectory.task.data.get("mood") == "reward":
        raise ValueError("cannot judge")
    return 1.0


class Crowd(Env):
    """Nobody's reply is answered before everybody's has come."""

    num_missing = 0

    async def start(self, task: Task) -> Step:
        return Step(prompt="7=")

    async def step(self, reply: str) -> Step:
        Crowd.num_missing -= 1
        while Crowd.num_missing > 0:
            await asyncio.sleep(0.05)
        return Step(done=True, reward=float(len(reply)))


judging = asyncio.Event()


async def patient(trajectory: Trajectory) -> float | None:
    """Never comes to a judgement on one of the tasks."""
    if trajectory.task.data.get("mood") == "judge":
        judging.set()
        await asyncio.Event().wait()
    return None


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY.shipped, "moody", Moody)
    monkeypatch.setitem(REGISTRY.shipped, "unbuildable", Unbuildable)
    monkeypatch.setitem(REGISTRY.shipped, "crowd", Crowd)
    monkeypatch.setitem(REGISTRY.shipped, "digits", digits)
    monkeypatch.setitem(REGISTRY.shipped, "patient", patient)
    judging.clear()
    torch.set_num_threads(1)


@asynccontextmanager
async def workers(
    model_folder: Path, env: str = "python:moody", num_slots: int = 4, **options: Any
) -> AsyncIterator[tuple[EnvironmentWorker, list[EngineWorker], list[Line]]]:
    rank = RankInfo("environment", 0, 1, "cpu")
    engine = {"kind": "native", "num_slots": num_slots}
    engines = [EngineWorker(rank, engine=engine, model_folder=str(model_folder), dtype="float32") for _ in range(2)]
    weights = list(load_file(model_folder / "model.safetensors").items())
    for each in engines:
        await each.backend.update(Version(0, 5), iter([weights]), "keep")
        await each.resume()
    rewards = [{"kind": "python:digits"}, {"kind": "python:patient"}]
    domains = {"*": {"env": {"kind": env}, "rewards": rewards}}
    worker = EnvironmentWorker(rank, model_folder=str(model_folder), domains=domains, max_turns=2, max_tokens=32, **options)
    lines = [Line(each) for each in engines]
    await worker.connect(lines)  # type: ignore[arg-type]
    try:
        yield worker, engines, lines
    finally:
        for each in engines:
            await each.close()


def leases(moods: Sequence[str], deadline_s: float = 20.0) -> list[Lease]:
    tasks = [Task(f"t{number}", data={"shown": f"{number}=", "mood": mood}) for number, mood in enumerate(moods)]
    sampling = Sampling(max_new_tokens=5)
    return [
        Lease(f"s{number:03d}", f"g{number // 4}", task, sample_seed(1, number), sampling, engine=number % 2, deadline_s=deadline_s)
        for number, task in enumerate(tasks)
    ]


async def collected(worker: EnvironmentWorker, count: int) -> dict[str, Trajectory]:
    """Poll until so many are back; polls never bring one twice."""
    back: dict[str, Trajectory] = {}
    while len(back) < count:
        report, block = await worker.poll(5.0)
        assert [info.sample_id for info in report.infos] == [trajectory.sample_id for trajectory in block]
        assert 0 < report.cpu_s <= time.process_time()
        for trajectory in block:
            assert trajectory.sample_id not in back
            check_order("leased", trajectory.life)
            back[trajectory.sample_id] = trajectory
    report, block = await worker.poll(0.05)
    assert (report, block) == (WorkerReport([], report.cpu_s), [])
    return back


def how(trajectory: Trajectory) -> str:
    """`well` when the environment ended the episode, whether or not the last reply used its budget up."""
    return "well" if trajectory.stop_reason in ("done", "length") else trajectory.stop_reason


def within(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def test_every_lease_comes_back_exactly_once(model_folder: Path) -> None:
    moods = ["", "", "start", "", "step", "", "close", "reward"] * 12

    async def play() -> dict[str, Trajectory]:
        async with workers(model_folder) as (worker, _, _):
            ordered = leases(moods)
            half = len(ordered) // 2
            await worker.lease(ordered[:half])
            await worker.poll(0.0)
            await worker.lease(ordered[half:])
            return await collected(worker, len(ordered))

    back = within(60, play())
    ends = Counter((lease.task.data["mood"], how(back[lease.sample_id])) for lease in leases(moods))
    assert ends == {("", "well"): 48, ("start", "failed"): 12, ("step", "failed"): 12, ("close", "well"): 12, ("reward", "failed"): 12}
    assert {trajectory.trainable for trajectory in back.values() if trajectory.stop_reason == "failed"} == {False}
    for trajectory in back.values():
        if how(trajectory) == "well":
            assert [turn.author for turn in trajectory.turns] == ["environment", "policy"] * 2
            assert set(trajectory.token_version[trajectory.loss_mask].tolist()) == {5}
            assert (trajectory.logp[trajectory.loss_mask] < 0).all()


def test_one_worker_runs_thousands_of_episodes_at_the_same_time(model_folder: Path) -> None:
    count = 2500

    async def play() -> dict[str, Trajectory]:
        Crowd.num_missing = count
        async with workers(model_folder, env="python:crowd", num_slots=64) as (worker, _, _):
            await worker.lease(leases([""] * count, deadline_s=60.0))
            return await collected(worker, count)

    assert {how(trajectory) for trajectory in within(60, play()).values()} == {"well"}


def test_a_samples_tokens_depend_neither_on_its_company_nor_on_its_engine(model_folder: Path) -> None:
    async def play(chosen: Sequence[Lease], num_slots: int) -> dict[str, Trajectory]:
        async with workers(model_folder, num_slots=num_slots, keeps_cache=False) as (worker, _, _):
            await worker.lease(chosen)
            return await collected(worker, len(chosen))

    every = leases([""] * 16)
    together = within(60, play(every, 8))
    alone = within(60, play([replace(lease, engine=0) for lease in every[3:6]], 8))
    for sample_id, trajectory in alone.items():
        assert np.array_equal(trajectory.token_ids, together[sample_id].token_ids)
        assert np.array_equal(trajectory.logp, together[sample_id].logp)


def test_a_deadline_frees_the_engine_and_the_sample_comes_back(model_folder: Path) -> None:
    async def play() -> None:
        async with workers(model_folder, num_slots=2) as (worker, engines, _):
            await engines[1].pause()  # answers nothing from here on
            await worker.lease(leases(["", "", "hang", ""], deadline_s=1.0))
            back = await collected(worker, 4)
            reasons = {name: how(trajectory) for name, trajectory in back.items()}
            assert reasons == {"s000": "well", "s001": "deadline", "s002": "deadline", "s003": "deadline"}
            await engines[1].resume()
            await worker.lease([replace(lease, attempt=1) for lease in leases(["", ""])])
            back = await collected(worker, 2)
            assert {(how(trajectory), trajectory.attempt) for trajectory in back.values()} == {("well", 1)}
            for engine in engines:
                assert ((load := await engine.load()).num_running, load.num_waiting) == (0, 0)

    within(60, play())


def test_an_environment_that_cannot_be_built_is_a_failed_sample(model_folder: Path) -> None:
    async def play() -> dict[str, Trajectory]:
        async with workers(model_folder, env="python:unbuildable") as (worker, _, _):
            await worker.lease(leases(["", ""]))
            return await collected(worker, 2)

    for trajectory in within(60, play()).values():
        assert (trajectory.stop_reason, trajectory.fault) == ("failed", "environment")
        assert "OSError: cannot be built" in trajectory.error


def test_samples_of_an_engine_that_breaks_go_on_at_another_one(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(wait_s: float) -> Any:
        raise RuntimeError("the engine's loop broke")

    async def play() -> dict[str, Trajectory]:
        async with workers(model_folder) as (worker, engines, _):
            monkeypatch.setattr(engines[1].backend, "poll", broken)
            await worker.lease(leases([""] * 8))
            return await collected(worker, 8)

    back = within(60, play())
    assert {name: how(trajectory) for name, trajectory in back.items()} == {f"s{n:03d}": "well" for n in range(8)}


def test_the_pulse_of_an_engine_is_a_token(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(wait_s: float) -> Any:
        raise RuntimeError("the engine's loop broke")

    async def play() -> None:
        async with workers(model_folder) as (_, engines, _):
            engine = engines[0]
            before = engine.backend.load().num_tokens_total
            await engine.pulse()
            assert engine.backend.load().num_tokens_total == before + 1, "nobody waited for a token, so that one was asked for"
            await engine.pause()
            await engine.pulse()
            assert engine.backend.load().num_tokens_total == before + 1, "an engine that may not compute has nothing to show"
            await engine.resume()
            monkeypatch.setattr(engines[1].backend, "poll", broken)
            with pytest.raises(RuntimeError, match="the engine's loop broke"):
                await engines[1].pulse()

    within(60, play())


def test_a_sample_is_judged_while_another_one_of_its_batch_still_generates(model_folder: Path) -> None:
    async def play() -> None:
        async with workers(model_folder) as (worker, engines, _):
            gate = Gate(engines[1], num_steps=2)
            await worker.lease(leases(["", ""]))
            await gate.reached()
            report, _ = await worker.poll(20.0)
            assert [(info.sample_id, info.reward is not None) for info in report.infos] == [("s000", True)]
            gate.opened.set()
            second = (await collected(worker, 1))["s001"]
            judged = next(stamp.time for stamp in unpack_life(report.infos[0].life) if stamp.state == "reward")
            generating, after = unpack_life(second.life)[2:4]
            assert (generating.state, after.state) == ("generating", "environment")
            assert judged < after.time
            assert (generating.place, generating.slot, generating.version) == (1, 0, 5)

    within(60, play())


def test_what_is_no_longer_wanted_comes_back_at_once_from_wherever_it_stands(model_folder: Path) -> None:
    async def play() -> None:
        async with workers(model_folder) as (worker, engines, _):
            await engines[1].pause()
            await worker.lease(leases(["hang", "", "judge", ""]))
            await judging.wait()
            while (await engines[1].load()).num_waiting != 2:
                await asyncio.sleep(0.001)
            await worker.abort([("s000", 0), ("s001", 0), ("s002", 0), ("s001", 1), ("unheard-of", 0)])
            await worker.abort([("s000", 0)])
            back = await collected(worker, 3)
            assert {name: (each.stop_reason, each.fault, each.reward) for name, each in back.items()} == dict.fromkeys(
                ("s000", "s001", "s002"), ("aborted", "", None)
            )
            ends = {name: [stamp.state for stamp in unpack_life(each.life)][-2:] for name, each in back.items()}
            assert ends == {"s000": ["generating", "environment"], "s001": ["waiting", "environment"], "s002": ["environment", "reward"]}
            assert (await engines[1].load()).num_waiting == 1
            await engines[1].resume()
            assert how((await collected(worker, 1))["s003"]) == "well"
            await worker.abort([("s003", 0)])
            assert (await worker.poll(0.05))[1] == []

    within(60, play())


def test_a_sample_that_is_aborted_while_it_generates_keeps_its_tokens_and_frees_its_slot(model_folder: Path) -> None:
    async def play() -> None:
        async with workers(model_folder) as (worker, engines, lines):
            whole = leases([""])
            await worker.lease(whole)
            expected = (await collected(worker, 1))["s000"]
            gate = Gate(engines[0], num_steps=2)
            await worker.lease([replace(whole[0], attempt=1)])
            await gate.reached()
            await worker.abort([("s000", 1)])
            await lines[0].until("abort")
            gate.opened.set()
            back = (await collected(worker, 1))["s000"]
            assert (back.stop_reason, back.num_new_tokens) == ("aborted", 3), "two steps, and the one that it was in"
            assert np.array_equal(back.token_ids, expected.token_ids[: len(back.token_ids)])
            assert (await engines[0].load()).num_running == 0

    within(60, play())


def test_an_engine_that_hangs_is_late_and_one_that_is_paused_is_not(model_folder: Path) -> None:
    async def play() -> None:
        async with workers(model_folder) as (worker, engines, lines):
            gate = Gate(engines[0], num_steps=1)
            await engines[1].pause()
            await worker.lease([replace(lease, stall_s=0.05) for lease in leases(["", ""])])
            late = (await collected(worker, 1))["s000"]
            assert (late.stop_reason, late.fault) == ("deadline", "engine")
            assert "gave no token of the reply for 0.05 s" in late.error
            await lines[1].until("poll", 10)  # a quarter of the stall each
            assert (await worker.poll(0.0))[1] == []
            gate.opened.set()
            await worker.abort([("s001", 0)])
            assert (await collected(worker, 1))["s001"].stop_reason == "aborted"
            while (await engines[0].load()).num_running:
                await asyncio.sleep(0.001)

    within(60, play())


def test_environments_and_rewards_have_deadlines(model_folder: Path) -> None:
    async def play() -> dict[str, Trajectory]:
        async with workers(model_folder, env_deadline_s=0.05, reward_deadline_s=0.3) as (worker, _, _):
            await worker.lease(leases(["hang", "judge"]))
            return await collected(worker, 2)

    back = within(60, play())
    assert {name: (each.stop_reason, each.fault) for name, each in back.items()} == {
        "s000": ("deadline", "environment"),
        "s001": ("failed", "reward"),
    }
    assert "reward 'patient' on task 't1' took longer than 0.3 s" in back["s001"].error


def test_clients_of_one_engine_do_not_see_each_others_requests(model_folder: Path) -> None:
    async def play() -> None:
        async with workers(model_folder) as (_, engines, _):
            engine = engines[0]
            request = GenRequest("same-id", [1, 4, 5], Sampling(max_new_tokens=4), seed=1)
            await engine.submit("ann", [request])
            await engine.submit("bob", [replace(request, seed=2)])
            said: dict[str, list[int]] = {}
            for client in ("ann", "bob"):
                chunks = []
                while not (chunks and chunks[-1].finish):
                    answer = await engine.poll(client, 2.0)
                    chunks += answer.chunks
                    assert answer.load.num_slots == 4
                assert {chunk.id for chunk in chunks} == {"same-id"}
                assert [chunk.finish for chunk in chunks].count(None) == len(chunks) - 1
                said[client] = [token for chunk in chunks for token in chunk.token_ids]
            assert said["ann"] != said["bob"]
            await engine.abort("ann", ["same-id", "never-heard-of"])
            assert (await engine.poll("ann", 0.05)).chunks == []

    within(60, play())
