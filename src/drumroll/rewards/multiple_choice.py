r"""The reply must name the right one of several options.

An option is named by its letter or, where a column holds the options, by its text. The first of these places that names any decides:

1. the last `\boxed{…}`, the last `<answer>…</answer>`, what follows the last `####`;
2. every "the answer is B", "Answer: (B)" and the like;
3. the whole reply, or its last line, or its first: `B`, `(b)`, `B.`, `B) Paris`, `Option B`;
4. the texts of options anywhere in the reply.

A reply that names two different options there is wrong. A letter among other words ("A dog", "vitamin C") names nothing.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.rewards.extract import Extraction, after_thinking, extract
from drumroll.rewards.short_answer import contains_phrase, normalise
from drumroll.types import Task, Trajectory

_LETTERS = string.ascii_uppercase

_OPEN, _CLOSE = r"""[\s*("'\[]{0,6}""", r"""[\s*)"'\].:]*"""
_NOUN = r"(?:(?i:option|choice|answer)\b)?"
_ALONE = re.compile(rf"{_OPEN}{_NOUN}{_OPEN}(?:\\(?:text|mathrm|textbf)\{{)?\(?([A-Za-z])\)?\}}?{_CLOSE}")
_HEADED = re.compile(rf"{_OPEN}{_NOUN}{_OPEN}([A-Za-z])[*]*[).:\]][^\n]*")
_STATED = re.compile(
    rf"(?i:\banswer\b)[\s*]{{0,3}}(?i:is\b|[:=])[\s:*]{{0,4}}{_NOUN}{_OPEN}"
    r"(?:([A-Z])|(?<=\()([a-z])(?=\)))(?![\w'])"
    r"(?!(?<=A)\s+(?!(?:because|since|as|and|or|for|due)\b)[a-z])"  # "the answer is A dog" names no letter
    r"""([)\]"*]*(?:\s*(?:,|/|&|\bor\b|\band\b)\s*[(\["*]*[A-Z](?![\w'])[)\]"*]*)*)"""
)
_LISTED = re.compile(r"(?<![\w'])[A-Z](?![\w'])")


@register.reward("multiple_choice")
class MultipleChoice:
    """1.0 when the last reply names the right option and no other, by its letter or its text, else 0.0."""

    class Config(RewardConfig):
        """Options."""

        field: str = "answer"
        """Column of the right option: its letter, its place as a whole number counted from 0, or its text."""
        choices_field: str | None = None
        """Column with the list of the options' texts. Without it, options have letters only."""
        extract: Extraction | None = None
        """Look only there in the reply (see `drumroll.rewards.extract`)."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def check_task(self, task: Task) -> None:
        """A ValueError when the task's columns do not say which option is right."""
        self._reference(task, self._choices(task))

    def __call__(self, trajectory: Trajectory) -> float:
        choices = self._choices(trajectory.task)
        reference = self._reference(trajectory.task, choices)
        where = self.config.extract
        text = after_thinking(trajectory.last_reply) if where is None else extract(trajectory.last_reply, where)
        return float(named_options(text or "", choices) == {reference})

    def _choices(self, task: Task) -> list[str]:
        if self.config.choices_field is None:
            return []
        value: Any = task.data[self.config.choices_field]
        choices = [normalise(str(choice)) for choice in value] if isinstance(value, list | tuple) else []
        if not 2 <= len(choices) <= len(_LETTERS) or len(set(choices)) < len(choices) or not all(choices):
            raise ValueError(
                f"task '{task.id}': column '{self.config.choices_field}' holds {str(value)[:60]!r}; a list of 2 to {len(_LETTERS)} "
                f"texts that all differ, apart from case and punctuation, was expected."
            )
        return choices

    def _reference(self, task: Task, choices: Sequence[str]) -> str:
        """The letter of the right option."""
        value: Any = task.data[self.config.field]
        letters = _LETTERS[: len(choices) or None]
        if isinstance(value, int) and not isinstance(value, bool):
            if 0 <= value < len(letters):
                return letters[value]
        elif isinstance(value, str):
            if (alone := _ALONE.fullmatch(value)) and alone[1].upper() in letters:
                return alone[1].upper()
            if normalise(value) in choices:
                return letters[choices.index(normalise(value))]
        raise ValueError(
            f"task '{task.id}': column '{self.config.field}' holds {str(value)[:60]!r}; a letter from A to {letters[-1]} or a whole "
            f"number from 0 to {len(letters) - 1} was expected{', or the text of an option' if choices else ''}."
        )


def named_options(text: str, choices: Sequence[str] = ()) -> set[str]:
    """Letters of the options that a reply names: `named_options("The answer is (B).")` is `{"B"}`. `choices` are normalised texts."""
    marked = extract(text, "boxed") or extract(text, "tag:answer") or extract(text, "hash")
    if marked is not None:
        return _named_alone(marked, choices) or set(_LISTED.findall(marked)) or _named_by_text(marked, choices)
    stated = {letter for match in _STATED.finditer(text) for letter in [(match[1] or match[2]).upper(), *_LISTED.findall(match[3])]}
    if stated:
        return stated
    lines = text.strip().splitlines() or [""]
    for place in (text.strip(), lines[-1], lines[0]):
        if named := _named_alone(place, choices):
            return named
    return _named_by_text(text, choices)


def _named_alone(text: str, choices: Sequence[str]) -> set[str]:
    match = _ALONE.fullmatch(text) or _HEADED.fullmatch(text)
    if match:
        return {match[1].upper()}
    words = normalise(text)
    return {_LETTERS[choices.index(words)]} if words in choices else set()


def _named_by_text(text: str, choices: Sequence[str]) -> set[str]:
    """Options whose text stands in the reply; one that is part of another there, as "York" of "New York", does not count."""
    words = normalise(text)
    found = [choice for choice in choices if contains_phrase(words, choice)]
    longest = [choice for choice in found if not any(choice != other and contains_phrase(other, choice) for other in found)]
    return {_LETTERS[choices.index(choice)] for choice in longest}
