"""Sokoban: one rule, levels from seeds that can be solved, and level files."""

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll.envs.board import DIRECTIONS
from drumroll.envs.sokoban import Sokoban
from drumroll.envs.sokoban.boxoban import pick_level, read_texts
from drumroll.envs.sokoban.generator import Design, generate
from drumroll.envs.sokoban.level import format_level, parse_level
from drumroll.envs.sokoban.pushes import least_pushes, push_distances
from drumroll.envs.sokoban.solver import solve_level
from drumroll.errors import ConfigError, DataError
from drumroll.types import Task

BOXOBAN = Path(__file__).parents[4] / "shared" / "data" / "boxoban_unfiltered_test_000.txt"
needs_boxoban = pytest.mark.skipif(not BOXOBAN.exists(), reason=f"{BOXOBAN} is not here")

VARIANTS = {
    "6x6": Design(6, 6, 1, 0.15, 30, 2),
    "8x8": Design(8, 8, 2, 0.15, 30, 4),
    "wide": Design(12, 5, 3, 0.05, 40, 5),
    "dense": Design(7, 7, 1, 0.4, 30, 1),
}


def level(*rows):
    return parse_level(rows)


def pushes_of(start, moves):
    """Play moves; the last position, and how many of them pushed."""
    here, pushes = start, 0
    for move in moves:
        there = here.moved(move)
        pushes += there.boxes != here.boxes
        here = there
    return here, pushes


@pytest.mark.parametrize(
    ("before", "direction", "after"),
    [
        (["#####", "#@ .$#", "#####"], "right", ["#####", "# @.$#", "#####"]),
        (["######", "#@$ .#", "######"], "right", ["######", "# @$.#", "######"]),
        (["######", "# @$.#", "######"], "right", ["######", "#  @*#", "######"]),
        (["######", "#@*  #", "######"], "right", ["######", "# +$ #", "######"]),
        (["######", "#+$  #", "######"], "right", ["######", "#.@$ #", "######"]),
        (["######", "#.@$ #", "######"], "left", ["######", "#+ $ #", "######"]),
    ],
)
def test_steps_and_pushes(before, direction, after):
    assert format_level(level(*before).moved(direction)) == format_level(level(*after))


@pytest.mark.parametrize(
    "rows",
    [
        ["######", "#. @$#", "######"],  # a box at a wall
        ["#######", "#..@$$#", "#######"],  # two boxes at a wall
        ["########", "#..@$$ #", "########"],  # two boxes with space behind them
        ["#######", "#.$ @##", "#######"],  # a wall
    ],
)
def test_illegal_pushes_do_nothing(rows):
    assert level(*rows).moved("right") == level(*rows)


def test_boxes_are_never_pulled():
    there = level("#######", "#. @$ #", "#######").moved("left")
    assert format_level(there) == "#######\n#.@ $ #\n#######"


@given(seed=st.integers(0, 10**6), moves=st.lists(st.sampled_from(DIRECTIONS), max_size=40))
def test_play_keeps_walls_targets_and_the_number_of_boxes(seed, moves):
    start = generate(seed, VARIANTS["8x8"])
    here = start
    for move in moves:
        there = here.moved(move)
        assert (there.walls, there.targets, len(there.boxes)) == (start.walls, start.targets, len(start.boxes))
        assert not there.boxes & there.walls
        assert there.player not in there.walls | there.boxes
        assert len(there.boxes - here.boxes) <= 1
        assert there.boxes == here.boxes or there.player != here.player
        here = there
    assert parse_level(format_level(here).split("\n")) == here


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_every_generated_level_can_be_solved_with_enough_pushes(variant, seed):
    design = VARIANTS[variant]
    start = generate(seed, design)
    assert (start.width, start.height, len(start.boxes), len(start.targets)) == (
        design.width,
        design.height,
        design.num_boxes,
        design.num_boxes,
    )
    assert not start.is_solved
    solution = solve_level(start, max_states=20_000)
    end, pushes = pushes_of(start, solution)
    assert end.is_solved
    assert pushes >= design.min_pushes


