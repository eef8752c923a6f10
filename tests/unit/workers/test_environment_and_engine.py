"""An environment worker and two engines in one process: every lease comes back exactly once, whatever happens on the way."""

from __future__ import annotations

import asyncio
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
from drumroll.registry import REGISTRY
from drumroll.rollout.lease import Lease
from drumroll.types import GenRequest, RankInfo, Sampling, Task, Trajectory, Version, sample_seed
from drumroll.workers.engine import EngineWorker
from drumroll.workers.environment import EnvironmentWorker


class Line:
    """What a handle of the cluster is to the environment worker."""

    def __init__(self, engine: EngineWorker) -> None:
        self.engine = engine

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self.engine, method)(*arguments)


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


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY.shipped, "moody", Moody)
    monkeypatch.setitem(REGISTRY.shipped, "unbuildable", Unbuildable)
    monkeypatch.setitem(REGISTRY.shipped, "digits", digits)
    torch.set_num_threads(1)


@asynccontextmanager
async def workers(
    model_folder: Path, env: str = "python:moody", num_slots: int = 4
) -> AsyncIterator[tuple[EnvironmentWorker, list[EngineWorker]]]:
    rank = RankInfo("environment", 0, 1, "cpu")
    engine = {"kind": "native", "num_slots": num_slots}
    engines = [EngineWorker(rank, engine=engine, model_folder=str(model_folder), dtype="float32") for _ in range(2)]
    weights = list(load_file(model_folder / "model.safetensors").items())
    for each in engines:
        await each.backend.update(Version(0, 5), iter([weights]), "keep")
        await each.resume()
    kwargs: dict[str, Any] = {"env": {"kind": env}, "rewards": [{"kind": "python:digits"}], "max_turns": 2, "max_tokens": 32}
    worker = EnvironmentWorker(rank, model_folder=str(model_folder), **kwargs)
    await worker.connect([Line(each) for each in engines])  # type: ignore[list-item]
    try:
        yield worker, engines
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
        infos, block = await worker.poll(5.0)
        assert [info.sample_id for info in infos] == [trajectory.sample_id for trajectory in block]
        for trajectory in block:
            assert trajectory.sample_id not in back
            back[trajectory.sample_id] = trajectory
    assert await worker.poll(0.05) == ([], [])
    return back


def how(trajectory: Trajectory) -> str:
    """`well` when the environment ended the episode, whether or not the last reply used its budget up."""
    return "well" if trajectory.stop_reason in ("done", "length") else trajectory.stop_reason


def within(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def test_every_lease_comes_back_exactly_once(model_folder: Path) -> None:
    moods = ["", "", "start", "", "step", "", "close", "reward"] * 12

    async def play() -> dict[str, Trajectory]:
        async with workers(model_folder) as (worker, _):
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


def test_a_samples_tokens_depend_neither_on_its_company_nor_on_its_engine(model_folder: Path) -> None:
    async def play(chosen: Sequence[Lease], num_slots: int) -> dict[str, Trajectory]:
        async with workers(model_folder, num_slots=num_slots) as (worker, _):
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
        async with workers(model_folder, num_slots=2) as (worker, engines):
            await engines[1].pause()  # answers nothing from here on
            await worker.lease(leases(["", "", "hang", ""], deadline_s=1.0))
            back = await collected(worker, 4)
            reasons = {name: how(trajectory) for name, trajectory in back.items()}
            assert reasons == {"s000": "well", "s001": "deadline", "s002": "deadline", "s003": "deadline"}
            await engines[1].resume()
            await worker.lease([replace(lease, attempt=1) for lease in leases(["", ""])])
            assert {how(trajectory) for trajectory in (await collected(worker, 2)).values()} == {"well"}
            for engine in engines:
                assert ((load := await engine.load()).num_running, load.num_waiting) == (0, 0)

    within(60, play())


def test_an_environment_that_cannot_be_built_is_a_failed_sample(model_folder: Path) -> None:
    async def play() -> dict[str, Trajectory]:
        async with workers(model_folder, env="python:unbuildable") as (worker, _):
            await worker.lease(leases(["", ""]))
            return await collected(worker, 2)

    for trajectory in within(60, play()).values():
        assert (trajectory.stop_reason, trajectory.error) == ("failed", "OSError: cannot be built (while building env Unbuildable)")


def test_an_engine_that_breaks_fails_its_samples_and_no_others(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(wait_s: float) -> Any:
        raise RuntimeError("the engine's loop broke")

    async def play() -> dict[str, Trajectory]:
        async with workers(model_folder) as (worker, engines):
            monkeypatch.setattr(engines[1].backend, "poll", broken)
            await worker.lease(leases([""] * 8))
            return await collected(worker, 8)

    back = within(60, play())
    assert {name: how(trajectory) for name, trajectory in back.items()} == {f"s{n:03d}": "failed" if n % 2 else "well" for n in range(8)}
    assert all("the engine's loop broke" in trajectory.error for trajectory in back.values() if trajectory.stop_reason == "failed")


def test_clients_of_one_engine_do_not_see_each_others_requests(model_folder: Path) -> None:
    async def play() -> None:
        async with workers(model_folder) as (_, engines):
            engine = engines[0]
            request = GenRequest("same-id", [1, 4, 5], Sampling(max_new_tokens=4), seed=1)
            await engine.submit("ann", [request])
            await engine.submit("bob", [replace(request, seed=2)])
            said: dict[str, list[int]] = {}
            for client in ("ann", "bob"):
                chunks = []
                while not (chunks and chunks[-1].finish):
                    chunks += await engine.poll(client, 2.0)
                assert {chunk.id for chunk in chunks} == {"same-id"}
                assert [chunk.finish for chunk in chunks].count(None) == len(chunks) - 1
                said[client] = [token for chunk in chunks for token in chunk.token_ids]
            assert said["ann"] != said["bob"]
            await engine.abort("ann", ["same-id", "never-heard-of"])
            assert await engine.poll("ann", 0.05) == []

    within(60, play())
