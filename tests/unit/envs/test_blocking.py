"""Blocking environments: what goes wrong in one episode stays there, or in its process, and the loop never waits."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from drumroll.config.models import EnvConfig
from drumroll.envs import blocking
from drumroll.envs.blocking import BlockingEnv, end_processes
from drumroll.errors import PluginError, PolicyFault, WorkerError, WorkerLost
from drumroll.registry import REGISTRY
from drumroll.types import Task

KIND = f"{Path(__file__).with_name('blocking_examples.py')}:Moody"


def build(folder: Path, **options) -> BlockingEnv:
    entry = REGISTRY.lookup("env", KIND)
    return entry.target(entry.schema(EnvConfig)(kind=KIND, log=str(folder / "log"), **options))


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def run(main) -> None:
    async def whole() -> None:
        try:
            await main()
        finally:
            await end_processes()

    asyncio.run(whole())


async def begun(folder: Path, name: str = "t", **options) -> tuple[BlockingEnv, int]:
    """An environment whose episode has begun, and the process that it lives in."""
    env = build(folder, **options)
    step = await env.start(Task(name))
    return env, int(step.prompt)


async def waits_in_pipe(pipe: Path) -> int:
    """Returns when somebody reads the pipe: the end to write into."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            await asyncio.sleep(0.01)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("runs_in", ["thread", "process"])
def test_an_episode(tmp_path, runs_in) -> None:
    async def main() -> None:
        env, pid = await begun(tmp_path, runs_in=runs_in)
        assert (pid == os.getpid()) == (runs_in == "thread")
        step = await env.step("go on")
        assert (int(step.prompt), step.reward, step.done) == (pid, 0.5, False)
        assert (await env.step("done")).done
        await env.close()

    run(main)
    assert log(tmp_path) == ["t begin", "t act go on", "t act done", "t end"]


FAILURES = {
    "raise": (KeyError, WorkerError, "nothing here"),
    "fault": (PolicyFault, PolicyFault, "off the board"),
    "exit": (RuntimeError, WorkerError, "SystemExit: enough"),
    "iterate": (RuntimeError, WorkerError, "StopIteration"),
    "type": (TypeError, WorkerError, "Moody.act returned str; a Step was expected"),
    "odd": (None, WorkerError, "pickle"),
    "die": (None, WorkerLost, "exit code 3"),
    "crash": (None, WorkerLost, "signal SIGSEGV"),
}


@pytest.mark.parametrize("runs_in", ["thread", "process"])
def test_failures_are_told_apart_and_the_next_episode_is_played(tmp_path, runs_in) -> None:
    async def main() -> None:
        pids = []
        for reply, (in_thread, in_process, message) in FAILURES.items():
            expected = in_thread if runs_in == "thread" else in_process
            if expected is None:
                continue
            env, pid = await begun(tmp_path, reply, runs_in=runs_in, num_processes=1)
            with pytest.raises(expected, match=message) as failure:
                await env.step(reply)
            if expected is PolicyFault:
                assert (failure.value.reward, failure.value.reason) == (-1.0, "off the board")
            await env.close()
            pids.append(pid)
            assert ("end" in log(tmp_path)[-1]) == (expected is not WorkerLost)
        assert len(set(pids)) == (1 if runs_in == "thread" else 2), "a child is replaced where it died, and only there"

    run(main)


@pytest.mark.parametrize("runs_in", ["thread", "process"])
def test_a_beginning_that_fails_is_ended(tmp_path, runs_in) -> None:
    async def main() -> None:
        env = build(tmp_path, runs_in=runs_in)
        with pytest.raises((KeyError, WorkerError), match="no such board"):
            await env.start(Task("t", data={"fail": True}))
        await env.close()
        never_begun = build(tmp_path, runs_in=runs_in)
        await never_begun.close()

    run(main)
    assert log(tmp_path) == ["t begin", "t end"]


def test_threads_run_at_the_same_time(tmp_path) -> None:
    async def main() -> None:
        envs = [(await begun(tmp_path))[0] for _ in range(2)]
        await asyncio.gather(*(env.step("meet") for env in envs))  # each returns when both are in it
        await asyncio.gather(*(env.close() for env in envs))

    run(main)