def test_seeds_and_only_seeds_decide():
    design = VARIANTS["6x6"]
    assert [generate(seed, design) for seed in range(50)] == [generate(seed, design) for seed in range(50)]
    assert len({generate(seed, design) for seed in range(50)}) > 45


def test_search_depth_makes_longer_solutions():
    def mean_moves(search_depth):
        levels = [generate(seed, Design(8, 8, 2, 0.15, search_depth, 1)) for seed in range(40)]
        return sum(len(solve_level(each, 20_000)) for each in levels) / len(levels)

    assert mean_moves(2) < mean_moves(10) < mean_moves(60)


def test_impossible_options_are_told():
    with pytest.raises(ConfigError, match="min_pushes"):
        generate(0, Design(5, 5, 1, 0.0, 30, 50))


def fewest_pushes(start):
    """By trying everything: layer by layer of pushes, with all the walking that needs none."""
    layer, seen, pushes = {start}, set(), 0
    while layer:
        walk = list(layer)
        pushed = set()
        while walk:
            here = walk.pop()
            if here in seen:
                continue
            seen.add(here)
            if here.is_solved:
                return pushes
            for move in DIRECTIONS:
                there = here.moved(move)
                (walk.append if there.boxes == here.boxes else pushed.add)(there)
        layer, pushes = pushed, pushes + 1
    return None


@pytest.mark.parametrize("design", [Design(6, 6, 1, 0.1, 30, 1), Design(7, 7, 2, 0.25, 60, 8)], ids=["one box", "two boxes"])
def test_the_solver_needs_no_push_too_many(design):
    for seed in range(15):
        start = generate(seed, design)
        _, pushes = pushes_of(start, solve_level(start, 20_000))
        assert pushes == fewest_pushes(start)


def test_pushes_are_counted_from_where_the_player_can_stand():
    start = level("#######", "#     #", "# .   #", "#  $@ #", "#######")
    distances = push_distances(min(start.targets), start.floor, (-7, 7, -1, 1))
    assert distances == {16: 0, 17: 1, 18: 2}, "along walls and out of corners no box comes back"


def test_each_box_needs_a_target_of_its_own():
    near, far = {1: 0, 2: 1, 3: 1}, {2: 5, 3: 7}
    assert least_pushes([2, 3], [near, far]) == 6
    assert least_pushes([1, 2], [near, far]) == 5
    assert least_pushes([1, 1], [near, far]) is None


def test_the_solver_knows_when_there_is_no_solution_and_when_to_give_up():
    dead = level("######", "#$  .#", "#  @ #", "######")
    assert solve_level(dead, 20_000) is None
    assert solve_level(level("######", "#@.* #", "#  $ #", "#    #", "######"), 20_000) is not None
    assert solve_level(generate(3, VARIANTS["8x8"]), 1) is None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["####", "#@.#", "####"], "1 players, 0 boxes, 1 targets"),
        (["#####", "#@$ #", "#####"], "1 boxes, 0 targets"),
        (["######", "#@@$.#", "######"], "2 players"),
        (["#####", "#@x.#", "#####"], "symbol 'x'"),
        (["#### ", "#@$.#", "#####"], "gaps"),
        ([], "0 players"),
    ],
)
def test_bad_levels_are_told(rows, text):
    with pytest.raises(DataError, match=text):
        parse_level(rows)


def test_lines_that_end_early_are_filled_up_with_walls():
    assert level("###", "#@$.", "#####") == level("#####", "#@$.#", "#####")


def test_level_files_and_folders(tmp_path):
    (tmp_path / "000.txt").write_text("; 0\n#####\n#@$.#\n#####\n\n; 1\n######\n#@ $.#\n######\n")
    (tmp_path / "001.txt").write_text("; 0\n#######\n#@  $.#\n#######\n; 1\n#####\n# @*#\n#####\n")
    assert [pick_level(str(tmp_path), number).width for number in (0, 1, 2, 4)] == [5, 6, 7, 5]
    assert pick_level(str(tmp_path / "000.txt"), 3).width == 6
    with pytest.raises(DataError, match=r"001\.txt', line 6: all boxes are on targets already"):
        pick_level(str(tmp_path), 3)
    (tmp_path / "empty").mkdir()
    for path, text in [(tmp_path / "none.txt", "cannot be read"), (tmp_path / "empty", "holds no levels")]:
        with pytest.raises(DataError, match=text):
            pick_level(str(path), 0)


