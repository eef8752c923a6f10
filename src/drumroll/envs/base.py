"""What an environment is: it shows something, gets a reply, and shows something again, until it is done.

An environment is built for one episode and thrown away after it. It holds no model and no tokens: it is told the text of
each reply. Exceptions that it raises are failures of the infrastructure, and the episode is tried again; when the model's
own action broke it, it raises `PolicyFault(reward)` instead, which ends the episode with that reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from drumroll.config.models import EnvConfig
from drumroll.errors import DataError
from drumroll.types import Message, Task


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers: text (`prompt`) or chat messages to show next, or that it is done.

    Example: `Step(prompt="Try again: ", reward=-0.1)`, or `Step(done=True, reward=1.0, success=True)`.
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    """Of a first step with messages: schemas of the tools that the model may call, for the chat template."""
    max_new_tokens: int | None = None
    """The reply to this may have no more tokens, where that is less than the sampling allows."""
    state: str | None = None
    """Name of the state that is shown: where two episodes of a task come into equal states, their names are equal. What is shown
    names it otherwise."""
    reward: float | None = None
    """For the reply before; added to the episode's reward. None leaves rewards to the reward functions."""
    done: bool = False
    """The episode is over; what is shown with it is shown to nobody."""
    success: bool | None = None
    """Whether the task was solved, where the environment knows; the last statement counts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named values to report, for example `{"moves": 3}`; later steps overwrite earlier ones."""

    def __post_init__(self) -> None:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("a Step shows either a prompt or messages, not both")
        if not self.done and self.prompt is None and self.messages is None:
            raise ValueError("a Step that is not done must show a prompt (it may be empty) or messages")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"a Step's max_new_tokens is at least 1, not {self.max_new_tokens}")


class Env(ABC):
    """One episode. Registered by `@register.env("name")`; its nested `Config` holds its options."""

    class Config(EnvConfig):
        """Options of an environment without any."""

    needs_prompt: ClassVar[bool] = False
    """Whether every task must bring a prompt, because the environment shows it."""

    # Any: the nested Config of each environment, which a base class cannot name.
    config: Any

    def __init__(self, config: EnvConfig) -> None:
        self.config = config

    @abstractmethod
    async def start(self, task: Task) -> Step:
        """Begin the episode: what the model sees first."""

    @abstractmethod
    async def step(self, reply: str) -> Step:
        """React to a reply."""

    async def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Give back what the episode held. Called exactly once, however it ended."""


def seed_of(task: Task) -> int:
    """The task's seed, which alone decides what is random in the episode."""
    seed = task.data.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise DataError(
            f"task '{task.id}' has the seed {seed!r}; a whole number from 0 was expected. "
            f"Give the tasks as `seeds: 0-999`, or a column `seed` in the rows."
        )
    return seed
