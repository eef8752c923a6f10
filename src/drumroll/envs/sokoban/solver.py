"""Solves Sokoban levels with the fewest pushes: A* over pushes, without those that leave a box where it can never reach a target."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection

from drumroll.envs.board import DIRECTIONS, Direction
from drumroll.envs.sokoban.level import Level, offset
from drumroll.envs.sokoban.pushes import least_pushes, push_distances, reachable

MAX_BOXES = 8
"""Of levels that are tried: the bound on pushes takes time that doubles with each box."""

Trail = tuple["Trail", int, Direction] | None
"""The last push (the cell of its box, and where to), behind those before it."""


def solve_level(level: Level, max_states: int) -> list[Direction] | None:
    """Moves that solve the level; None where it cannot be solved, or not within so many positions."""
    if len(level.boxes) > MAX_BOXES:
        return None
    steps = [(direction, offset(direction, level.width)) for direction in DIRECTIONS]
    offsets = [by for _, by in steps]
    floor = level.floor
    distances = [push_distances(target, floor, offsets) for target in sorted(level.targets)]
    bounds = {level.boxes: least_pushes(level.boxes, distances)}
    order = itertools.count()
    ahead: list[tuple[int, int, int, frozenset[int], int, Trail]] = []
    if (left := bounds[level.boxes]) is not None:
        ahead.append((left, left, next(order), level.boxes, level.player, None))
    closed: set[tuple[frozenset[int], int]] = set()
    while ahead and len(closed) < max_states:
        total, left, _, boxes, player, trail = heapq.heappop(ahead)
        if boxes == level.targets:
            return _moves(level, trail)
        walk = reachable(player, floor, boxes, offsets)
        key = boxes, min(walk)
        if key in closed:
            continue
        closed.add(key)
        for box in sorted(boxes):
            for direction, by in steps:
                if box - by not in walk or box + by not in floor or box + by in boxes:
                    continue
                pushed = boxes - {box} | {box + by}
                if pushed not in bounds:
                    bounds[pushed] = least_pushes(pushed, distances)
                if (then := bounds[pushed]) is not None:
                    heapq.heappush(ahead, (total - left + 1 + then, then, next(order), pushed, box, (trail, box, direction)))
    return None


def _moves(level: Level, trail: Trail) -> list[Direction]:
    """All moves of the player: the pushes, and the ways between them."""
    pushes: list[tuple[int, Direction]] = []
    while trail is not None:
        trail, box, direction = trail
        pushes.append((box, direction))
    moves: list[Direction] = []
    for box, direction in reversed(pushes):
        way = [*_way(level, box - offset(direction, level.width)), direction]
        for step in way:
            level = level.moved(step)
        moves += way
    return moves


def _way(level: Level, goal: int) -> list[Direction]:
    """The player's shortest way to a cell, without pushing."""
    free: Collection[int] = level.floor - level.boxes
    ways: dict[int, list[Direction]] = {level.player: []}
    ahead = deque([level.player])
    while goal not in ways:
        here = ahead.popleft()
        for direction in DIRECTIONS:
            there = here + offset(direction, level.width)
            if there in free and there not in ways:
                ways[there] = [*ways[here], direction]
                ahead.append(there)
    return ways[goal]