@needs_boxoban
def test_boxoban_levels_are_read_and_solved():
    texts = read_texts(str(BOXOBAN))
    assert len(texts) == 1000
    env = Sokoban(Sokoban.Config(levels=str(BOXOBAN), symbols="xsb"))
    for seed in range(len(texts)):
        first = pick_level(str(BOXOBAN), seed)
        assert (first.width, first.height, len(first.boxes)) == (10, 10, 4)
        assert format_level(first).split("\n") == list(texts[seed][1])
    for seed in range(20):
        assert env.begin(seed).state == "\n".join(texts[seed][1])
        end, _ = pushes_of(env.position, env.solve(env.position))
        assert end.is_solved


@pytest.mark.parametrize("symbols", ["plain", "xsb", "letters"])
def test_every_vocabulary_shows_the_same_game(symbols):
    env = Sokoban(Sokoban.Config(symbols=symbols, width=8, height=8, boxes=2))
    first = asyncio.run(env.start(Task("t", data={"seed": 4})))
    back = {symbol: kind for kind, symbol in env.config.vocabulary.items()}
    assert [[back[symbol] for symbol in row] for row in first.state.split("\n")] == generate(4, Design(8, 8, 2, 0.15, 30, 2)).cells()
    assert len(back) == 7


def test_an_episode_is_won_by_the_last_push():
    env = Sokoban(Sokoban.Config(step_cost=0.125))
    env.begin(11)
    steps = [env.play(env.reply_for([move])) for move in env.solve(env.position)]
    assert [step.success for step in steps] == [False] * (len(steps) - 1) + [True]
    assert (steps[-1].done, steps[-1].reward, steps[0].reward) == (True, 0.875, -0.125)


def test_options_of_made_levels_have_no_place_beside_level_files():
    with pytest.raises(ValidationError, match="`boxes` has no effect beside `levels`"):
        Sokoban.Config(levels="levels.txt", boxes=2)
    config = Sokoban.Config(levels="levels.txt")
    assert Sokoban.Config.model_validate(config.model_dump()) == config


def test_coordinates_say_where_things_are():
    env = Sokoban(Sokoban.Config(show="both", width=8, height=8, boxes=2))
    content = env.begin(3).messages[0]["content"]
    assert "symbol, row and column" in content
    *board, places = content.splitlines()[-9:]
    things = places.split()
    assert len(things) >= 4
    assert all(board[int(row)][int(column)] == symbol for symbol, row, column in things)
    assert sum(cell not in "#_" for row in board for cell in row) == len(things)


def test_coordinates_alone_say_what_a_board_would():
    options = {"rules": False, "width": 7, "height": 6, "boxes": 2}
    shown = Sokoban(Sokoban.Config(show="coordinates", **options)).begin(3).messages[0]["content"].split()
    board = Sokoban(Sokoban.Config(**options)).begin(3).messages[0]["content"].splitlines()
    inside = {f"{board[row][column]}{row}{column}" for row in range(1, 5) for column in range(1, 6) if board[row][column] != "_"}
    assert len(shown) == len(inside)
    assert set(shown) == inside
    assert any(place.startswith("#") for place in shown)
    assert "You see: where things are" in Sokoban(Sokoban.Config(show="coordinates")).begin(3).messages[0]["content"]


def test_coordinates_of_large_boards_are_set_apart():
    env = Sokoban(Sokoban.Config(show="both", width=12, height=12, rules=False))
    board = env.begin(1).messages[0]["content"].splitlines()
    assert re.fullmatch(r"(\S\d+,\d+ ?)+", board[-1])
