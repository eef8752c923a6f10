"""Group filters: complete groups that are not worth training on are rejected, and groups of other tasks take their places.

A filter is a function of a group, registered as `group_filter`; its keyword-only arguments are its options. It returns True or the
reason to reject the group, False or None to keep it. Filters run in the scheduler, between two samples: they look at numbers that
are there already, and are quick.

The built-in ones look at the members with a verdict, the only ones that train. A member that states no success is neither right
nor wrong, so that `all_right` and `all_wrong` keep its group: where no reward has `success_at` and the environment states none
either, use `all_equal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from drumroll.config.models import ANY, FilterConfig
from drumroll.errors import RolloutError, place_of
from drumroll.registry import REGISTRY, bind, register
from drumroll.types import Group

Filter = Callable[[Group], str | bool | None]


@register.group_filter("all_right")
def all_right(group: Group) -> bool:
    """Rejects a group whose every sample is a success."""
    return _success(group) == {True}


@register.group_filter("all_wrong")
def all_wrong(group: Group) -> bool:
    """Rejects a group whose every sample is a failure."""
    return _success(group) == {False}


@register.group_filter("all_equal")
def all_equal(group: Group) -> bool:
    """Rejects a group whose rewards are all the same, in the precision that advantages are computed in."""
    return len(np.unique(np.asarray(_rewards(group), np.float32))) <= 1


@register.group_filter("reward_variance")
def reward_variance(group: Group, *, min_variance: float = 1e-6) -> bool:
    """Rejects a group whose rewards have a population variance below `min_variance`.

    Options:
        min_variance: The smallest variance that is kept.
    """
    rewards = _rewards(group)
    return not rewards or float(np.var(rewards)) < min_variance


class GroupFilters:
    """The filters of a config, asked in turn.

    Example: `GroupFilters(cfg.rollout.filters)(group)` → `"all_wrong"`, or None when the group is to be kept.
    """

    def __init__(self, configs: Sequence[FilterConfig]) -> None:
        self._filters: list[tuple[str, Filter]] = []
        for config in configs:
            entry = REGISTRY.lookup("group_filter", config.kind)
            self._filters.append((entry.short_name, bind(entry, config.model_dump(exclude={"kind"}))))

    def __call__(self, group: Group) -> str | None:
        """Why the group is rejected: the name of the first filter that does, with its own reason behind a colon where it gives one."""
        return next((reason for name, filter_ in self._filters if (reason := _ask(name, filter_, group)) is not None), None)


def reject_by_domain(filters: Mapping[str, GroupFilters], group: Group) -> str | None:
    """Why the filters of the group's domain reject it; `*` is for domains without filters of their own."""
    of_domain = filters.get(group.samples[0].domain) or filters.get(ANY) if group.samples else None
    return of_domain(group) if of_domain is not None else None


def _ask(name: str, filter_: Filter, group: Group) -> str | None:
    try:
        verdict = filter_(group)
    except Exception as error:
        raise RolloutError(
            f"group filter '{name}' failed on group '{group.group_id}': {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    if verdict is None or isinstance(verdict, bool | np.bool_):
        return name if verdict else None
    if isinstance(verdict, str) and verdict:
        return f"{name}: {verdict}"
    raise RolloutError(
        f"group filter '{name}' returned {str(verdict)[:60]!r} ({type(verdict).__name__}) for group '{group.group_id}': "
        f"True or a reason (reject it), or False or None (keep it) was expected."
    )


def _success(group: Group) -> set[bool | None]:
    return {sample.success for sample in group.samples if sample.reward is not None}


def _rewards(group: Group) -> list[float]:
    return [sample.reward for sample in group.samples if sample.reward is not None]
