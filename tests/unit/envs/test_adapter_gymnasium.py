"""The adapter for Gymnasium, against the real package."""

import asyncio
import importlib
import importlib.util
from pathlib import Path

import pytest
from pydantic import ValidationError

pytest.importorskip("gymnasium", reason="the extra 'gym' is not installed")

import gymnasium
from gymnasium.spaces import Discrete, Text

from drumroll.config.models import EnvConfig
from drumroll.envs.adapters.gymnasium import plain
from drumroll.errors import DataError, PluginError
from drumroll.registry import REGISTRY
from drumroll.types import Task

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "observe": "ansi", "actions": {"Left": 0, "Down": 1, "Right": 2, "Up": 3}}
TAXI = {
    "id": max(name for name in gymnasium.registry if name.startswith("Taxi-v")),
    "observe": "ansi",
    "actions": {"South": 0, "North": 1, "East": 2, "West": 3, "Pick": 4, "Drop": 5},
    "success_at": 20.0,
}


class Echo(gymnasium.Env):
    """Asks for the word that it shows, drawn from the seed; says itself whether it was right."""

    observation_space = Text(20)
    action_space = Text(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), size=3))
        return self.word, {}

    def step(self, action):
        return "no", float(action == self.word), action == self.word, False, {"is_success": action == self.word}


class Numbers(Echo):
    observation_space = Discrete(3)
    action_space = Discrete(3)


gymnasium.register("drumroll-test/Echo-v0", Echo, max_episode_steps=3)
gymnasium.register("drumroll-test/Numbers-v0", Numbers)


def build(**options):
    entry = REGISTRY.lookup("env", "gymnasium")
    return entry.target(entry.schema(EnvConfig)(kind="gymnasium", **options))


def play(replies, seed=0, **options):
    """The steps of an episode, its first one included."""

    async def episode():
        env = build(**options)
        try:
            steps = [await env.start(Task("t", data={"seed": seed}))]
            for reply in replies:
                steps.append(await env.step(reply))
            return steps
        finally:
            await env.close()

    return asyncio.run(episode())


def text_of(step):
    return step.messages[0]["content"]


def answers(*actions):
    return [f"<think>hm</think><answer>{action}</answer>" for action in actions]


def test_frozen_lake_is_won():
    steps = play(answers("Down", "Down", "Right", "Right", "Down", "Right"), **LAKE, success_at=1.0, rules="Reach G.")
    assert text_of(steps[0]).startswith("Reach G.\n\n\n{red:S}FFF\nFHFH")
    assert "{red:F}HFH" in text_of(steps[1])
    assert (steps[-1].done, steps[-1].success, steps[-1].reward) == (True, True, 1.0)
    assert steps[-1].metrics == {"moves": 6.0, "invalid_actions": 0.0, "malformed_replies": 0.0}


def test_frozen_lake_is_lost_in_a_hole():
    steps = play(answers("Right", "Down"), **LAKE, success_at=1.0)
    assert (steps[-1].done, steps[-1].success, steps[-1].reward) == (True, False, 0.0)


def test_without_a_word_on_success_there_is_none():
    assert play(answers("Right", "Down"), **LAKE)[-1].success is None


def test_several_actions_a_turn_and_what_is_no_action():
    replies = ["<answer>Right||Jump||Right</answer>", "Right", "<answer>Left||Left||Left||Left</answer>"]
    steps = play(replies, **LAKE, max_actions_per_turn=3, format_penalty=0.1, chat=False)
    assert "'Jump' is no action here" in steps[1].prompt
    assert steps[1].state == steps[1].prompt.split("\n", 1)[1] == steps[2].state, "the state is the board, without remarks"
    assert steps[2].reward == pytest.approx(-0.1)
    assert "SF{red:F}F" in steps[2].state
    assert steps[3].reward == pytest.approx(-0.1)
    assert steps[3].metrics == {"moves": 5.0, "invalid_actions": 1.0, "malformed_replies": 2.0}


