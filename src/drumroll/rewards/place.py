"""Where a reward is computed, and the models that a reward can ask for there.

A reward with a `start` method is handed a `Place` once, in the process that computes it. A reward that needs a model of its own
opens it through the place, so that rewards know nothing of engines and devices:

    class Politeness:
        async def start(self, place: Place) -> None:
            self.scorer = await place.open_scorer(self.config.model)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from drumroll.config.models import EngineChoice
from drumroll.registry import Options
from drumroll.types import Message


class ScoreModel(Options):
    """A reward model: a sequence classification model with one output."""

    path: str
    """Folder, or hub id such as `org/name`."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What forward passes compute in. `auto`: bfloat16 on GPUs, float32 on CPUs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""


class ChatModel(Options):
    """A model that answers chat messages, and the engine that runs it."""

    path: str
    """Folder, or hub id such as `org/name`; its tokenizer needs a chat template."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What forward passes compute in. `auto`: bfloat16 on GPUs, float32 on CPUs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    engine: EngineChoice = Field(default={"kind": "native"}, validate_default=True)
    """The inference backend and its options."""


class Chat(Protocol):
    """Somebody who answers messages: an engine of the plan, or an endpoint."""

    async def complete(self, messages: Sequence[Message], *, max_new_tokens: int, temperature: float, seed: int | None = None) -> str:
        """The text of one answer. Many may be awaited at the same time."""


class Scorer(Protocol):
    """A reward model that is loaded."""

    async def score(self, messages: Sequence[Message] | str) -> float:
        """The model's output for a conversation, or for plain text. Many may be awaited at the same time."""


@dataclass(frozen=True, slots=True)
class Place:
    """The process that computes a reward.

    Example: `Place(rank=1, world=4)` is the second of four reward workers, without a device for models.
    """

    rank: int = 0
    world: int = 1
    """Processes that compute the reward: a limit on the whole run is divided by it."""
    open_chat: Callable[[ChatModel], Awaitable[Chat]] | None = None
    """Loads a model into an engine on this process's device; None where there is no device for one."""
    open_scorer: Callable[[ScoreModel], Awaitable[Scorer]] | None = None
    """Loads a reward model on this process's device; None where there is no device for one."""
