r"""The reply must give the right mathematical answer: numbers, LaTeX, sets, intervals, equations, matrices.

    reply ──find──▶ answer ──▶ both numbers?        exact fractions
                              both words?          equal letters
    column ───────▶ reference  anything else        math-verify: sympy expressions that are equal

The answer is the last `\boxed{…}` of the reply, else its last `<answer>…</answer>`, else what follows its last `####`, else what
follows its last "answer is" or "answer:" on that line, else the whole reply where that is one expression. In prose without any of
these, math-verify looks for the last formula or number.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from pydantic import PositiveFloat

from drumroll.config.models import RewardConfig
from drumroll.registry import register, require
from drumroll.rewards.extract import Extraction, after_thinking, extract, find_numbers, reference_text
from drumroll.rewards.numeric_match import Number, only_number, read_number
from drumroll.types import Task, Trajectory

require("math_verify", extra="math")

_DEADLINE_S = 5.0
_SHARE = 0.8
"""Of the deadline, after which a verification ends itself with a verdict, before its process is ended without one."""
_LONGEST = 300
"""Characters of a text that may be one expression. Formulas behind `\\boxed` may be longer."""
_ROUNDING = Fraction(1, 10**6)
"""Decimals may be rounded at the sixth digit: 0.333333 is 1/3."""

_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\text{", "}"), (r"\textbf{", "}"), (r"\mathrm{", "}"))
_STATED = re.compile(r"\banswer\b\**(?:[^\S\n]+is\b)?[^\S\n]*[:=]?([^\n]*)", re.IGNORECASE)
_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:[ -][A-Za-z]+)*")
_UNIT = re.compile(r"\s*[€£¥₹]|\s+[A-Za-z]{2,}(?:[ /-][A-Za-z]+)*")
_NO_UNIT = re.compile(r"\b(?:pi|sqrt|root|and|or|to|mod|over|times|plus|minus)\b", re.IGNORECASE)
_AND = re.compile(r",?[ ]and[ ]")
_NAMED = re.compile(r"\\(?:text|textbf|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{3,}|\n|(?<!\\)\$|\\\(|\\\[")
_FORMULA = re.compile(r"\$|\\\(|\\\[")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])[0-9]++(?:\.[0-9]++)?+[eE][-+]?[0-9]{1,3}(?!\w)")


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found in a reply or a column."""

    text: str
    number: Number | None = None
    """Its value, where it is a plain number, possibly with a unit."""
    words: str = ""
    """Where it is words only: in lower case, with single spaces."""
    prose: bool = False
    """Whether the formula still has to be found among words."""


@register.reward("math", seat="pooled")
class Mathematics:
    """1.0 when the last reply gives the task's mathematical answer in any equivalent form, by math-verify, else 0.0.

    A reply that cannot be read, or that takes too long to compute with, is wrong.
    """

    class Config(RewardConfig):
        """Options."""

        field: str = "answer"
        r"""Column of the right answer: a number, LaTeX, in a `\boxed{…}`, or behind GSM8K's `####`."""
        extract: Extraction | None = None
        """Look only there in the reply (see `drumroll.rewards.extract`)."""
        deadline_s: PositiveFloat | None = _DEADLINE_S
        """It may think about one sample for this long. Four fifths of it are for the reply; one that needs more is wrong."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._limit_s = _SHARE * (config.deadline_s or _DEADLINE_S)

    def check_task(self, task: Task) -> None:
        """A ValueError when the task's column is no mathematics that could be compared with an answer."""
        value = task.data[self.config.field]
        reference = _spelled(reference_text(value))
        try:
            with _time_limit(self._limit_s):
                usable = not (reference.prose and not _FORMULA.search(reference.text)) and _equal(reference, reference)
        except _TooLong:
            usable = False
        if not usable:
            raise ValueError(
                f"task '{task.id}': column '{self.config.field}' holds {str(value)[-60:]!r}, which cannot be read as mathematics; "
                f"a number, LaTeX or a word was expected. Put the row right, or use the reward 'exact_match' or 'short_answer'."
            )

    def __call__(self, trajectory: Trajectory) -> float:
        reference = _spelled(reference_text(trajectory.task.data[self.config.field]))
        where = self.config.extract
        found = after_thinking(trajectory.last_reply) if where is None else extract(trajectory.last_reply, where)
        if not found:
            return 0.0
        try:
            with _time_limit(self._limit_s):
                return float(_equal(find(found, in_words=bool(reference.words)), reference))
        except _TooLong:
            return 0.0


