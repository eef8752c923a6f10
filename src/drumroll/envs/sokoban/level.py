"""A Sokoban level and the one rule of the game: the player may push one box, into free space.

Cells are numbered row by row. Every level is closed by walls all around, so that no move leads off the board.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drumroll.envs.board import OFFSETS, Direction
from drumroll.errors import DataError

XSB = {"wall": "#", "floor": " ", "target": ".", "box": "$", "box_on_target": "*", "player": "@", "player_on_target": "+"}
"""The symbols of level files."""


@dataclass(frozen=True, slots=True)
class Level:
    """Where everything is.

    Example: `parse_level(["#####", "#@$.#", "#####"])`.
    """

    width: int
    height: int
    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @property
    def is_solved(self) -> bool:
        """All boxes are on targets."""
        return self.boxes == self.targets

    @property
    def floor(self) -> frozenset[int]:
        """All cells that are no wall."""
        return frozenset(range(self.width * self.height)) - self.walls

    def moved(self, direction: Direction) -> Level:
        """After a move: a step, or a push of the box in the way; unchanged where neither is possible."""
        by = offset(direction, self.width)
        there = self.player + by
        if there in self.walls:
            return self
        if there not in self.boxes:
            return replace(self, player=there)
        beyond = there + by
        if beyond in self.walls or beyond in self.boxes:
            return self
        return replace(self, player=there, boxes=self.boxes - {there} | {beyond})

    def cells(self) -> list[list[str]]:
        """Rows of kinds of cells, as `XSB` names them."""
        return [[self._cell(row * self.width + column) for column in range(self.width)] for row in range(self.height)]

    def _cell(self, cell: int) -> str:
        if cell in self.walls:
            return "wall"
        is_target = cell in self.targets
        kind = "player" if cell == self.player else "box" if cell in self.boxes else ""
        return f"{kind}_on_target" if kind and is_target else kind or ("target" if is_target else "floor")


def offset(direction: Direction, width: int) -> int:
    """From a cell's number to that of its neighbour."""
    rows, columns = OFFSETS[direction]
    return rows * width + columns


def parse_level(rows: Sequence[str], where: str = "level") -> Level:
    """A level from its lines; `where` it stands is for the error message. Lines that end early are filled up with walls."""
    kinds = {symbol: kind for kind, symbol in XSB.items()}
    width = max(map(len, rows), default=0)
    board = "".join(row.ljust(width, XSB["wall"]) for row in rows)
    unknown = sorted(set(board) - set(kinds))
    if unknown:
        raise DataError(f"{where}: the symbol {unknown[0]!r} is not known; {' '.join(XSB.values())} and blanks were expected.")

    def cells(*names: str) -> frozenset[int]:
        return frozenset(at for at, symbol in enumerate(board) if kinds[symbol] in names)

    walls = cells("wall")
    targets = cells("target", "box_on_target", "player_on_target")
    boxes = cells("box", "box_on_target")
    players = cells("player", "player_on_target")
    if len(players) != 1 or not boxes or len(boxes) != len(targets):
        raise DataError(
            f"{where}: {len(players)} players, {len(boxes)} boxes, {len(targets)} targets; expected: 1 player, as many targets as boxes."
        )
    edge = [at for at in range(len(board)) if at < width or at >= len(board) - width or at % width in (0, width - 1)]
    if not walls.issuperset(edge):
        raise DataError(f"{where}: its edge has gaps; a level closed by walls ('{XSB['wall']}') all around was expected.")
    return Level(width, len(rows), walls, targets, boxes, *players)


def format_level(level: Level) -> str:
    """The level's lines, as `parse_level` reads them."""
    return "\n".join("".join(XSB[cell] for cell in row) for row in level.cells())
