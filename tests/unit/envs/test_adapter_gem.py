"""The adapter for GEM, against the real package."""

import asyncio
import importlib
import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("gem", reason="the extra 'gem' is not installed")


from drumroll.config.models import EnvConfig
from drumroll.envs.blocking import end_processes
from drumroll.errors import PluginError
from drumroll.registry import REGISTRY
from drumroll.types import Task

GUESS = "game:GuessTheNumber-v0-easy"
GAMES = {
    GUESS: ["9", "2", "5"],
    "game:Mastermind-v0-easy": ["1 2", "3 4", "5 6"],
    "game:Minesweeper-v0-easy": ["reveal 0 0", "flag 1 1", "reveal 4 4"],
    "game:FifteenPuzzle-v0-easy": ["up", "left", "down"],
    "game:Sudoku-v0-easy": ["1 1 1", "2 2 2", "3 3 3"],
    "game:Game2048-v0-easy": ["left", "up", "right", "down", "left", "up"],
}
"""Games that need no download, with a few moves."""


def build(env_id, **options):
    entry = REGISTRY.lookup("env", "gem")
    return entry.target(entry.schema(EnvConfig)(kind="gem", id=env_id, **options))


def begin(env_id, seed=0, **options):
    env = build(env_id, **options)
    return env, env.begin(Task("t", data={"seed": seed}))


def text_of(step):
    return step.messages[0]["content"]


@pytest.mark.parametrize("env_id", GAMES)
def test_episodes_side_by_side_are_those_that_would_be_played_alone(env_id):
    """They share the global random generators of one process, which must not show."""

    def play(*seeds):
        episodes = [begin(env_id, seed) for seed in seeds]
        shown = [[step] for _, step in episodes]
        for move in GAMES[env_id]:
            for steps, (env, _) in zip(shown, episodes, strict=True):
                if not steps[-1].done:
                    steps.append(env.act(f"\\boxed{{{move}}}"))
        return shown

    one, two = play(1, 2)
    assert [one] == play(1)
    assert [two] == play(2)
    assert len(one) > 2


def test_a_game_is_won_by_halving():
    env, first = begin("game:GuessTheNumber-v0-hard", seed=4)
    assert text_of(first).startswith("You are playing Guess The Number.")
    assert text_of(first).endswith("Enter your next guess.")
    low, high = 1, 50
    while True:
        guess = (low + high) // 2
        step = env.act(f"I say \\boxed{{{guess}}}")
        if step.done:
            break
        low, high = (guess + 1, high) if "higher" in text_of(step) else (low, guess - 1)
    assert (step.success, step.reward) == (True, 1.0)
    assert step.metrics["moves"] <= 7
    env.end()


def test_a_reply_out_of_form_loses():
    env, _ = begin(GUESS)
    step = env.act("seven")
    assert (step.done, step.success, step.reward) == (True, False, -0.1)


def test_rewards_for_progress_add_up_to_success():
    env, _ = begin("game:Sudoku-v0-easy", seed=2)
    game = env.env
    rows = range(len(game.board))
    empty = [(row, col) for row in rows for col in rows if game.board[row][col] == 0]
    steps = [env.act(f"\\boxed{{{row + 1} {col + 1} {game.full_grid[row][col]}}}") for row, col in empty]
    assert [step.done for step in steps] == [False] * (len(empty) - 1) + [True]
    assert steps[-1].success
    assert sum(step.reward for step in steps) == pytest.approx(1.0)


def test_a_task_of_reasoning_gym():
    env, first = begin("rg:letter_counting", seed=11)
    assert begin("rg:letter_counting", seed=11)[1] == first
    assert begin("rg:letter_counting", seed=12)[1] != first
    step = env.act(f"\\boxed{{{env.env.data['answer']}}}")
    assert (step.done, step.success, step.reward) == (True, True, 1.0)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("game:Sudoku-v0-eas", "Did you mean 'game:Sudoku-v0-easy'"),
        ("math:GSM8K", "without a sandbox"),
        ("code:CodeContest", "without a sandbox"),
        ("eval:MATH500", "without a sandbox"),
        ("rg:countdown", "Use the env `reasoning_gym`"),
    ],
)
def test_what_cannot_be_played_is_refused(env_id, message):
    with pytest.raises(PluginError, match=message):
        begin(env_id)


def test_episodes_in_a_process():
    async def episodes():
        async def episode(seed):
            env = build(GUESS, num_processes=1, chat=False, kwargs={"max_number": 8})
            first = await env.start(Task("t", data={"seed": seed}))
            steps = [await env.step(f"\\boxed{{{guess}}}") for guess in (2, 3)]
            await env.close()
            return [first.prompt, *(step.prompt for step in steps)]

        try:
            return await asyncio.gather(*(episode(seed) for seed in (5, 5, 9)))
        finally:
            await end_processes()

    same, again, other = asyncio.run(episodes())
    assert same == again
    assert "between 1 and 8" in same[0]
    assert other[0].startswith("You are playing")


def test_a_missing_package_gives_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    module = importlib.import_module("drumroll.envs.adapters.gem")
    with pytest.raises(PluginError, match=r"'gem' is not installed: pip install 'drumroll\[gem\]'"):
        exec(Path(module.__file__).read_text(), {"__name__": module.__name__})
