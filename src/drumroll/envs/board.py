"""What games on a grid share: how a board is shown, how moves are read, what they cost, when the game is over.

A game says five things: a few words about itself, the first position of a seed, the position after a move, the cells of a position, and
whether it is won or lost. Positions are values: comparable, hashable, never changed. A game of one's own, whole:

    @register.env("corridor")
    class Corridor(BoardGame[int]):
        "Walk along a corridor to its end."

        class Config(BoardConfig):
            kind: str = "corridor"
            length: int = 7
            vocabularies: ClassVar[Vocabularies] = {"plain": {"player": "P", "floor": "_", "goal": "G"}}

        config: Config

        def about(self) -> str:
            return "You stand in a corridor. Walk to the goal."

        def first(self, seed: int) -> int:
            return random.Random(seed).randrange(self.config.length - 1)

        def after(self, position: int, direction: Direction) -> int:
            return min(max(position + OFFSETS[direction][1], 0), self.config.length - 1)

        def cells(self, position: int) -> list[list[str]]:
            row = ["floor"] * (self.config.length - 1) + ["goal"]
            row[position] = "player"
            return [row]

        def outcome(self, position: int) -> bool | None:
            return True if position == self.config.length - 1 else None

With the options of `BoardConfig` it is then shown as chat messages with rules, or as bare text to a small model whose tokenizer is a
list of characters:

    env: {kind: corridor, length: 4, chat: false, rules: false, tag: null, moves: [U, D, L, R], prompt_end: "\\n>"}

    P__G
    >R
    _P_G
    >
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field, PositiveInt, model_validator

from drumroll.config.models import NonNegativeFloat
from drumroll.envs.actions import ActionConfig, explain_form, read_actions, write_actions
from drumroll.envs.base import Env, Step, seed_of
from drumroll.registry import nearest
from drumroll.types import Task

Direction = Literal["up", "down", "left", "right"]

OFFSETS: Mapping[Direction, tuple[int, int]] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Rows and columns that a move goes; rows count downwards."""

DIRECTIONS: tuple[Direction, ...] = tuple(OFFSETS)

Vocabularies = Mapping[str, Mapping[str, str]]
"""Name → kind of cell → how it is shown. Every game has one that is named `plain`."""

P = TypeVar("P", bound=Hashable)


class BoardConfig(ActionConfig):
    """Options that all board games have."""

    vocabularies: ClassVar[Vocabularies]
    ground: ClassVar[frozenset[str]] = frozenset()
    """Kinds of cells on which there is nothing: coordinates leave them out."""
    scenery: ClassVar[frozenset[str]] = frozenset()
    """Kinds of cells that never change, such as walls: coordinates leave them out beside a board that shows them."""

    chat: bool = True
    """Show chat messages by the user. false: plain text."""
    rules: bool = True
    """Explain the game, its symbols and the form of an answer at the start, and say what was wrong with a reply. false: the bare board."""
    symbols: str | dict[str, str] = "plain"
    """How cells are shown: the name of a vocabulary of the game, or a mapping such as `{player: "@"}` whose symbols take the place of
    its plain ones."""
    show: Literal["board", "coordinates", "both"] = "board"
    """`board`: lines of symbols. `coordinates`: where things are, as the symbol, row and column of every cell with something on it, such as
    `#12 B23 P41`, counted from 0 at the top left, without walls at the edge. `both`: the coordinates of what can move or be reached, below
    the board. Models that are bad at counting cells play better with coordinates, and without the board an episode has far fewer tokens."""
    moves: tuple[str, str, str, str] = ("Up", "Down", "Left", "Right")
    """What the model calls the moves up, down, left and right. Capital and small letters are the same to the game."""
    wait: str | None = None
    """What the model calls to stay where it is, which counts as a move. null: there is no such move."""
    prompt_end: str = "\n>"
    """Of plain text: what stands between the board and the reply."""
    max_moves: PositiveInt | None = None
    """The game is lost after this many moves. An unknown action counts as one, and so does a reply without any."""
    success_reward: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """For winning."""
    step_cost: NonNegativeFloat = 0.0
    """Taken from the reward for each move, as `max_moves` counts them."""

    @property
    def vocabulary(self) -> Mapping[str, str]:
        """Kind of cell → how it is shown."""
        if isinstance(self.symbols, str):
            return self.vocabularies[self.symbols]
        return {**self.vocabularies["plain"], **self.symbols}

    @property
    def directions(self) -> dict[str, Direction]:
        """What the model calls a move, in small letters → the move."""
        return {name.casefold(): direction for name, direction in zip(self.moves, DIRECTIONS, strict=True)}

    @model_validator(mode="after")
    def symbols_fit(self) -> Self:
        if isinstance(self.symbols, str):
            if self.symbols not in self.vocabularies:
                near = nearest(self.symbols, self.vocabularies)
                raise ValueError(
                    f"`symbols`: no vocabulary named '{self.symbols}'.{near} Known: {', '.join(self.vocabularies)}; or a mapping."
                )
            return self
        known = self.vocabularies["plain"]
        for cell in self.symbols:
            if cell not in known:
                raise ValueError(f"`symbols`: no kind of cell named '{cell}'.{nearest(cell, known)} Known: {', '.join(known)}.")
        shown = list(self.vocabulary.values())
        if len({*shown, ""}) <= len(shown) or "\n" in "".join(shown):
            raise ValueError(f"`symbols`: every kind of cell needs a symbol of its own, on one line; they are {dict(self.vocabulary)}.")
        return self

    @property
    def action_names(self) -> tuple[str, ...]:
        """Everything that the model can do."""
        return self.moves if self.wait is None else (*self.moves, self.wait)

    @model_validator(mode="after")
    def moves_can_be_told(self) -> Self:
        if len({name.casefold() for name in self.action_names}) < len(self.action_names):
            raise ValueError(
                f"`moves`, `wait`: different names were expected, for up, down, left, right and staying; they are "
                f"{', '.join(self.action_names)}."
            )
        for name in self.action_names:
            if read_actions(write_actions([name], self), self).actions != (name,):
                raise ValueError(f"`moves`, `wait`: '{name}' cannot be read back from a reply: it is blank, or holds `separator` or `tag`.")
        return self


