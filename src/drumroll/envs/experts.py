"""Episodes of board games as an expert plays them, for demonstrations.

What is shown and how replies are written comes from the environment itself, so that a demonstration looks exactly as the policy's own
episodes do:

    episode = expert_episode("frozen_lake", {"size": 4}, seed=7)
    for step, reply in episode.turns:
        print(step.messages, reply)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumroll.config.models import EnvConfig
from drumroll.envs.actions import write_actions
from drumroll.envs.base import Step
from drumroll.envs.board import DIRECTIONS, BoardGame, Direction
from drumroll.errors import PluginError
from drumroll.registry import REGISTRY
from drumroll.types import Message, sample_seed


@dataclass(frozen=True, slots=True)
class ExpertEpisode:
    """What was shown and answered, turn by turn, and how it ended."""

    turns: tuple[tuple[Step, str], ...]
    """What the environment showed, and the expert's reply to it."""
    last: Step
    """What the environment said to the last reply."""

    @property
    def success(self) -> bool:
        """Whether the game was won."""
        return bool(self.last.success)

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Of plain text: what was shown, and the reply. They follow each other without anything between them."""
        return [(step.prompt or "", reply) for step, reply in self.turns]

    @property
    def row(self) -> dict[str, Any]:
        """As supervised fine-tuning reads it: what was shown and the replies, in turns."""
        turns: list[dict[str, Any]] = []
        for step, reply in self.turns:
            shown = {"prompt": step.prompt} if step.messages is None else {"messages": list(step.messages)}
            turns += [shown, {"reply": reply}]
        return {"turns": turns}

    @property
    def messages(self) -> list[Message]:
        """Of a chat: the whole conversation, with the expert as the assistant."""
        return [message for step, reply in self.turns for message in (*(step.messages or ()), {"role": "assistant", "content": reply})]


def expert_episode(
    kind: str, options: Mapping[str, Any], seed: int, *, detour: float = 0.0, hesitation: float = 0.0, max_turns: int = 100
) -> ExpertEpisode | None:
    """The game of a seed, played by its expert; None where the expert finds no solution.

    A share `detour` of the moves, drawn from the seed, are worse than the expert's, but lose nothing for good. In a share `hesitation` of
    the turns the expert waits, which the game must allow (its option `wait`). On slippery ice the expert
    plans as if it were not, and plans again after every slip.
    """
    game = _game(kind, options)
    if hesitation and game.config.wait is None:
        raise PluginError(f"env '{kind}': an expert that hesitates needs the option `wait`, such as `wait: W`.")
    step = game.begin(seed)
    plan = game.solve(game.position)
    rng = random.Random(sample_seed(seed, "detours"))
    turns: list[tuple[Step, str]] = []
    while plan is not None and not step.done and len(turns) < max_turns:
        if hesitation and rng.random() < hesitation:
            reply, expected = write_actions([game.config.wait or ""], game.config), game.position
        else:
            moves, plan, expected = _turn(game, plan, detour, rng)
            reply = game.reply_for(moves)
        turns.append((step, reply))
        step = game.play(reply)
        if game.position != expected:
            plan = game.solve(game.position)
    return ExpertEpisode(tuple(turns), step) if turns else None


def _game(kind: str, options: Mapping[str, Any]) -> BoardGame[Any]:
    entry = REGISTRY.lookup("env", kind)
    game = entry.target(entry.schema(EnvConfig).model_validate({**options, "kind": kind}))
    if not isinstance(game, BoardGame):
        raise PluginError(f"env '{kind}' is a {type(game).__name__} and has no expert; only board games (`BoardGame`) have one.")
    return game


def _turn(
    game: BoardGame[Any], plan: Sequence[Direction], detour: float, rng: random.Random
) -> tuple[list[Direction], list[Direction], Any]:
    """The moves of one reply, the plan behind them, and the position that they should lead to."""
    moves: list[Direction] = []
    position, rest = game.position, list(plan)
    while rest and len(moves) < game.config.max_actions_per_turn:
        others = _detours(game, position, rest) if rng.random() < detour else []
        move, rest = rng.choice(others) if others else (rest[0], rest[1:])
        moves.append(move)
        position = game.after(position, move)
    return moves, rest, position


def _detours(game: BoardGame[Any], position: Any, plan: Sequence[Direction]) -> list[tuple[Direction, list[Direction]]]:
    """Moves after which winning takes longer than by the plan, each with the plan from there."""
    ahead = {direction: game.solve(game.after(position, direction)) for direction in DIRECTIONS}
    return [(direction, rest) for direction, rest in ahead.items() if rest is not None and len(rest) >= len(plan)]
