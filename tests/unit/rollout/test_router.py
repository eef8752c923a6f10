"""Where samples go: by load, by cache, within limits, and not to those who keep failing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.rollout.router import BENCH_AFTER, BENCH_S, MAX_BENCH_S, MAX_STRETCH, Pool, Router


def router(*slots: int, max_in_flight: int | None = None) -> Router:
    return Router(slots, random.Random(0), max_in_flight)


def lease(one: Router, preferred: int = -1) -> int | None:
    engine = one.pick(preferred)
    if engine is not None:
        one.leased(engine)
    return engine


def fill(one: Router) -> list[int]:
    """Lease until there is no room."""
    taken = []
    while (engine := lease(one)) is not None:
        taken.append(engine)
    return taken


# The pool.


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from(["add", "remove", "fail", "succeed", "back", "lose"]), st.integers(0, 5)), max_size=120),
)
def test_the_least_loaded_is_what_a_search_of_all_members_finds(capacities: list[int], events: list[tuple[str, int]]) -> None:
    pool = Pool(capacities, random.Random(1))
    for event, number in events:
        rank = number % len(capacities)
        if event == "add":
            pool.add(rank)
        elif event == "remove" and pool.in_flight[rank]:
            pool.remove(rank)
        elif event == "fail":
            pool.failed(rank)
        elif event == "succeed":
            pool.succeeded(rank)
        elif event == "back":
            pool.back(rank)
        elif event == "lose":
            pool.lose(rank)
        usable = [rank for rank in range(len(capacities)) if pool.is_usable(rank)]
        found = pool.least_loaded()
        assert (found is None) == (not usable)
        if found is not None:
            assert found in usable
            assert pool.in_flight[found] / capacities[found] == min(pool.in_flight[rank] / capacities[rank] for rank in usable)


def test_load_is_a_share_of_the_capacity() -> None:
    pool = Pool([2, 8], random.Random(0))
    taken = [0, 0]
    for _ in range(10):
        rank = pool.least_loaded()
        assert rank is not None
        pool.add(rank)
        taken[rank] += 1
    assert taken == [2, 8]


def test_a_pool_that_is_never_full_keeps_no_more_than_its_members_need() -> None:
    pool = Pool([4] * 10, random.Random(0))
    for _ in range(10_000):
        rank = pool.least_loaded()
        assert rank is not None
        pool.add(rank)
        pool.remove(rank)
    assert len(pool._heap) < 200


def test_a_member_that_fails_in_a_row_gets_nothing_until_it_is_back_then_one_sample_on_trial() -> None:
    pool = Pool([4, 4], random.Random(0))
    for _ in range(BENCH_AFTER - 1):
        assert pool.failed(0) is None
        assert pool.is_usable(0)
    assert pool.failed(0) == BENCH_S
    assert not pool.is_usable(0)
    assert pool.least_loaded() == 1
    pool.back(0)
    pool.add(1)
    assert pool.least_loaded() == 0
    pool.add(0)
    assert not pool.is_usable(0)  # on trial with one
    assert pool.least_loaded() == 1
    pool.succeeded(0)
    pool.add(1)
    assert pool.least_loaded() == 0


def test_pauses_double_up_to_a_limit_and_a_success_forgets_them() -> None:
    pool = Pool([1], random.Random(0), bench_after=1)
    pauses = []
    for _ in range(10):
        pauses.append(pool.failed(0))
        assert pool.failed(0) is None, "one failure of the member counts once, however many samples it takes with it"
        pool.back(0)
    assert pauses == [min(MAX_BENCH_S, BENCH_S * 2**number) for number in range(10)]
    pool.succeeded(0)
    assert pool.failed(0) == BENCH_S


def test_a_success_in_between_starts_the_count_anew() -> None:
    pool = Pool([1], random.Random(0))
    for _ in range(5):
        assert pool.failed(0) is None
        pool.succeeded(0)
    assert pool.is_usable(0)


def test_a_lost_member_never_comes_back() -> None:
    pool = Pool([1, 1], random.Random(0))
    pool.add(0)
    pool.lose(0)
    assert len(pool) == 1
    pool.remove(0)
    pool.succeeded(0)
    pool.back(0)
    pool.add(1)
    assert pool.least_loaded() == 1
    pool.lose(1)
    assert len(pool) == 0
    assert pool.least_loaded() is None


# The router.


def test_engines_fill_evenly_by_their_share_of_slots() -> None:
    one = router(4, 8)
    for _ in range(12):
        assert lease(one) is not None
    assert one.engines.in_flight == [4, 8]


def test_beyond_its_slots_an_engine_has_a_few_in_reserve_and_no_more() -> None:
    one = router(4, 16)
    taken = fill(one)
    assert taken.count(0) == 4 + 1
    assert taken.count(1) == 16 + 2
    assert one.limit == len(taken)
    one.ended(0)
    assert lease(one) == 0
    assert lease(one) is None


def test_a_group_goes_where_its_cache_is_as_long_as_a_slot_is_free_there() -> None:
    one = router(2, 2, 2)
    assert lease(one, preferred=1) == 1
    assert lease(one, preferred=1) == 1
    assert lease(one, preferred=1) in (0, 2)


def test_a_cache_on_an_engine_that_fails_is_worth_nothing() -> None:
    one = router(2, 2)
    for _ in range(BENCH_AFTER):
        one.engines.failed(1)
    assert lease(one, preferred=1) == 0


def test_no_more_samples_are_under_way_than_allowed() -> None:
    one = router(8, 8, max_in_flight=5)
    assert len(fill(one)) == 5
    assert one.limit == 5
    assert one.pick(preferred=0) is None
    one.ended(0)
    assert lease(one) is not None
    assert lease(one) is None


def test_the_longer_samples_are_out_of_their_slots_the_more_of_them_are_under_way() -> None:
    limits = []
    for env_s in (0.0, 1.0, 3.0, 9.0):
        one = router(8, 8)
        for _ in range(500):
            one.observe(alive_s=1.0 + env_s, waiting_s=0.0, in_slot_s=1.0)
        assert one.stretch == pytest.approx(1.0 + env_s)
        limits.append(len(fill(one)))
        assert limits[-1] == one.limit
    assert limits == [18, 34, 66, 162]


def test_waiting_for_slots_does_not_make_more_samples_wait() -> None:
    one = router(8)
    for waiting_s in range(1000):
        one.observe(alive_s=2.0 + waiting_s, waiting_s=float(waiting_s), in_slot_s=1.0)
        assert one.stretch == pytest.approx(2.0)


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3), max_size=50))
def test_whatever_is_reported_the_limit_stays_within_bounds(reports: list[tuple[float, float, float]]) -> None:
    one = router(8, 8)
    for alive_s, waiting_s, in_slot_s in reports:
        one.observe(alive_s, waiting_s, in_slot_s)
        assert 1.0 <= one.stretch <= MAX_STRETCH
    assert 16 < one.limit <= 16 * MAX_STRETCH + 2
    assert len(fill(one)) == one.limit


def test_the_limit_follows_when_environments_become_quick_again() -> None:
    one = router(8)
    for _ in range(500):
        one.observe(10.0, 0.0, 1.0)
    assert one.stretch > 9
    for _ in range(1000):
        one.observe(1.0, 0.0, 1.0)
    assert one.stretch < 1.1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_what_is_leased_and_ended_adds_up(slots: list[int], rng: random.Random) -> None:
    one = router(*slots)
    out: list[int] = []
    for _ in range(200):
        if out and rng.random() < 0.4:
            one.ended(out.pop(rng.randrange(len(out))))
        elif (engine := lease(one, rng.randrange(-1, len(slots)))) is not None:
            out.append(engine)
        assert len(out) <= one.limit
    for engine in out:
        one.ended(engine)
    assert one.engines.in_flight == [0] * len(slots)
    assert len(fill(one)) == one.limit
