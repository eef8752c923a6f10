"""FrozenLake: Gymnasium's rules, and what all board games do with replies."""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll.envs.board import DIRECTIONS, OFFSETS, BoardConfig, BoardGame
from drumroll.envs.frozen_lake import FrozenLake, Lake, moved, moves_to_goal, random_map, start_of, ways
from drumroll.errors import DataError
from drumroll.registry import REGISTRY
from drumroll.types import Task

GYM_ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
BARE = {"chat": False, "rules": False, "tag": None, "moves": ("U", "D", "L", "R")}


def lake(**options):
    return FrozenLake(FrozenLake.Config(**options))


def play(env, seed, replies):
    async def episode():
        steps = [await env.start(Task("t", data={"seed": seed}))]
        for reply in replies:
            steps.append(await env.step(reply))
        await env.close()
        return steps

    return asyncio.run(episode())


def gym_lake(rows, slippery):
    gymnasium = pytest.importorskip("gymnasium")
    return gymnasium.make("FrozenLake-v1", desc=list(rows), is_slippery=slippery, max_episode_steps=-1)


@pytest.mark.parametrize("size", [4, 6, 8])
def test_random_walks_agree_with_gymnasium(size):
    rng = random.Random(size)
    for seed in range(10):
        rows = random_map(seed, size, 0.2)
        theirs = gym_lake(rows, slippery=False)
        for _ in range(10):
            ours, done = start_of(rows), False
            state, _ = theirs.reset()
            while not done:
                assert ours.player[0] * size + ours.player[1] == state
                direction = rng.choice(DIRECTIONS)
                ours = moved(ours, direction)
                state, reward, done, _, _ = theirs.step(GYM_ACTIONS[direction])
                outcome = lake().outcome(ours)
                assert (outcome is not None) == done
                assert bool(outcome) == (reward == 1)


@pytest.mark.parametrize("name", ["4x4", "8x8"])
def test_slips_have_gymnasiums_probabilities(name):
    first = lake(map=name).first(0)
    size = len(first.rows)
    theirs = gym_lake(first.rows, slippery=True).unwrapped
    for cell in range(size * size):
        here = Lake(first.rows, divmod(cell, size))
        for direction in DIRECTIONS:
            ours = Counter()
            for way in ways(direction):
                row, column = moved(here, way).player
                ours[row * size + column] += 1 / 3
            expected = Counter()
            for probability, state, _, _ in theirs.P[cell][GYM_ACTIONS[direction]]:
                expected[state] += probability
            assert ours == pytest.approx(expected)


def test_published_maps_are_gymnasiums():
    module = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    assert {name: list(lake(map=name).first(0).rows) for name in ("4x4", "8x8")} == module.MAPS


def test_slips_are_drawn_from_the_seed():
    def drawn(seed):
        env = lake(slippery=True)
        env.begin(seed)
        return [env.turned("up") for _ in range(3000)]

    assert drawn(1) == drawn(1) != drawn(2)
    counts = Counter(drawn(1))
    assert set(counts) == {"up", "left", "right"}
    assert all(900 < count < 1100 for count in counts.values())


@given(
    seed=st.integers(0, 10**9), size=st.integers(4, 8), hole_ratio=st.floats(0, 0.4), anywhere=st.booleans(), min_moves=st.integers(1, 4)
)
def test_every_random_map_is_solvable(seed, size, hole_ratio, anywhere, min_moves):
    env = lake(size=size, hole_ratio=hole_ratio, anywhere=anywhere, min_moves=min_moves)
    first = env.begin(seed)
    plan = env.solve(env.position)
    assert min_moves <= len(plan) == moves_to_goal(env.position)
    tiles = "".join(env.position.rows)
    assert (len(tiles), tiles.count("S"), tiles.count("G")) == (size * size, 1, 1)
    assert anywhere or (tiles[0], tiles[-1]) == ("S", "G")
    steps = [env.play(env.reply_for([move])) for move in plan]
    assert not first.done
    assert [step.done for step in steps] == [False] * (len(plan) - 1) + [True]
    assert (steps[-1].success, steps[-1].reward) == (True, 1.0)


def test_hole_ratio_is_a_share_of_tiles():
    def share(hole_ratio):
        maps = ["".join(random_map(seed, 8, hole_ratio)) for seed in range(200)]
        return sum(tiles.count("H") for tiles in maps) / (200 * 64)

    assert share(0.0) == 0
    assert 0.15 < share(0.2) < 0.2  # maps without a way have more holes than most


