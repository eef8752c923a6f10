"""The adapter for verifiers, against the real package: its tasks, rewards and conversations with replies from elsewhere."""

import asyncio
import importlib
import importlib.util
import sys
import zlib
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="the extra 'verifiers' is not installed")

from drumroll.config.models import EnvConfig
from drumroll.errors import DataError, PluginError, RolloutError
from drumroll.registry import REGISTRY
from drumroll.types import Task

SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    num_rows: int = 5

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace):
        if trace.last_reply == "break":
            raise KeyError("no grade")
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def num_letters(self, trace):
        return float(len(trace.last_reply))

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(self.config.num_rows):
            yield Sum(Data(prompt=f"{n}+1?", system_prompt="Be brief.", answer=str(n + 1)), self.config.task)
"""

GUESS = """
import verifiers.v1 as vf

__all__ = ["Guesses", "GuessEnv"]

class Data(vf.TaskData):
    number: int

class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        trace.info["set up"] = True

    @vf.stop
    async def gives_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "quit"

    @vf.reward
    async def quick(self, trace):
        assert trace.info["set up"]
        return 1.0 / trace.num_turns if trace.info.get("found") else 0.0

class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class GuessEnv(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        task_without = task.with_data(prompt=None)
        async with agents.player.interaction(task_without) as talk:
            segment = await talk.turn("Guess a number.")
            while not segment.terminated:
                guess = int(segment.last_reply)
                if guess == task.data.number:
                    talk.trace.info["found"] = True
                    break
                segment = await talk.turn("more" if guess < task.data.number else "less")

    async def finalize(self, task, episode):
        episode.traces[0].record_metric("final", 1.0)

class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield Guess(Data(prompt="secret", number=n), self.config.task)
            n += 1
"""

SEAT = "    player: vf.AgentConfig = vf.AgentConfig()\n"
TASK = "class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):\n"
HOOK = "    @vf.intercept\n    def change(self, request: vf.Request):\n        return None\n\n"
TWO = GUESS.replace(SEAT, SEAT + SEAT.replace("player", "judge"))
STARTS = GUESS.replace("    async def finalize(", "    async def start(self):\n        pass\n\n    async def finalize(")
CONTAINER = SUMS.replace(TASK, f"{TASK}    NEEDS_CONTAINER = True\n\n")
HOOKS = SUMS.replace(TASK, TASK + HOOK)
TWICE = GUESS.replace("        async with agents", "        await agents.player.run(task)\n        async with agents")


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """Writes a taskset into a file that this process forgets again, so that children of later tests do not load it."""
    monkeypatch.setattr(REGISTRY, "files", {})

    def write(source):
        path = tmp_path / f"taskset_{zlib.crc32(source.encode())}.py"
        path.write_text(source)
        return str(path)

    return write


def build(path, **options):
    entry = REGISTRY.lookup("env", "verifiers")
    return entry.target(entry.schema(EnvConfig)(kind="verifiers", taskset=path, **options))


async def play(env, replies, seed=0):
    """The steps of an episode, its first one included."""
    try:
        steps = [await env.start(Task("t", data={"seed": seed}))]
        for reply in replies:
            steps.append(await env.step(reply))
        return steps
    finally:
        await env.close()


def played(path, replies, seed=0, **options):
    return asyncio.run(play(build(path, **options), replies, seed))


def test_a_row_is_an_environment_of_one_turn(taskset):
    path = taskset(SUMS)
    first, last = played(path, ["4"], seed=3, success_at=2.0)
    assert first.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+1?"}]
    assert (last.done, last.reward, last.success) == (True, 2.0, True)
    assert last.metrics == {"num_letters": 1.0, "right": 1.0, "turns": 1.0}
    wrong = played(path, ["five"], seed=3)[-1]
    assert (wrong.done, wrong.reward, wrong.success) == (True, 0.0, False)


def test_a_module_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "drumroll_test_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(tmp_path)
    assert played("drumroll_test_sums", ["1"])[-1].success
    del sys.modules["drumroll_test_sums"]


def test_a_conversation(taskset):
    first, *middle, last = played(taskset(GUESS), ["2", "9", "7"], seed=7)
    assert first.messages == [{"role": "user", "content": "Guess a number."}]
    assert [step.messages for step in middle] == [[{"role": "user", "content": "more"}], [{"role": "user", "content": "less"}]]
    assert (last.done, last.success, last.metrics["turns"], last.metrics["final"]) == (True, False, 3.0, 1.0)
    assert last.reward == pytest.approx(1 / 3)
    assert played(taskset(GUESS), ["0"])[-1].success


def test_its_own_stops_and_the_budget_of_turns_end_it_with_a_score(taskset):
    async def both():
        return [
            await play(build(taskset(GUESS), max_turns=2), ["2", "3"], seed=7),
            await play(build(taskset(GUESS.replace("int(segment.last_reply)", "len(segment.last_reply)"))), ["xx", "quit"], seed=7),
        ]

    for steps in asyncio.run(both()):
        assert [step.done for step in steps] == [False, False, True]
        assert (steps[-1].reward, steps[-1].success) == (0.0, False)


def test_many_at_a_time_and_cut_short(taskset):
    path = taskset(GUESS)

    async def main():
        episodes = [play(build(path), ["100", str(seed)], seed) for seed in range(20)]
        short = build(path)
        await short.start(Task("t", data={"seed": 1}))
        results = await asyncio.gather(*episodes)
        await short.close()
        return results

    assert all(steps[-1].reward == 0.5 for steps in asyncio.run(main()))


def test_what_fails_in_it_is_no_verdict(taskset):
    with pytest.raises(RolloutError, match="KeyError: 'no grade'"):
        played(taskset(SUMS), ["break"])
    with pytest.raises(ValueError, match="invalid literal"):
        played(taskset(GUESS), ["seven"])
    with pytest.raises(DataError, match="has 5 rows, and row 5 was asked for"):
        played(taskset(SUMS), [], seed=5)
    assert played(taskset(SUMS), ["6"], seed=5, options={"taskset": {"num_rows": 6}})[-1].success


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TWO, "has the agents player, judge"),
        (STARTS, "`start` or `stop` of its own"),
        (CONTAINER, "needs a container"),
        (HOOKS, "has `@intercept` hooks"),
        ("", "cannot be opened by verifiers"),
    ],
)
def test_what_cannot_be_played_is_refused(taskset, source, message):
    with pytest.raises(PluginError, match=message):
        played(taskset(source), [])


def test_a_second_conversation_is_refused(taskset):
    with pytest.raises(PluginError, match="second conversation"):
        played(taskset(TWICE), ["1", "2"])
    with pytest.raises(PluginError, match="cannot be opened by verifiers"):
        played("no_such_taskset_anywhere", [])


def test_a_missing_package_gives_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    module = importlib.import_module("drumroll.envs.adapters.verifiers")
    with pytest.raises(PluginError, match=r"'verifiers' is not installed: pip install 'drumroll\[verifiers\]'"):
        exec(Path(module.__file__).read_text(), {"__name__": module.__name__})