class BoardGame(Env, Generic[P]):
    """A game on a grid for one player, with the moves up, down, left and right. See the example at the head of the module.

    Rewards: `success_reward` for the reply that wins, less `step_cost` for each of its moves, less `format_penalty` where it is out of
    form.
    Metrics: `moves`, `invalid_actions` (that the game does not know), `malformed_replies` (out of form).
    """

    config: BoardConfig
    position: P
    """Where the game stands."""

    @abstractmethod
    def about(self) -> str:
        """What the game is and how it is won, in words for the model."""

    @abstractmethod
    def first(self, seed: int) -> P:
        """Where the game of a seed begins. Runs in a thread, so that it may take some time."""

    @abstractmethod
    def after(self, position: P, direction: Direction) -> P:
        """Where a move leads; an illegal one leads nowhere else."""

    @abstractmethod
    def cells(self, position: P) -> Sequence[Sequence[str]]:
        """Rows of kinds of cells, by the names that the vocabularies use."""

    @abstractmethod
    def outcome(self, position: P) -> bool | None:
        """Whether the game is won or lost; None while it goes on."""

    def turned(self, direction: Direction) -> Direction:
        """Where a move in that direction really goes: the same, but in games of chance."""
        return direction

    def solve(self, position: P, max_states: int = 20_000) -> list[Direction] | None:
        """The shortest way to win from a position, chance aside: breadth first. None where there is none among so many positions."""
        came: dict[P, tuple[P, Direction] | None] = {position: None}
        ahead = deque([position])
        while ahead and len(came) <= max_states:
            here = ahead.popleft()
            if self.outcome(here):
                return _way_to(here, came)
            if self.outcome(here) is None:
                for direction in DIRECTIONS:
                    there = self.after(here, direction)
                    if there not in came:
                        came[there] = here, direction
                        ahead.append(there)
        return None

    async def start(self, task: Task) -> Step:
        return await asyncio.to_thread(self.begin, seed_of(task))

    async def step(self, reply: str) -> Step:
        return self.play(reply)

    def begin(self, seed: int) -> Step:
        """The game of a seed: its first board, behind the rules."""
        self.position = self.first(seed)
        self.num_moves = self.num_invalid = self.num_malformed = 0
        return self._shown(self.explanation() if self.config.rules else "", is_first=True)

    def play(self, reply: str) -> Step:
        """Make the moves that a reply asks for, up to the one that ends the game."""
        moves_before = self.num_moves
        reading = read_actions(reply, self.config)
        unknown = []
        for action in reading.actions or [""]:
            self.num_moves += 1
            direction = self.config.directions.get(action.casefold())
            if direction is not None:
                self.position = self.after(self.position, self.turned(direction))
            elif action and action.casefold() != (self.config.wait or "").casefold():
                unknown.append(action)
            if self._outcome() is not None:
                break
        self.num_invalid += len(unknown)
        self.num_malformed += bool(reading.problem)
        remarks = [reading.problem] if reading.problem else []
        remarks += [f"'{action[:40]}' is no move." for action in unknown]
        reward = (
            self.config.success_reward * bool(self._outcome())
            - self.config.step_cost * (self.num_moves - moves_before)
            - self.config.format_penalty * bool(reading.problem)
        )
        return self._shown(" ".join(remarks) if self.config.rules else "", reward=reward)

    def board(self) -> str:
        """The position as text: lines of symbols, coordinates, or both."""
        show, vocabulary, cells = self.config.show, self.config.vocabulary, self.cells(self.position)
        rows = [] if show == "coordinates" else ["".join(vocabulary[cell] for cell in row) for row in cells]
        return "\n".join(rows if show == "board" else [*rows, self._places(cells)])

    def explanation(self) -> str:
        """The game, its symbols, its moves and the form of an answer, in words for the model."""
        legend = ", ".join(f"'{symbol}' {cell.replace('_', ' ')}" for cell, symbol in self.config.vocabulary.items())
        if self.config.show != "board":
            where = "You see" if self.config.show == "coordinates" else "Below the board"
            legend += f". {where}: where things are, as symbol, row and column, counted from 0 at the top left"
        moves = ", ".join(self.config.action_names)
        form = explain_form(self.config, [self.config.moves[3], self.config.moves[1]])
        return f"{self.about()}\nSymbols: {legend}.\nActions: {moves}.\n{form}\n"

    def reply_for(self, directions: Sequence[Direction]) -> str:
        """The reply that asks for these moves."""
        return write_actions([self.config.moves[DIRECTIONS.index(direction)] for direction in directions], self.config)

    def _places(self, cells: Sequence[Sequence[str]]) -> str:
        """Where everything is that a board does not show already, one kind after another."""
        config, separator = self.config, "" if max(len(cells), *map(len, cells)) <= 10 else ","
        hidden = config.scenery if config.show == "both" else frozenset()
        return " ".join(
            f"{symbol}{row}{separator}{column}"
            for kind, symbol in config.vocabulary.items()
            if kind not in config.ground | hidden
            for row, line in enumerate(cells)
            for column, cell in enumerate(line)
            if cell == kind and not (kind in config.scenery and (row in (0, len(cells) - 1) or column in (0, len(line) - 1)))
        )

    def _outcome(self) -> bool | None:
        """Won, lost (also by the number of moves), or going on."""
        outcome = self.outcome(self.position)
        spent = self.config.max_moves is not None and self.num_moves >= self.config.max_moves
        return False if outcome is None and spent else outcome

    def _shown(self, remark: str, *, is_first: bool = False, reward: float | None = None) -> Step:
        board = self.board()
        text = f"{remark}\n{board}" if remark else board
        prompt = text + self.config.prompt_end if is_first else f"\n{text}{self.config.prompt_end}"
        outcome = self._outcome()
        return Step(
            prompt=None if self.config.chat else prompt,
            messages=({"role": "user", "content": text},) if self.config.chat else None,
            state=board,
            reward=reward,
            done=outcome is not None,
            success=bool(outcome),
            metrics={
                "moves": float(self.num_moves),
                "invalid_actions": float(self.num_invalid),
                "malformed_replies": float(self.num_malformed),
            },
        )


def check_unused(config: BoardConfig, options: Sequence[str], because_of: str) -> None:
    """For validators: options that another one leaves without effect must not be given."""
    for name in options:
        if getattr(config, name) != type(config).model_fields[name].default:
            raise ValueError(f"`{name}` has no effect beside `{because_of}`: leave one of them out.")


def _way_to(position: P, came: Mapping[P, tuple[P, Direction] | None]) -> list[Direction]:
    moves: list[Direction] = []
    while (step := came[position]) is not None:
        position, direction = step
        moves.append(direction)
    return moves[::-1]
