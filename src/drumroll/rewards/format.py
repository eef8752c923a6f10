"""The reply must have a form: a pattern, or tags one after another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.rewards.extract import Pattern, TagName
from drumroll.types import Trajectory


@register.reward("format")
class Format:
    """1.0 when the last reply, thoughts included, has the wanted form, else 0.0. Space around it never matters."""

    class Config(RewardConfig):
        """Options: `pattern` or `tags`."""

        pattern: Pattern | None = None
        """Regular expression of Python's `re` that the whole reply must match; with `(?s)` in front, a dot stands for line ends too.
        Some patterns, such as `(a+)+b`, take very long on some replies: `pooled: true` and a `deadline_s` keep that from other rewards."""
        tags: tuple[TagName, ...] | None = None
        """`[think, answer]`: the reply must be `<think>…</think> <answer>…</answer>`, with each tag once, in this order, none inside
        another, and nothing but space outside."""

        @model_validator(mode="after")
        def _one_form(self) -> Self:
            if (self.pattern is None) == (self.tags is None):
                raise ValueError("the reward 'format' takes `pattern` or `tags`: give one of them.")
            if self.tags is not None and (not self.tags or len(set(self.tags)) < len(self.tags)):
                raise ValueError(f"`tags` is {list(self.tags)}: at least one name, and none twice, was expected.")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, trajectory: Trajectory) -> float:
        reply = trajectory.last_reply.strip()
        if self.config.pattern is not None:
            return float(re.fullmatch(self.config.pattern, reply) is not None)
        return float(has_tags(reply, self.config.tags or ()))


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether a text is these tags with their contents and nothing else: `has_tags("<a>1</a> <b>2</b>", ["a", "b"])`."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(text.count(mark) != 1 for mark in marks):
        return False
    starts = [text.index(mark) for mark in marks]
    ends = [start + len(mark) for start, mark in zip(starts, marks, strict=True)]
    outside = [text[end:start] for end, start in zip([0, *ends[1::2]], [*starts[::2], len(text)], strict=True)]
    return starts == sorted(starts) and not any(gap.strip() for gap in outside)
