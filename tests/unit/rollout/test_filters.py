"""Group filters: who is rejected, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll.config.models import RolloutConfig
from drumroll.errors import RolloutError
from drumroll.registry import REGISTRY
from drumroll.rollout.filters import GroupFilters, all_equal, all_right, all_wrong, reward_variance
from drumroll.types import Group, SampleInfo

EXAMPLE = Path(__file__).parents[3] / "examples" / "keep_hard_groups.py"


def group(*members: tuple[float | None, bool | None]) -> Group:
    """Of (reward, success) of each sample."""
    samples = [
        SampleInfo(
            sample_id=f"train/1/t/{number}",
            group_id="train/1/t",
            task_id="t",
            domain="default",
            reward=reward,
            success=success,
            stop_reason="failed" if reward is None else "stop",
            num_prompt_tokens=3,
            num_new_tokens=5,
            oldest_version=1,
            newest_version=1,
            reward_parts={},
            metrics={},
        )
        for number, (reward, success) in enumerate(members)
    ]
    return Group("train/1/t", tuple(samples))


def filters(*sections: Any) -> GroupFilters:
    """As a config would name them."""
    return GroupFilters(RolloutConfig.model_validate({"filters": sections}).filters)


@pytest.fixture
def shipped() -> Iterator[Callable[..., GroupFilters]]:
    """Makes a filter of a function of the user's."""

    def make(function: Callable[..., Any], **options: Any) -> GroupFilters:
        REGISTRY.shipped[function.__name__] = function
        names.append(function.__name__)
        return filters({"kind": f"python:{function.__name__}", **options})

    names: list[str] = []
    yield make
    for name in names:
        REGISTRY.shipped.pop(name, None)


RIGHT, WRONG, SILENT, FAILED = (1.0, True), (0.0, False), (0.5, None), (None, None)


@pytest.mark.parametrize(
    ("members", "rejecting"),
    [
        ([RIGHT, RIGHT], {"all_right", "all_equal", "reward_variance"}),
        ([WRONG, WRONG], {"all_wrong", "all_equal", "reward_variance"}),
        ([RIGHT, WRONG], set()),
        ([RIGHT, SILENT], set()),
        ([WRONG, SILENT], set()),
        ([SILENT, SILENT], {"all_equal", "reward_variance"}),
        ([WRONG, WRONG, FAILED], {"all_wrong", "all_equal", "reward_variance"}),
        ([RIGHT, FAILED], {"all_right", "all_equal", "reward_variance"}),
        ([FAILED, FAILED], {"all_equal", "reward_variance"}),
        ([(0.1 + 0.2, None), (0.3, None)], {"all_equal", "reward_variance"}),
        ([(0.3, False), (0.3001, False)], {"all_wrong", "reward_variance"}),
    ],
)
def test_what_each_filter_rejects(members: list[tuple[float | None, bool | None]], rejecting: set[str]) -> None:
    assert {kind for kind in REGISTRY.built_in("group_filter") if filters(kind)(group(*members)) == kind} == rejecting
    assert all(filters(kind)(group(*members)) is None for kind in set(REGISTRY.built_in("group_filter")) - rejecting)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.booleans()), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_filters_agree_with_their_definitions(members: list[tuple[float, bool]], bound: float) -> None:
    subject = group(*members)
    rewards = [reward for reward, _ in members]
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    assert all_right(subject) == all(success for _, success in members)
    assert all_wrong(subject) == (not any(success for _, success in members))
    assert all_equal(subject) == (min(rewards) == max(rewards))
    if abs(variance - bound) > 1e-9:
        assert reward_variance(subject, min_variance=bound) == (variance < bound)


def test_the_first_filter_that_rejects_is_the_reason() -> None:
    assert filters()(group(WRONG, WRONG)) is None
    assert filters("all_right", "all_wrong", "all_equal")(group(WRONG, WRONG)) == "all_wrong"
    assert filters("all_equal", "all_wrong")(group(WRONG, WRONG)) == "all_equal"
    assert filters({"kind": "reward_variance", "min_variance": 0.3})(group(RIGHT, WRONG)) == "reward_variance"
    assert filters({"kind": "reward_variance", "min_variance": 0.2})(group(RIGHT, WRONG)) is None


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(True, "mine"), (np.bool_(True), "mine"), ("too easy", "mine: too easy"), (None, None), (False, None), (np.bool_(False), None)],
)
def test_what_a_function_of_the_users_may_say(shipped: Callable[..., GroupFilters], verdict: Any, reason: str | None) -> None:
    def mine(group: Group) -> Any:
        return verdict

    assert shipped(mine)(group(RIGHT, WRONG)) == reason


@pytest.mark.parametrize(("verdict", "shown"), [(0.5, r"'0\.5' \(float\)"), ("", r"'' \(str\)"), ([], r"'\[\]' \(list\)")])
def test_what_is_no_verdict_is_an_error(shipped: Callable[..., GroupFilters], verdict: Any, shown: str) -> None:
    def odd(group: Group) -> Any:
        return verdict

    with pytest.raises(RolloutError, match=rf"group filter 'odd' returned {shown} for group 'train/1/t': True or a reason"):
        shipped(odd)(group(RIGHT, WRONG))


def test_a_filter_that_raises_is_named_with_group_and_place(shipped: Callable[..., GroupFilters]) -> None:
    def broken(group: Group, *, divisor: int = 0) -> bool:
        return len(group.samples) / divisor > 1

    with pytest.raises(
        RolloutError, match=r"group filter 'broken' failed on group 'train/1/t': ZeroDivisionError: .*test_filters\.py, line \d+\)"
    ):
        shipped(broken)(group(RIGHT, WRONG))
    assert shipped(broken, divisor=1)(group(RIGHT, WRONG)) == "broken"


def test_the_example_from_its_file() -> None:
    keep_hard = filters({"kind": str(EXAMPLE), "max_solved": 0.5})
    assert keep_hard(group(RIGHT, RIGHT, WRONG)) == "keep_hard: more than 50% solved"
    assert keep_hard(group(RIGHT, WRONG)) is None
    assert filters({"kind": str(EXAMPLE)})(group(RIGHT, RIGHT, WRONG)) is None


def test_an_unknown_filter_or_option_is_refused_with_the_config() -> None:
    with pytest.raises(ValidationError, match="Did you mean 'all_wrong'"):
        filters("all_wrnog")
    with pytest.raises(ValidationError, match="min_varience"):
        filters({"kind": "reward_variance", "min_varience": 1})
