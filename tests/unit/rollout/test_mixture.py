"""Shares of several sources: exact, whatever is rejected and wherever the run was cut off."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.data.cursor import TaskCursor
from drumroll.rollout.source import GroupRequest, Mixture, TaskSource, success_rate
from drumroll.types import SampleInfo, Sampling, Task


def mixture(shares: dict[str, float]) -> Mixture:
    sources = {
        name: TaskSource(
            TaskCursor([Task(f"{name}-{number}", prompt="?", domain=name) for number in range(5)], seed=1),
            groups_per_round=3,
            group_size=4,
            sampling=Sampling(max_new_tokens=place + 1),
            label=f"train/{name}",
        )
        for place, name in enumerate(shares)
    }
    return Mixture(sources, shares)


@st.composite
def all_shares(draw: st.DrawFn) -> dict[str, float]:
    weights = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    return {f"d{place}": weight / sum(weights) for place, weight in enumerate(weights)}


@given(all_shares(), st.integers(1, 300))
def test_every_count_is_within_one_of_its_share(shares: dict[str, float], num_draws: int) -> None:
    mixed = mixture(shares)
    counts: Counter[str] = Counter()
    for drawn in range(1, num_draws + 1):
        counts[mixed.draw().task.domain] += 1
        assert all(abs(counts[name] - share * drawn) < 1.0 for name, share in shares.items())


def test_the_shares_of_the_docs_come_out_exactly() -> None:
    mixed = mixture({"mathematics": 0.4, "code": 0.3, "general": 0.3})
    for _ in range(20):
        assert Counter(mixed.draw().task.domain for _ in range(10)) == {"mathematics": 4, "code": 3, "general": 3}


@given(all_shares(), st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["consumed", "rejected", "surplus"])), max_size=120))
def test_what_is_rejected_is_made_up_for_by_the_same_source(shares: dict[str, float], events: list[tuple[int, str]]) -> None:
    mixed = mixture(shares)
    under_way: list[GroupRequest] = []
    consumed: Counter[str] = Counter()
    for place, fate in events:
        under_way.append(mixed.draw())
        request = under_way.pop(place % len(under_way))
        mixed.settle(request.group_id, fate, ())  # type: ignore[arg-type]
        consumed[request.task.domain] += fate == "consumed"
    num_kept = consumed.total() + len(under_way)
    in_all = consumed + Counter(request.task.domain for request in under_way)
    owed = len(events) - num_kept
    while num_kept < len(events):  # what is owed is drawn first
        in_all[mixed.draw().task.domain] += 1
        num_kept += 1
    assert owed >= 0
    assert all(abs(in_all[name] - share * num_kept) < len(shares) + 1 for name, share in shares.items())


def test_a_replacement_is_of_the_same_domain_in_whatever_order_the_rejections_come() -> None:
    def drawn(order: list[int]) -> set[str]:
        mixed = mixture({"a": 0.5, "b": 0.3, "c": 0.2})
        first = [mixed.draw() for _ in range(10)]
        for place in order:
            mixed.settle(first[place].group_id, "rejected", ())
        return {mixed.draw().group_id for _ in order}

    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]]
    assert drawn(orders[0]) == drawn(orders[1]) == drawn(orders[2])


@given(all_shares(), st.integers(0, 40), st.lists(st.booleans(), max_size=40))
def test_going_on_from_a_state_loses_nothing(shares: dict[str, float], num_draws: int, settled: list[bool]) -> None:
    mixed = mixture(shares)
    drawn = [mixed.draw() for _ in range(num_draws)]
    for request, is_settled in zip(drawn, settled, strict=False):
        if is_settled:
            mixed.settle(request.group_id, "consumed", ())
    left = {request.group_id for request, is_settled in zip(drawn, settled + [False] * num_draws, strict=False) if not is_settled}
    again = mixture(shares)
    again.load_state(json.loads(json.dumps(mixed.state())))
    assert {again.draw().group_id for _ in left} == left
    counts = Counter(request.task.domain for request in drawn)
    for number in range(num_draws + 1, num_draws + 30):
        counts[again.draw().task.domain] += 1
        assert all(abs(counts[name] - share * number) < 1.0 for name, share in shares.items())


def test_each_source_has_its_own_names_and_sampling_and_one_without_a_share_is_not_drawn_from() -> None:
    mixed = mixture({"a": 0.5, "b": 0.5, "c": 0.0})
    requests = [mixed.draw() for _ in range(4)]
    assert {request.group_id for request in requests} == {f"train/{name}/000001/000{place}" for name in "ab" for place in range(2)}
    assert {(request.task.domain, request.sampling.max_new_tokens) for request in requests} == {("a", 1), ("b", 2)}


def sample(reward: float | None, success: bool | None = None) -> SampleInfo:
    return SampleInfo("s", "g", "t", "d", reward, success, "stop", 1, 1, 0, 0, {}, {})


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        ([], None),
        ([sample(None)], None),
        ([sample(1.0, True), sample(0.2, False), sample(None)], 0.5),
        ([sample(0.5), sample(1.0)], 0.75),
        ([sample(7.0)], 1.0),
        ([sample(-7.0)], 0.0),
    ],
)
def test_success_rate(samples: list[SampleInfo], rate: float | None) -> None:
    assert success_rate(samples) == rate