def test_games_are_the_same_in_every_process():
    script = (
        "from drumroll.envs.frozen_lake import FrozenLake\n"
        "from drumroll.envs.sokoban import Sokoban\n"
        "for game in (FrozenLake(FrozenLake.Config()), Sokoban(Sokoban.Config(width=8, height=8, boxes=2))):\n"
        "    for seed in range(5):\n"
        "        print(game.begin(seed).state, game.solve(game.position))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True).stdout
        for salt in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""


def test_the_first_message_explains_the_game():
    first = play(lake(map="4x4"), 0, [])[0]
    assert first.messages == (
        {
            "role": "user",
            "content": "You stand on a frozen lake. Walk to the goal, one tile at a time, and do not step into a hole.\n"
            "Symbols: 'P' player, '_' frozen, 'O' hole, 'G' goal, 'X' player in hole, '*' player on goal.\n"
            "Actions: Up, Down, Left, Right.\n"
            "Answer with one action, for example: <answer>Right</answer>\n"
            "\nP___\n_O_O\n___O\nO__G",
        },
    )
    assert first.state == "P___\n_O_O\n___O\nO__G"
    assert "slippery" in play(lake(map="4x4", slippery=True), 0, [])[0].messages[0]["content"]


def test_later_messages_are_the_board_and_what_was_wrong():
    steps = play(lake(map="4x4"), 0, ["<answer>right</answer>", "<answer>Jump</answer>", "Down"])
    board = "_P__\n_O_O\n___O\nO__G"
    assert [step.messages[0]["content"] for step in steps[1:]] == [
        board,
        f"'Jump' is no move.\n{board}",
        f"The reply has no <answer>…</answer>.\n{board}",
    ]
    assert steps[3].metrics == {"moves": 3.0, "invalid_actions": 1.0, "malformed_replies": 1.0}
    assert [step.success for step in steps[1:]] == [False] * 3


def test_bare_text_is_the_board_and_a_prompt():
    steps = play(lake(map="4x4", **BARE), 0, ["R", "?"])
    assert [step.prompt for step in steps] == [
        "P___\n_O_O\n___O\nO__G\n>",
        "\n_P__\n_O_O\n___O\nO__G\n>",
        "\n_P__\n_O_O\n___O\nO__G\n>",
    ]
    assert steps[2].metrics["invalid_actions"] == 1


def test_a_hole_ends_the_game_without_success():
    steps = play(lake(map="4x4", **BARE), 0, ["R", "D"])
    assert (steps[-1].done, steps[-1].success, steps[-1].reward) == (True, False, 0.0)
    assert steps[-1].state == "____\n_X_O\n___O\nO__G"


def test_several_moves_of_a_turn_stop_where_the_game_ends():
    env = lake(map="4x4", max_actions_per_turn=9, **BARE)
    last = play(env, 0, ["D||D||R||R||D||R||L||L"])[-1]
    assert (last.done, last.success, last.metrics["moves"]) == (True, True, 6)
    assert last.state.endswith("*")


def test_costs_and_penalties():
    options = {"step_cost": 0.1, "format_penalty": 0.5, "success_reward": 2.0, "max_actions_per_turn": 2}
    replies = [
        "<answer>Down||Down</answer>",
        "Right",
        "<answer>Right||Right||Up</answer>",
        "<answer>x||Down</answer>",
        "<answer>Right</answer>",
    ]
    steps = play(lake(map="4x4", **options), 0, replies)
    assert [step.reward for step in steps[1:]] == pytest.approx([-0.2, -0.6, -0.7, -0.2, 1.9])
    assert steps[-1].success
    assert steps[-1].metrics == {"moves": 8.0, "invalid_actions": 1.0, "malformed_replies": 2.0}


def test_the_budget_of_moves_ends_the_game():
    steps = play(lake(map="4x4", max_moves=3, **BARE), 0, ["U", "?", ""])
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].success is False
    winning = play(lake(map="4x4", max_moves=6, **BARE), 0, "DDRRDR")
    assert (winning[-1].done, winning[-1].success) == (True, True)


def test_symbols_can_be_others():
    assert play(lake(map="4x4", symbols="gymnasium"), 0, [])[0].state == "@FFF\nFHFH\nFFFH\nHFFG"
    assert play(lake(map="4x4", symbols={"player": "Me"}), 0, [])[0].state.startswith("Me___\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"symbols": "plane"}, "Did you mean 'plain'"),
        ({"symbols": {"players": "x"}}, "Did you mean 'player'"),
        ({"symbols": {"player": "_"}}, "symbol of its own"),
        ({"symbols": {"player": ""}}, "symbol of its own"),
        ({"symbols": {"player": "\n"}}, "on one line"),
        ({"moves": ("a", "A", "b", "c")}, "different names were expected"),
        ({"moves": ("a||b", "c", "d", "e")}, "cannot be read back"),
        ({"moves": ("", "c", "d", "e")}, "cannot be read back"),
        ({"map": "4x4", "size": 5}, "`size` has no effect beside `map`"),
        ({"min_moves": 7}, "at most 6"),
        ({"size": 3}, "greater than or equal to 4"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValidationError, match=text):
        lake(**options)


def test_a_resolved_config_is_accepted_again():
    config = FrozenLake.Config(map="8x8", symbols={"hole": "0"})
    assert REGISTRY.lookup("env", "frozen_lake").target.Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("data", [{}, {"seed": "7"}])
def test_a_task_without_a_seed_is_refused(data):
    with pytest.raises(DataError, match="seeds: 0-999"):
        asyncio.run(lake().start(Task("t", data=data)))


class Corridor(BoardGame[int]):
    class Config(BoardConfig):
        length: int = 4
        vocabularies: ClassVar = {"plain": {"player": "P", "floor": "_", "goal": "G"}}

    def about(self):
        return "Walk to the goal."

    def first(self, seed):
        return random.Random(seed).randrange(self.config.length - 1)

    def after(self, position, direction):
        return min(max(position + OFFSETS[direction][1], 0), self.config.length - 1)

    def cells(self, position):
        row = ["floor"] * (self.config.length - 1) + ["goal"]
        row[position] = "player"
        return [row]

    def outcome(self, position):
        return True if position == self.config.length - 1 else None


def test_a_game_of_ones_own_has_rules_an_expert_and_an_end():
    env = Corridor(Corridor.Config(length=9))
    start = env.first(3)
    assert env.solve(start) == ["right"] * (8 - start)
    steps = play(env, 3, [env.reply_for([move]) for move in env.solve(start)])
    assert steps[0].messages[0]["content"].startswith("Walk to the goal.")
    assert steps[-1].success
