"""Sokoban levels from seeds, by reverse play: boxes begin on their targets and are pulled away, and pushing them back solves the level."""

from __future__ import annotations

import random
from dataclasses import dataclass

from drumroll.envs.board import DIRECTIONS
from drumroll.envs.sokoban.level import Level, offset
from drumroll.envs.sokoban.pushes import least_pushes, push_distances, reachable
from drumroll.errors import ConfigError
from drumroll.types import sample_seed

MAX_TRIES = 1000
"""Boards that are tried before the options count as impossible."""


@dataclass(frozen=True, slots=True)
class Design:
    """What generated levels have in common."""

    width: int
    height: int
    num_boxes: int
    wall_density: float
    """Probability that a cell inside the outer walls is a wall."""
    search_depth: int
    """Pulls of the reverse play."""
    min_pushes: int
    """No solution has fewer pushes."""


def generate(seed: int, design: Design) -> Level:
    """The level of a seed; solvable, and not solved."""
    rng = random.Random(sample_seed(seed, "sokoban"))
    for _ in range(MAX_TRIES):
        level = _pull_apart(_floor(rng, design), rng, design)
        if level is not None:
            return level
    raise ConfigError(
        f"no Sokoban level of {design.width}×{design.height} cells with {design.num_boxes} boxes (`boxes`) that needs {design.min_pushes} "
        f"pushes (`min_pushes`) was found on {MAX_TRIES} boards. Lower `wall_density`, `boxes` or `min_pushes`, or raise `search_depth`."
    )


def _floor(rng: random.Random, design: Design) -> set[int]:
    """A connected piece of floor: the largest one between random walls."""
    width = design.width
    inside = [row * width + column for row in range(1, design.height - 1) for column in range(1, width - 1)]
    free = {cell for cell in inside if rng.random() >= design.wall_density}
    offsets = [offset(direction, width) for direction in DIRECTIONS]
    largest: set[int] = set()
    while free:
        piece = reachable(min(free), free, (), offsets)
        free -= piece
        largest = max(largest, piece, key=len)
    return largest


def _pull_apart(floor: set[int], rng: random.Random, design: Design) -> Level | None:
    """Pull boxes away from random targets, never into a position twice. A random one of the positions that need enough pushes is the
    level; None where there is none."""
    if len(floor) <= design.num_boxes:
        return None
    offsets = [offset(direction, design.width) for direction in DIRECTIONS]
    cells = sorted(floor)
    *targets, player = rng.sample(cells, design.num_boxes + 1)
    distances = [push_distances(target, floor, offsets) for target in targets]
    boxes = frozenset(targets)
    walk = reachable(player, floor, boxes, offsets)
    seen = {(boxes, min(walk))}
    found: list[tuple[frozenset[int], set[int]]] = []
    for _ in range(design.search_depth):
        pulls = [(box, by) for box in sorted(boxes) for by in offsets if box + by in walk and box + 2 * by in floor - boxes]
        rng.shuffle(pulls)
        for box, by in pulls:
            pulled = boxes - {box} | {box + by}
            walk_then = reachable(box + 2 * by, floor, pulled, offsets)
            if (pulled, min(walk_then)) not in seen:
                break
        else:
            break
        boxes, walk = pulled, walk_then
        seen.add((boxes, min(walk)))
        needed = least_pushes(boxes, distances)
        assert needed is not None, "what was pulled apart can be pushed together"
        if needed >= design.min_pushes:
            found.append((boxes, walk))
    if not found:
        return None
    boxes, walk = rng.choice(found)
    walls = frozenset(range(design.width * design.height)) - floor
    return Level(design.width, design.height, walls, frozenset(targets), boxes, rng.choice(sorted(walk)))
