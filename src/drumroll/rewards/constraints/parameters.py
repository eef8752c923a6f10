"""The kinds of parameters that constraints have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt, StringConstraints

Count = PositiveInt

Relation = Literal["at least", "less than"]

Text = Annotated[str, StringConstraints(pattern=r"\S")]
"""Not blank."""

Character = Annotated[str, StringConstraints(min_length=1, max_length=1)]


def compare(count: int, relation: Relation, bound: int) -> bool:
    """Whether `count` is at least, or less than, the bound."""
    return count >= bound if relation == "at least" else count < bound
