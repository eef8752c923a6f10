"""Rewards in a child process: a verdict, an error, or a killed child, and never a stuck worker."""

import asyncio
from pathlib import Path

import pytest
from replies import trajectory

from drumroll.config.models import RewardConfig
from drumroll.errors import RewardError
from drumroll.registry import REGISTRY
from drumroll.rewards.process import RewardProcess

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
        process = RewardProcess(configs(tmp_path), {0: "moody", 1: "main_thread"})
        await process.start()
        pids = [(await process.ask(0, trajectory("x", mood=""), 20.0))["moody"]]
        for mood, message in expected.items():
            with pytest.raises(RewardError, match=message):
                await process.ask(0, trajectory("x", mood=mood), 0.5 if mood == "hang" else 20.0)
            pids.append((await process.ask(0, trajectory("x", mood="print"), 20.0))["moody"])
        assert await process.ask(0, trajectory("x", mood="none"), 20.0) == {}
        assert await process.ask(1, trajectory("x", mood=""), 20.0) == {"main_thread": 1.0}
        await process.close()
        assert len(set(pids)) == 4, "a child is replaced where it was killed or died, and only there"
        assert not any(Path(f"/proc/{int(pid)}").exists() for pid in pids)

    asyncio.run(run())


def test_questions_at_the_same_time_get_their_own_answers(tmp_path: Path) -> None:
    async def run() -> None:
        process = RewardProcess(configs(tmp_path), {0: "moody", 1: "main_thread"})
        asked = [asyncio.create_task(process.ask(number % 2, trajectory("x", mood=""), 20.0)) for number in range(20)]
        await asyncio.sleep(0)
        asked[3].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        await process.close()
        names = [next(iter(answer)) for answer in answers if isinstance(answer, dict)]
        assert names == [("moody", "main_thread")[number % 2] for number in range(20) if number != 3]

    asyncio.run(run())


def test_a_reward_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    good = configs(tmp_path)
    kind = "python:gone"
    REGISTRY.shipped["gone"] = lambda trajectory: 1.0
    config = REGISTRY.lookup("reward", kind).schema(RewardConfig)(kind=kind)
    del REGISTRY.shipped["gone"]

    async def run() -> None:
        process = RewardProcess({**good, 2: config}, {0: "moody", 1: "main_thread", 2: "gone"})
        with pytest.raises(RewardError, match=r"did not start: PluginError: .*python:gone"):
            await process.start()

    asyncio.run(run())