def test_a_thread_that_hangs_is_replaced(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(blocking, "_THREADS", blocking._Threads(2))

    async def main() -> None:
        for number in range(5):
            env, _ = await begun(tmp_path, f"{number}")
            call = asyncio.create_task(env.step("hang"))
            while f"{number} act hang" not in log(tmp_path):
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await env.close()  # its thread would end it
        env, _ = await begun(tmp_path, "last")
        assert (await env.step("done")).done
        await env.close()

    run(main)
    assert log(tmp_path)[-3:] == ["last begin", "last act done", "last end"]


def test_a_thread_that_comes_back_late_ends_its_episode(tmp_path, monkeypatch) -> None:
    threads = blocking._Threads(1)
    monkeypatch.setattr(blocking, "_THREADS", threads)
    os.mkfifo(pipe := tmp_path / "pipe")

    async def main() -> None:
        env, _ = await begun(tmp_path, "late")
        call = asyncio.create_task(env.step(f"read:{pipe}"))
        writer = await waits_in_pipe(pipe)
        queued = build(tmp_path)
        waiting = asyncio.create_task(queued.start(Task("queued")))
        await asyncio.sleep(0)
        waiting.cancel()
        call.cancel()
        await asyncio.gather(call, waiting, return_exceptions=True)
        await queued.close()
        await env.close()
        assert log(tmp_path) == ["late begin", "late act read"]
        os.close(writer)
        while "late end" not in log(tmp_path):
            await asyncio.sleep(0.01)
        other, _ = await begun(tmp_path, "other")
        await other.close()

    run(main)
    assert not any("queued" in line for line in log(tmp_path)), "what was cancelled in the queue never began"


def test_a_child_that_hangs_is_killed_and_its_other_episodes_fail(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(blocking, "PATIENCE_S", 0.1)

    async def main() -> None:
        options = {"runs_in": "process", "num_processes": 1}
        hanging, pid = await begun(tmp_path, "hanging", **options)
        queued, same = await begun(tmp_path, "queued", **options)
        between, _ = await begun(tmp_path, "between", **options)
        assert pid == same
        call = asyncio.create_task(hanging.step("hang"))
        while "hanging act hang" not in log(tmp_path):
            await asyncio.sleep(0.01)
        other = asyncio.create_task(queued.step("go on"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(WorkerLost, match=r"still was in a call 0\.1 s after"):
            await other
        with pytest.raises(WorkerLost, match="the process that the episode lived in is gone"):
            await between.step("go on")
        await asyncio.gather(*(env.close() for env in (hanging, queued, between)))
        assert not exists(pid)
        env, new = await begun(tmp_path, **options)
        assert new != pid
        await env.close()

    run(main)


def test_a_child_that_comes_back_in_time_lives_on(tmp_path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")

    async def main() -> None:
        options = {"runs_in": "process", "num_processes": 1}
        env, pid = await begun(tmp_path, "unwanted", **options)
        other, _ = await begun(tmp_path, "queued", **options)
        call = asyncio.create_task(env.step(f"read:{pipe}"))
        writer = await waits_in_pipe(pipe)
        waiting = asyncio.create_task(other.step("never"))
        await asyncio.sleep(0)
        waiting.cancel()
        call.cancel()
        await asyncio.gather(call, waiting, return_exceptions=True)
        os.close(writer)
        await env.close()
        assert int((await other.step("go on")).prompt) == pid
        await other.close()

    run(main)
    assert log(tmp_path)[2:] == ["unwanted act read", "unwanted end", "queued act go on", "queued end"]


def test_episodes_are_dealt_out(tmp_path) -> None:
    async def main() -> None:
        begins = await asyncio.gather(*(begun(tmp_path, runs_in="process", num_processes=2) for _ in range(4)))
        pids = [pid for _, pid in begins]
        assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
        await asyncio.gather(*(env.close() for env, _ in begins))

    run(main)


def test_a_child_is_recycled_when_it_is_idle(tmp_path) -> None:
    async def main() -> None:
        options = {"runs_in": "process", "num_processes": 1, "episodes_per_process": 2}
        first, one = await begun(tmp_path, **options)
        second, also_one = await begun(tmp_path, **options)
        third, two = await begun(tmp_path, **options)
        assert one == also_one != two
        await first.close()
        assert int((await second.step("go on")).prompt) == one, "it lives as long as an episode does"
        await second.close()
        assert not exists(one)
        assert exists(two)
        await third.close()

    run(main)


async def leak(env: BlockingEnv, times: int) -> None:
    for _ in range(times):
        await env.step("leak")


def test_a_child_whose_memory_is_full_is_replaced(tmp_path) -> None:
    async def main() -> None:
        options = {"runs_in": "process", "num_processes": 1, "process_memory_mib": 1024}
        first, one = await begun(tmp_path, **options)
        second, also_one = await begun(tmp_path, **options)
        assert one == also_one
        with pytest.raises(WorkerLost, match=r"memory was full \(`env.process_memory_mib` is 1024\)"):
            await leak(first, times=20)
        with pytest.raises(WorkerLost, match="memory was full"):
            await second.step("go on")
        assert not exists(one)
        third, two = await begun(tmp_path, **options)
        assert int((await third.step("leak")).prompt) == two
        await asyncio.gather(first.close(), second.close(), third.close())

    run(main)


def test_a_process_must_find_the_environment_by_its_name(tmp_path) -> None:
    entry = REGISTRY.lookup("env", KIND)
    env = entry.target(entry.schema(EnvConfig)(kind="single_turn", log="", runs_in="process"))
    with pytest.raises(PluginError, match=re.escape("`kind: single_turn` is SingleTurn")):
        asyncio.run(env.start(Task("t")))
