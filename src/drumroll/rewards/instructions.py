"""Instruction following: the reply must satisfy constraints that a program can check, in the format of IFEval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.rewards.constraints import check, parse
from drumroll.types import Task, Trajectory


@register.reward("instructions")
class Instructions:
    """1.0 when the last reply satisfies all of the task's constraints (or the share that it satisfies), else 0.0.

    The task has a list of ids and a list of their arguments, of the same length, as in IFEval:
    `{"instruction_id_list": ["punctuation:no_comma", "detectable_format:number_bullet_lists"], "kwargs": [{}, {"num_bullets": 3}]}`.
    `drumroll.rewards.constraints` lists the ids and says what each means.
    """

    class Config(RewardConfig):
        """Which columns, and how strict."""

        ids_field: str = "instruction_id_list"
        """Column with the list of constraint ids."""
        kwargs_field: str = "kwargs"
        """Column with the list of their arguments, one mapping for each id. Arguments that are null count as absent."""
        score: Literal["all", "share"] = "all"
        """all: 1.0 when every constraint is satisfied, else 0.0; share: how many of them are, from 0.0 to 1.0."""
        loose: bool = False
        """A constraint is also satisfied when it is by the reply without its first line, its last line, both, or all asterisks: an
        introduction, a closing remark and markup are forgiven."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def check_task(self, task: Task) -> None:
        """A `ValueError` that says which constraint of the task cannot be used, and why."""
        for constraint_id, kwargs in self._constraints(task):
            parse(constraint_id, kwargs)

    def __call__(self, trajectory: Trajectory) -> float:
        forms = loose_forms(trajectory.last_reply) if self.config.loose else [trajectory.last_reply]
        constraints = self._constraints(trajectory.task)
        satisfied = [any(check(form, constraint_id, kwargs) for form in forms) for constraint_id, kwargs in constraints]
        return sum(satisfied) / len(satisfied) if self.config.score == "share" else float(all(satisfied))

    def _constraints(self, task: Task) -> list[tuple[str, Mapping[str, Any]]]:
        ids_field, kwargs_field = self.config.ids_field, self.config.kwargs_field
        ids, kwargs = task.data[ids_field], task.data[kwargs_field]
        if not isinstance(ids, list | tuple) or not ids or not all(isinstance(item, str) for item in ids):
            raise ValueError(
                f"column '{ids_field}' holds {ids!r}: a list of constraint ids, such as ['punctuation:no_comma'], was expected."
            )
        if not isinstance(kwargs, list | tuple) or len(kwargs) != len(ids) or not all(isinstance(item, Mapping) for item in kwargs):
            raise ValueError(
                f"column '{kwargs_field}' holds {str(kwargs)[:200]}: a list of {len(ids)} mappings was expected, "
                f"one for each id in '{ids_field}'."
            )
        return list(zip(ids, kwargs, strict=True))


def loose_forms(reply: str) -> list[str]:
    """The reply, and what is left of it without its first line, its last line, or both, each with and without asterisks."""
    lines = reply.strip().splitlines()
    cut = ["\n".join(part) for part in (lines[1:], lines[:-1], lines[1:-1])]
    return list(dict.fromkeys(form for text in (reply, *cut) for form in (text, text.replace("*", ""))))