def find(text: str, in_words: bool = False) -> Answer:
    r"""The answer in a reply: `find(r"Hence \boxed{18}.").number` is 18.

    Unless it is to be `in_words`, "I hope that this answer is helpful" does not state one.
    """
    marked = extract(text, "boxed") or extract(text, "tag:answer") or extract(text, "hash")
    if marked is not None:
        return _spelled(marked)
    stated = [match[1] for match in _STATED.finditer(text)]
    if stated:
        answer = _spelled(stated[-1])
        if answer.text and not answer.prose and (in_words or not answer.words):
            return answer
    return _spelled(text)


def _spelled(text: str) -> Answer:
    """How a text that holds an answer spells it."""
    text = _unwrapped(text)
    if len(text) > _LONGEST:
        return Answer(text, prose="\\" not in text)
    number = read_number(text) or _with_unit(text)
    if number is not None:
        return Answer(text, number=number)
    if _WORDS.fullmatch(text):
        return Answer(text, words=text.casefold())
    text = _AND.sub(", ", text)
    return Answer(text, prose=_PROSE.search(_NAMED.sub(" ", text)) is not None)


def _unwrapped(text: str) -> str:
    """Without the marks that stand around a formula in prose."""
    text = text.strip("* \t\n").removesuffix(".").strip("* \t\n")
    for opening, closing in _WRAPPERS:
        inside = text[len(opening) : len(text) - len(closing)]
        if len(text) >= len(opening) + len(closing) and text == opening + inside + closing and closing not in inside:
            return _unwrapped(inside)
    return text


def _with_unit(text: str) -> Number | None:
    numbers = find_numbers(text)
    if len(numbers) != 1 or numbers[0].start() != 0:
        return None
    unit = text[numbers[0].end() :]
    return only_number(text) if _UNIT.fullmatch(unit) and not _NO_UNIT.search(unit) else None


def _equal(answer: Answer, reference: Answer) -> bool:
    if answer.number is not None and reference.number is not None:
        tolerance = Fraction(0) if _whole(answer) and _whole(reference) else _ROUNDING * min(Fraction(1), abs(reference.number.value))
        return answer.number.matches(reference.number, abs_tolerance=tolerance)
    if answer.words and reference.words:
        return answer.words == reference.words
    library = _library()
    return bool(library.verify(_reference_expressions(reference), _expressions(answer), timeout_seconds=None))


def _whole(answer: Answer) -> bool:
    return answer.number is not None and answer.number.value.denominator == 1


@lru_cache(maxsize=256)
def _reference_expressions(reference: Answer) -> list[Any]:
    return _expressions(reference)


def _expressions(answer: Answer) -> list[Any]:
    """sympy's readings of an answer."""
    if answer.number is not None:
        return _numbers(answer.number, "." in answer.text)
    text = _SCIENTIFIC.sub(lambda match: format(Decimal(match[0]), "f"), answer.text)
    library = _library()
    if answer.prose:
        found: list[Any] = library.parse(text, fallback_mode="no_fallback", parsing_timeout=None)
        return found
    if answer.words:
        text = rf"\text{{{text}}}"
    formula: list[Any] = library.parse(f"${' '.join(text.split())}$", fallback_mode="no_fallback", parsing_timeout=None)
    return formula


def _numbers(number: Number, is_decimal: bool) -> list[Any]:
    sympy = importlib.import_module("sympy")
    exact = [sympy.Rational(value.numerator, value.denominator) for value in number.readings]
    return [sympy.Float(value) for value in exact] if is_decimal else exact


@cache
def _library() -> Any:
    """math-verify, loaded where it is first needed."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; ours is not
    return importlib.import_module("math_verify")


class _TooLong(BaseException):
    """Not an Exception, so that libraries which catch those let it pass."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `_TooLong` inside when the time is over. Signals reach main threads only: elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _TooLong

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again and again, for where the exception is swallowed
    try:
        yield
    finally:
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, *timer)
                signal.signal(signal.SIGALRM, handler)
                break
            except _TooLong:  # it rang once more on the way out
                continue
