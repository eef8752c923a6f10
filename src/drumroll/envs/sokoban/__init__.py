"""Sokoban: push every box onto a target. Levels are made from seeds, or read from Boxoban's level files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, PositiveInt, model_validator

from drumroll.envs.board import BoardConfig, BoardGame, Direction, Vocabularies, check_unused
from drumroll.envs.sokoban.boxoban import pick_level
from drumroll.envs.sokoban.generator import Design, generate
from drumroll.envs.sokoban.level import XSB, Level
from drumroll.envs.sokoban.solver import MAX_BOXES, solve_level
from drumroll.registry import register

Side = Annotated[int, Field(ge=5, le=20)]


@register.env("sokoban")
class Sokoban(BoardGame[Level]):
    """Push all boxes onto targets; success is that every box is on one."""

    class Config(BoardConfig):
        kind: str = "sokoban"
        vocabularies: ClassVar[Vocabularies] = {
            "plain": XSB | {"floor": "_", "target": "G", "box": "B", "player": "P"},
            "xsb": XSB,
            "letters": {
                "wall": "W",
                "floor": "-",
                "target": "T",
                "box": "C",
                "box_on_target": "D",
                "player": "M",
                "player_on_target": "N",
            },
        }
        ground: ClassVar[frozenset[str]] = frozenset({"floor"})
        scenery: ClassVar[frozenset[str]] = frozenset({"wall"})
        width: Side = 6
        """Columns of a made level, with the walls around it."""
        height: Side = 6
        """Rows of a made level, with the walls around it."""
        boxes: Annotated[int, Field(ge=1, le=MAX_BOXES)] = 1
        """Boxes of a made level, and targets."""
        wall_density: Annotated[float, Field(ge=0.0, le=0.6)] = 0.15
        """Probability that a cell inside of the outer walls is a wall."""
        search_depth: PositiveInt = 30
        """Levels are made by pulling boxes off their targets, at most this many times: more of it makes longer solutions."""
        min_pushes: PositiveInt = 2
        """No made level can be solved with fewer pushes."""
        levels: str | None = None
        """A level file in Boxoban's format, or a folder of such .txt files, in place of made levels; a task's seed is the number of its
        level, counted from 0."""

        @model_validator(mode="after")
        def one_source(self) -> Self:
            if self.levels is not None:
                check_unused(self, ("width", "height", "boxes", "wall_density", "search_depth", "min_pushes"), because_of="levels")
            return self

    config: Config

    def about(self) -> str:
        return (
            "You are in a warehouse. Push every box onto a target. You push a box by walking into it, and only one at a time: "
            "behind it there must be neither a wall nor another box. Boxes cannot be pulled."
        )

    def first(self, seed: int) -> Level:
        config = self.config
        if config.levels is not None:
            return pick_level(config.levels, seed)
        design = Design(config.width, config.height, config.boxes, config.wall_density, config.search_depth, config.min_pushes)
        return generate(seed, design)

    def after(self, position: Level, direction: Direction) -> Level:
        return position.moved(direction)

    def cells(self, position: Level) -> Sequence[Sequence[str]]:
        return position.cells()

    def outcome(self, position: Level) -> bool | None:
        return True if position.is_solved else None

    def solve(self, position: Level, max_states: int = 20_000) -> list[Direction] | None:
        """A way to win with the fewest pushes."""
        return solve_level(position, max_states)
