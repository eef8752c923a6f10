"""A punishment for replies that come near the token budget, as in DAPO: it rises over a buffer, so that length is never a cliff.

 0 ────────────╮
                ╲
-1               ╰───────
   0   max-buffer max
"""

from __future__ import annotations

from typing import Self

from pydantic import PositiveInt, model_validator

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.types import Trajectory


@register.reward("overlong")
class Overlong:
    """0 for a trajectory with room to spare, falling to -1 over the last `buffer_tokens` before the budget."""

    class Config(RewardConfig):
        """Options."""

        buffer_tokens: PositiveInt
        """The punishment begins this many tokens before `max_tokens`."""
        max_tokens: PositiveInt | None = None
        """Where it reaches -1, in tokens that the policy sampled in all turns; the sample's own `max_new_tokens` unless given."""

        @model_validator(mode="after")
        def _buffer_fits(self) -> Self:
            if self.max_tokens is not None:
                _check(self.buffer_tokens, self.max_tokens, "max_tokens")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, trajectory: Trajectory) -> float:
        most = self.config.max_tokens
        if most is None:
            most = trajectory.sampling.max_new_tokens
            _check(self.config.buffer_tokens, most, "max_new_tokens of its sampling")
        return soft_punishment(trajectory.num_new_tokens, self.config.buffer_tokens, most)


def soft_punishment(num_tokens: int, buffer_tokens: int, max_tokens: int) -> float:
    """`soft_punishment(90, 20, 100)` is -0.5: half of the buffer is used."""
    return min(0.0, max(-1.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens))


def _check(buffer_tokens: int, max_tokens: int, name: str) -> None:
    if buffer_tokens > max_tokens:
        raise ValueError(
            f"the reward 'overlong' has buffer_tokens {buffer_tokens}, more than {name} {max_tokens}: every reply would be punished."
        )
