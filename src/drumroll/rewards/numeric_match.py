r"""The reply must give the right number, in any usual spelling.

`1234`, `1,234`, `+1234.00`, `$1,234`, `1.234e3`, `1.234 \times 10^3` and `2468/2` are one number; `2 3/4`, `2\frac{3}{4}` and `2.75` are
another. `50%` counts as 50 and as 0.5, and `3 million` as 3 and as 3000000, because a reply or a reference may leave out what the
question says; where both have the word, both mean it. Values are exact fractions. Expressions such as `\sqrt{2}` are for the reward `math`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from pydantic import NonNegativeFloat

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.rewards.extract import Extraction, extract, find_numbers, match_number, reference_text
from drumroll.types import Task, Trajectory

_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MOST_DIGITS = 1000
"""Of a number; a longer one is no answer to anything, and slow to compute with."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: `50%` is `Number(Fraction(50), Fraction(1, 100))`."""

    value: Fraction
    scale: Fraction = Fraction(1)
    """What the word or sign behind it stands for."""

    @property
    def readings(self) -> tuple[Fraction, ...]:
        """What it may mean where it is not said whether the scale belongs to it."""
        return (self.value,) if self.scale == 1 else (self.value, self.value * self.scale)

    def matches(self, other: Number, rel_tolerance: Fraction = Fraction(0), abs_tolerance: Fraction = Fraction(0)) -> bool:
        """Whether both mean the same; `rel_tolerance` is a share of the other one's value."""
        if self.scale != 1 and other.scale != 1:
            pairs = [(self.value * self.scale, other.value * other.scale)]
        else:
            pairs = list(product(self.readings, other.readings))
        return any(abs(one - two) <= max(abs_tolerance, rel_tolerance * abs(two)) for one, two in pairs)


def read_number(text: str) -> Number | None:
    """The number that a text spells, or None: `read_number("-1,234.50")` is `Number(Fraction(-2469, 2))`."""
    match = match_number(text)
    return None if match is None else _value(match)


def only_number(text: str) -> Number | None:
    """The number that a text names, among words or alone; None where it names none, or two that differ."""
    numbers = {_value(match) for match in find_numbers(text)}
    return numbers.pop() if len(numbers) == 1 else None


def _value(match: re.Match[str]) -> Number | None:
    group = match.groupdict(default="")
    exponent = group["e"] or group["power"] or "0"
    if len(match[0]) > _MOST_DIGITS or len(exponent) > 4 or abs(int(exponent)) > _MOST_DIGITS:
        return None
    if bottom := group["bottom"] or group["under"]:
        if int(bottom) == 0:
            return None
        part = Fraction(int(group["top"] or group["over"]), int(bottom))
        value = int(group["whole"] or 0) + part
    else:
        integer, decimals = re.sub("[^0-9]", "", group["integer"]), group["decimals"] or group["only_decimals"]
        value = Fraction(int(integer + decimals), 10 ** len(decimals)) * Fraction(10) ** int(exponent)
    negative = (group["sign"] == "-") != (group["inner_sign"] == "-")
    scale = Fraction(1, 100) if group["percent"] else Fraction(_SCALES.get(group["scale"].lower(), 1))
    return Number(-value if negative else value, scale)


@register.reward("numeric_match")
class NumericMatch:
    """1.0 when the last reply gives the task's number, in any usual spelling, else 0.0."""

    class Config(RewardConfig):
        """Options."""

        field: str = "answer"
        r"""Column of the right number: alone, among words, in a `\boxed{…}`, or behind GSM8K's `####`."""
        extract: Extraction = "last_number"
        """Where in the reply the number stands (see `drumroll.rewards.extract`). What is found there must name one number."""
        rel_tolerance: NonNegativeFloat = 0.0
        """How far off it may be, as a share of the right number; 0.001 lets 3.14 pass for 3.1416."""
        abs_tolerance: NonNegativeFloat = 0.0
        """How far off it may be, whatever the right number; the larger of the two tolerances counts."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tolerances = Fraction(config.rel_tolerance), Fraction(config.abs_tolerance)

    def check_task(self, task: Task) -> None:
        """A ValueError when the task's column does not name one number."""
        self._reference(task)

    def __call__(self, trajectory: Trajectory) -> float:
        reference = self._reference(trajectory.task)
        found = extract(trajectory.last_reply, self.config.extract)
        number = None if found is None else only_number(found)
        return float(number is not None and number.matches(reference, *self._tolerances))

    def _reference(self, task: Task) -> Number:
        value = task.data[self.config.field]
        number = only_number(reference_text(value))
        if number is None:
            raise ValueError(
                f"task '{task.id}': column '{self.config.field}' holds {str(value)[-60:]!r}; one number was expected, "
                f"such as 18, 1/2 or '#### 18'."
            )
        return number
