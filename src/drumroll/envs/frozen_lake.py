"""FrozenLake by Gymnasium's rules: cross a frozen lake from the start to the goal, and do not fall into a hole."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from drumroll.envs.board import DIRECTIONS, OFFSETS, BoardConfig, BoardGame, Direction, Vocabularies, check_unused
from drumroll.registry import register
from drumroll.types import sample_seed

MAPS: Mapping[str, tuple[str, ...]] = {
    "4x4": ("SFFF", "FHFH", "FFFH", "HFFG"),
    "8x8": ("SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF", "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"),
}
"""Gymnasium's published maps: S start, F frozen, H hole, G goal."""

ACROSS: Mapping[Direction, tuple[Direction, Direction]] = {
    "up": ("left", "right"),
    "down": ("left", "right"),
    "left": ("up", "down"),
    "right": ("up", "down"),
}


class Lake(NamedTuple):
    """A map and where the player is on it, as row and column."""

    rows: tuple[str, ...]
    player: tuple[int, int]

    @property
    def tile(self) -> str:
        """What the player stands on."""
        return self.rows[self.player[0]][self.player[1]]


@register.env("frozen_lake")
class FrozenLake(BoardGame[Lake]):
    """Cross a frozen lake without falling into a hole; success is reaching the goal."""

    class Config(BoardConfig):
        kind: str = "frozen_lake"
        vocabularies: ClassVar[Vocabularies] = {
            "plain": {"player": "P", "frozen": "_", "hole": "O", "goal": "G", "player_in_hole": "X", "player_on_goal": "*"},
            "gymnasium": {"player": "@", "frozen": "F", "hole": "H", "goal": "G", "player_in_hole": "X", "player_on_goal": "*"},
        }
        ground: ClassVar[frozenset[str]] = frozenset({"frozen"})
        size: Annotated[int, Field(ge=4, le=8)] = 4
        """Tiles along each side of a random map."""
        hole_ratio: Annotated[float, Field(ge=0.0, le=0.5)] = 0.2
        """Probability that a tile of a random map is a hole. Maps without a safe way are drawn again."""
        anywhere: bool = False
        """Start and goal of a random map are any two tiles. false: as in Gymnasium, the first and the last. There are few small maps of
        that kind: at size 4, two of three held-out seeds have a map that is also among those of 1,000 other seeds."""
        min_moves: PositiveInt = 1
        """The goal of a random map is at least this many moves away; nearer ones are drawn again."""
        map: Literal["4x4", "8x8"] | None = None
        """One of Gymnasium's published maps, whatever the seed, in place of random ones."""
        slippery: bool = False
        """A move goes in its own direction or to either side of it, each with probability 1/3."""

        @model_validator(mode="after")
        def one_source(self) -> Self:
            if self.map is not None:
                check_unused(self, ("size", "hole_ratio", "anywhere", "min_moves"), because_of="map")
            if self.min_moves > 2 * (self.size - 1):
                raise ValueError(
                    f"`min_moves` is {self.min_moves}; with `size` {self.size}, at most {2 * (self.size - 1)} can be asked for."
                )
            return self

    config: Config

    def about(self) -> str:
        slips = " The ice is slippery: a move may go to either side of where it was meant to go." if self.config.slippery else ""
        return f"You stand on a frozen lake. Walk to the goal, one tile at a time, and do not step into a hole.{slips}"

    def first(self, seed: int) -> Lake:
        config = self.config
        self._slips = random.Random(sample_seed(seed, "slips"))
        if config.map is not None:
            return start_of(MAPS[config.map])
        return start_of(random_map(seed, config.size, config.hole_ratio, config.anywhere, config.min_moves))

    def turned(self, direction: Direction) -> Direction:
        return self._slips.choice(ways(direction)) if self.config.slippery else direction

    def after(self, position: Lake, direction: Direction) -> Lake:
        return moved(position, direction)

    def cells(self, position: Lake) -> Sequence[Sequence[str]]:
        names = {"S": "frozen", "F": "frozen", "H": "hole", "G": "goal"}
        rows = [[names[tile] for tile in row] for row in position.rows]
        row, column = position.player
        rows[row][column] = {"H": "player_in_hole", "G": "player_on_goal"}.get(position.tile, "player")
        return rows

    def outcome(self, position: Lake) -> bool | None:
        return {"G": True, "H": False}.get(position.tile)


def moved(lake: Lake, direction: Direction) -> Lake:
    """After a move that does not slip. The shore keeps the player on the lake; goal and holes keep who is there."""
    if lake.tile in "GH":
        return lake
    row, column = (at + by for at, by in zip(lake.player, OFFSETS[direction], strict=True))
    is_inside = 0 <= row < len(lake.rows) and 0 <= column < len(lake.rows[0])
    return lake._replace(player=(row, column)) if is_inside else lake


def ways(direction: Direction) -> tuple[Direction, ...]:
    """Where a move on slippery ice may go, each with the same probability."""
    return direction, *ACROSS[direction]


def start_of(rows: tuple[str, ...]) -> Lake:
    """A map with the player at its start."""
    row = next(number for number, row in enumerate(rows) if "S" in row)
    return Lake(rows, (row, rows[row].index("S")))


def random_map(seed: int, size: int, hole_ratio: float, anywhere: bool = False, min_moves: int = 1) -> tuple[str, ...]:
    """The map of a seed: each tile is a hole or frozen by itself, and a safe way leads from start to goal."""
    rng = random.Random(sample_seed(seed, "map"))
    while True:
        tiles = ["H" if rng.random() < hole_ratio else "F" for _ in range(size * size)]
        start, goal = rng.sample(range(size * size), 2) if anywhere else (0, size * size - 1)
        tiles[start], tiles[goal] = "S", "G"
        rows = tuple("".join(tiles[at : at + size]) for at in range(0, size * size, size))
        moves = moves_to_goal(start_of(rows))
        if moves is not None and moves >= min_moves:
            return rows


def moves_to_goal(lake: Lake) -> int | None:
    """Moves of the shortest safe way; None where there is none."""
    seen = ring = {lake}
    moves = 0
    while ring:
        if any(here.tile == "G" for here in ring):
            return moves
        ring = {moved(here, direction) for here in ring for direction in DIRECTIONS} - seen
        seen = seen | ring
        moves += 1
    return None
