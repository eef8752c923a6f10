"""The reply must give a short answer in words, such as a name or a date.

Both are normalised before they are compared: Unicode compatibility forms, case, punctuation, articles and spacing do not matter.
Signs and decimal points of numbers do: `-1.5` is neither `1.5` nor `15`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Any, Literal

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.rewards.extract import Extraction, extract
from drumroll.types import Task, Trajectory

_ARTICLES = ("a", "an", "the")
_JOINTS = re.compile(r"(?<=\w)-|-(?![0-9])|[_/–—]")
_MARKS = re.compile(r"\.(?![0-9])|(?<=[^\W\d])\.|[^\w\s.-]")


def normalise(text: str) -> str:
    """What of a text counts: `normalise("The  Well-Known U.S. dollar!")` is `well known us dollar`."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("−", "-")
    words = _MARKS.sub("", _JOINTS.sub(" ", text)).split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def contains_phrase(text: str, phrase: str) -> bool:
    """Whether the phrase stands in the text as whole words; both normalised."""
    return f" {phrase} " in f" {text} "


@register.reward("short_answer")
class ShortAnswer:
    """Whether the last reply gives one of the task's answers, apart from case, articles, punctuation and spacing: 0.0 to 1.0."""

    class Config(RewardConfig):
        """Options."""

        field: str = "answer"
        """Column of the right answer, or of a list of answers of which any will do."""
        extract: Extraction = "reply"
        """What of the reply is the answer (see `drumroll.rewards.extract`)."""
        metric: Literal["exact", "f1", "contains"] = "exact"
        """exact: it must equal an answer; contains: an answer must stand in it as whole words; f1: the harmonic mean of the share of
        its words that stand in the answer and the share of the answer's words that stand in it, for the answer where that is most."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def check_task(self, task: Task) -> None:
        """A ValueError when the task's column holds no answer, or one without any letter or digit."""
        self._answers(task)

    def __call__(self, trajectory: Trajectory) -> float:
        answers = self._answers(trajectory.task)
        reply = normalise(extract(trajectory.last_reply, self.config.extract) or "")
        match self.config.metric:
            case "exact":
                return float(reply in answers)
            case "contains":
                return float(any(contains_phrase(reply, answer) for answer in answers))
            case "f1":
                return max(_f1(reply, answer) for answer in answers)

    def _answers(self, task: Task) -> list[str]:
        value: Any = task.data[self.config.field]
        answers = [normalise(str(answer)) for answer in (value if isinstance(value, list | tuple) else [value])]
        if value is None or not answers or not all(answers):
            raise ValueError(
                f"task '{task.id}': column '{self.config.field}' holds {str(value)[:60]!r}; an answer with at least one letter or digit "
                f"was expected, or a list of such answers."
            )
        return answers


def _f1(reply: str, answer: str) -> float:
    words, wanted = reply.split(), answer.split()
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))
