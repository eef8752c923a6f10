"""Rewards in a child process: a verdict, an error, or a killed child, and never a stuck worker."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from replies import trajectory

from drumroll.config.models import RewardConfig
from drumroll.errors import RewardError
from drumroll.registry import REGISTRY
from drumroll.rewards.process import RewardProcesses

SOURCE = """
import os, signal, time

def moody(trajectory):
    mood = trajectory.task.data["mood"]
    if mood == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 31))
        while True:
            time.sleep(60)
    if mood == "die":
        os._exit(3)
    if mood == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mood == "raise":
        raise KeyError("nothing here")
    if mood == "slow":
        time.sleep(0.4)
    if mood == "print":
        print("x" * 100_000)
    return {"nan": float("nan"), "text": "much", "huge": 1e300, "none": None}.get(mood, float(os.getpid()))

def main_thread(trajectory):
    signal.signal(signal.SIGALRM, lambda *_: None)  # only the main thread may
    return 1
"""


def configs(folder: Path) -> dict[int, RewardConfig]:
    path = folder / "moody.py"
    path.write_text(SOURCE)
    kinds = [f"{path}:{name}" for name in ("moody", "main_thread")]
    return {number: REGISTRY.lookup("reward", kind).schema(RewardConfig)(kind=kind) for number, kind in enumerate(kinds)}


def test_failures_are_told_apart_and_the_next_sample_is_judged(tmp_path: Path) -> None:
    expected = {
        "raise": "reward 'moody' failed on task 't-7': KeyError: 'nothing here' .*line 15",
        "nan": "returned nan",
        "text": "returned 'much'",
        "huge": "returned 1e[+]300",
        "hang": "took longer than 0.5 s",
        "die": "its process died .exit code 3",
        "crash": "its process died .signal SIGSEGV",
    }

    async def run() -> None:
        processes = RewardProcesses(configs(tmp_path), {0: "moody", 1: "main_thread"})
        await processes.start()
        pids = [(await processes.ask(0, trajectory("x", mood=""), 20.0))["moody"]]
        for mood, message in expected.items():
            with pytest.raises(RewardError, match=message):
                await processes.ask(0, trajectory("x", mood=mood), 0.5 if mood == "hang" else 20.0)
            pids.append((await processes.ask(0, trajectory("x", mood="print"), 20.0))["moody"])
        assert await processes.ask(0, trajectory("x", mood="none"), 20.0) == {}
        assert await processes.ask(1, trajectory("x", mood=""), 20.0) == {"main_thread": 1.0}
        await processes.close()
        assert len(set(pids)) == 4, "a child is replaced where it was killed or died, and only there"
        assert not any(Path(f"/proc/{int(pid)}").exists() for pid in pids)

    asyncio.run(run())


def test_questions_at_the_same_time_get_their_own_answers(tmp_path: Path) -> None:
    async def run() -> None:
        processes = RewardProcesses(configs(tmp_path), {0: "moody", 1: "main_thread"})
        asked = [asyncio.create_task(processes.ask(number % 2, trajectory("x", mood=""), 20.0)) for number in range(20)]
        await asyncio.sleep(0)
        asked[3].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        await processes.close()
        names = [next(iter(answer)) for answer in answers if isinstance(answer, dict)]
        assert names == [("moody", "main_thread")[number % 2] for number in range(20) if number != 3]

    asyncio.run(run())


def test_a_sample_that_hangs_keeps_no_others_waiting(tmp_path: Path) -> None:
    async def run() -> None:
        processes = RewardProcesses(configs(tmp_path), {0: "moody", 1: "main_thread"})
        await processes.ask(1, trajectory("x", mood=""), 20.0)
        hanging = [asyncio.create_task(processes.ask(0, trajectory("x", mood="hang"), 60.0)) for _ in range(3)]
        answers = await asyncio.gather(*(processes.ask(0, trajectory("x", mood=""), 20.0) for _ in range(20)))
        assert len({answer["moody"] for answer in answers}) == 1, "one computes at a time, in the same process"
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*hanging, return_exceptions=True))
        await processes.close()

    asyncio.run(run())


def test_questions_that_all_take_long_have_their_turns(tmp_path: Path) -> None:
    async def run() -> None:
        processes = RewardProcesses(configs(tmp_path), {0: "moody", 1: "main_thread"})
        await processes.ask(0, trajectory("x", mood="slow"), 20.0)
        answers = await asyncio.gather(*(processes.ask(0, trajectory("x", mood="slow"), 20.0) for _ in range(4)))
        assert len({answer["moody"] for answer in answers}) == 1, "nobody is overtaken for being as slow as all others"
        await processes.close()

    asyncio.run(run())


def test_processes_that_are_killed_are_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        processes = RewardProcesses(configs(tmp_path), {0: "moody", 1: "main_thread"})

        async def another_than(*pids: float) -> float:
            """The process that answers, once those that have ended are known to have."""
            while True:
                with contextlib.suppress(RewardError):
                    pid = (await processes.ask(0, trajectory("x", mood=""), 20.0))["moody"]
                    if pid not in pids:
                        return pid

        child = await another_than()
        os.kill(int(child), signal.SIGKILL)
        second = await another_than(child)
        status = Path(f"/proc/{int(second)}/status").read_text().splitlines()
        nursery = int(next(line.split()[1] for line in status if line.startswith("PPid")))
        assert nursery != os.getpid()
        os.kill(nursery, signal.SIGKILL)
        await another_than(child, second)
        await processes.close()

    asyncio.run(run())


def test_rewards_whose_module_has_threads_get_processes_that_are_not_forked(tmp_path: Path) -> None:
    path = tmp_path / "threaded.py"
    path.write_text("import os, threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + SOURCE)
    kind = f"{path}:moody"
    config = REGISTRY.lookup("reward", kind).schema(RewardConfig)(kind=kind)

    async def run() -> None:
        processes = RewardProcesses({0: config}, {0: "moody"})
        first = (await processes.ask(0, trajectory("x", mood=""), 20.0))["moody"]
        with pytest.raises(RewardError, match="exit code 3"):
            await processes.ask(0, trajectory("x", mood="die"), 20.0)
        assert (await processes.ask(0, trajectory("x", mood=""), 20.0))["moody"] != first
        await processes.close()

    asyncio.run(run())


def test_a_reward_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    good = configs(tmp_path)
    kind = "python:gone"
    REGISTRY.shipped["gone"] = lambda trajectory: 1.0
    config = REGISTRY.lookup("reward", kind).schema(RewardConfig)(kind=kind)
    del REGISTRY.shipped["gone"]

    async def run() -> None:
        processes = RewardProcesses({**good, 2: config}, {0: "moody", 1: "main_thread", 2: "gone"})
        with pytest.raises(RewardError, match=r"did not start: PluginError: .*python:gone"):
            await processes.start()

    asyncio.run(run())
