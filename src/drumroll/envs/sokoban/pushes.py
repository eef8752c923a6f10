"""What the generator and the solver both need to know: where the player can walk, and how far boxes are from targets."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

Distances = Mapping[int, int]
"""Cell → pushes from there to one target. Cells that are missing are dead: no box comes from them to that target."""


def reachable(player: int, floor: Collection[int], boxes: Collection[int], offsets: Sequence[int]) -> set[int]:
    """Cells that the player can walk to without pushing."""
    seen, ahead = {player}, [player]
    while ahead:
        here = ahead.pop()
        for by in offsets:
            there = here + by
            if there not in seen and there in floor and there not in boxes:
                seen.add(there)
                ahead.append(there)
    return seen


def push_distances(target: int, floor: Collection[int], offsets: Sequence[int]) -> Distances:
    """How many pushes a box alone on the board needs to the target, for a player who may stand anywhere."""
    distances, ahead = {target: 0}, deque([target])
    while ahead:
        here = ahead.popleft()
        for by in offsets:
            box, pusher = here - by, here - 2 * by
            if box not in distances and box in floor and pusher in floor:
                distances[box] = distances[here] + 1
                ahead.append(box)
    return distances


def least_pushes(boxes: Collection[int], distances: Sequence[Distances]) -> int | None:
    """No solution has fewer pushes: the cheapest way to give each box a target of its own. None: some box can reach none."""
    cheapest = {0: 0}  # set of taken targets, as bits → pushes
    for box in boxes:
        options = [(1 << number, pushes[box]) for number, pushes in enumerate(distances) if box in pushes]
        following: dict[int, int] = {}
        for taken, cost in cheapest.items():
            for target, pushes_there in options:
                if not taken & target:
                    total = cost + pushes_there
                    now_taken = taken | target
                    if total < following.get(now_taken, total + 1):
                        following[now_taken] = total
        cheapest = following
    return min(cheapest.values(), default=None)
