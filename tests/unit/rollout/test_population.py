"""The kept-length ratio: what is kept, against what there was to keep from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.rollout.population import kept_length_ratio, population_mean

lengths = st.lists(st.integers(0, 40), max_size=20)
some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def slow_mean(complete: list[int], censored: list[int]) -> float:
    """Kaplan and Meier, token by token: of those that got as far as token t, who ended right there?"""
    alive, total = 1.0, 0.0
    for token in range(max([*complete, *censored, 0]) + 1):
        total += alive if token else 0.0
        reached = sum(length >= token for length in [*complete, *censored])
        alive *= 1 - complete.count(token) / reached
    return total


@given(some_lengths, st.randoms(use_true_random=False))
def test_keeping_everything_is_exactly_one(complete: list[int], random: object) -> None:
    kept = list(complete)
    random.shuffle(kept)  # type: ignore[attr-defined]
    assert kept_length_ratio(kept, complete, []) == 1.0


@given(some_lengths, some_lengths)
def test_without_censoring_the_population_is_what_was_completed(kept: list[int], rejected: list[int]) -> None:
    complete = [*kept, *rejected]
    assert kept_length_ratio(kept, complete, []) == pytest.approx(np.mean(kept) / np.mean(complete))


@given(some_lengths, lengths)
def test_the_mean_is_that_of_the_formula(complete: list[int], censored: list[int]) -> None:
    assert population_mean(complete, censored) == pytest.approx(slow_mean(complete, censored))


@given(some_lengths, lengths)
def test_an_aborted_sample_counts_for_at_least_what_was_seen_of_it(complete: list[int], censored: list[int]) -> None:
    assert population_mean(complete, censored) >= np.mean([*complete, *censored]) * (1 - 1e-9)


def test_the_largest_length_may_be_a_censored_one() -> None:
    assert population_mean([10], [30]) == 10 + 20 * 0.5
    assert population_mean([], [30, 20]) == 30
    assert kept_length_ratio([10, 20], [10, 20], [20, 20]) == 15 / 17.5


def test_nothing_kept_has_no_ratio() -> None:
    assert math.isnan(kept_length_ratio([], [5], [7]))
    assert math.isnan(kept_length_ratio([], [], []))
    assert math.isnan(kept_length_ratio([0], [0], []))


@pytest.mark.parametrize("seed", range(5))
def test_the_population_is_seen_behind_samples_that_are_cut_off(seed: int) -> None:
    """Lognormal lengths with a P99 of ten medians, each cut off at a point that knows nothing of its length."""
    random = np.random.default_rng(seed)
    true = np.ceil(random.lognormal(math.log(200), math.log(10) / 2.326, 100_000)).astype(np.int64)
    cut = random.integers(1, 4000, len(true))
    complete, censored = true[true <= cut], cut[true > cut]
    assert len(censored) > 2000
    assert population_mean(complete, censored) == pytest.approx(true.mean(), rel=0.03)
    assert complete.mean() < 0.9 * true.mean()
    assert kept_length_ratio(complete, complete, censored) == pytest.approx(complete.mean() / true.mean(), rel=0.03)