def test_a_seed_gives_the_same_episode_and_others_differ():
    slippery = LAKE | {"kwargs": {"is_slippery": True}}
    ways = [[text_of(step) for step in play(answers(*["Left"] * 3), seed=seed, **slippery)] for seed in (3, 3, *range(4, 20))]
    assert ways[0] == ways[1]
    assert len({tuple(way) for way in ways}) > 1


def test_taxi_shows_who_is_where():
    steps = play(answers("Drop"), seed=1, **TAXI)
    board = text_of(steps[0])
    assert all(color in board for color in ("{yellow:", "{blue:", "{magenta:"))
    assert "\x1b" not in board
    assert steps[1].reward == -10.0
    assert not steps[1].done


def test_taxi_by_its_own_table_of_moves():
    """The way to the passenger and to the goal, by the package's transitions, is a success in the end."""
    table = gymnasium.make(TAXI["id"]).unwrapped
    state, _ = table.reset(seed=5)
    paths = {state: []}
    frontier = [state]
    names = {number: name for name, number in TAXI["actions"].items()}
    goal = None
    while goal is None:
        here = frontier.pop(0)
        for action, ((_, there, reward, _),) in table.P[here].items():
            if reward == 20:
                goal = [*paths[here], action]
            elif there not in paths:
                paths[there] = [*paths[here], action]
                frontier.append(there)
    steps = play(answers(*(names[action] for action in goal)), seed=5, **TAXI)
    assert [step.done for step in steps] == [False] * len(goal) + [True]
    assert steps[-1].success
    assert steps[-1].reward == 20.0


def test_text_in_text_out():
    first = play([], id="drumroll-test/Echo-v0")[0]
    word = text_of(first)
    steps = play(answers("longer than five", "aaaaa", word), id="drumroll-test/Echo-v0")
    assert "is no action here" in text_of(steps[1])
    assert (steps[2].done, steps[3].done, steps[3].success, steps[3].reward) == (False, True, True, 1.0)
    truncated = play(answers("x", "x", "x"), id="drumroll-test/Echo-v0")[-1]
    assert (truncated.done, truncated.success) == (True, False)


def test_a_function_of_ones_own_tells_the_observation(tmp_path):
    path = tmp_path / "tell.py"
    path.write_text(
        "def tell(env, observation):\n    return f'cell {observation}'\n\ndef number(env, observation):\n    return observation\n"
    )
    assert text_of(play([], **LAKE | {"observe": f"{path}:tell"})[0]) == "cell 0"
    with pytest.raises(PluginError, match="gave int; text was expected"):
        play([], **LAKE | {"observe": f"{path}:number"})
    with pytest.raises(ValidationError, match=r"no function 'tel'. Did you mean 'tell'"):
        build(**LAKE | {"observe": f"{path}:tel"})
    with pytest.raises(ValidationError, match=r"no way to observe is called 'pixels'"):
        build(**LAKE | {"observe": "pixels"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLake-v9"}, "If it is yours"),
        ({"id": "drumroll-test/Numbers-v0"}, r"shows Discrete\(3\), which is no text"),
        ({"id": "FrozenLake-v1", "observe": "ansi"}, "Give the actions names"),
        ({"id": "FrozenLake-v1", "observe": "ansi", "actions": {"Up": 9}}, r"`env.actions.Up`: .* 9 is not among it"),
    ],
)
def test_what_cannot_be_told_as_text_is_refused(options, message):
    with pytest.raises(PluginError, match=message):
        play([], **options)


def test_a_task_needs_a_seed():
    async def start():
        await build(**LAKE).start(Task("t-3", prompt="?"))

    with pytest.raises(DataError, match=r"task 't-3' has the seed None"):
        asyncio.run(start())


def test_terminal_output_as_plain_text():
    assert plain("a\x1b[34;1mY\x1b[0mb\x1b[43m \x1b[0m\x1b[1mz\x1b[0m\x1b[2J") == "a{blue:Y}b{yellow: }z"


def test_a_missing_package_gives_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    module = importlib.import_module("drumroll.envs.adapters.gymnasium")
    with pytest.raises(PluginError, match=r"'gymnasium' is not installed: pip install 'drumroll\[gym\]'"):
        exec(Path(module.__file__).read_text(), {"__name__": module.__name__})
