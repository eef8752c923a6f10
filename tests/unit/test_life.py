"""A sample's life: packed stamps, the ways that exist, and the time spent in each state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.life import FINAL, FOLLOWERS, STATES, Stamp, State, check_order, last_state, pack_life, retrace, stamp, unpack_life

times = st.floats(0, 1e10, allow_nan=False)
small = st.integers(-1, 2**15 - 1)
stamps = st.builds(Stamp, st.sampled_from(STATES), times, st.integers(-1, 2**31 - 1), st.integers(-1, 2**31 - 1), small)


@given(st.lists(stamps, max_size=20))
def test_a_life_comes_back_from_its_bytes_as_it_was(life: list[Stamp]) -> None:
    packed = pack_life(life)
    assert unpack_life(packed) == life
    assert len(packed) == 19 * len(life)
    assert packed == b"".join(stamp(*each) for each in life)
    if life:
        assert last_state(packed) == life[-1].state


@given(st.sampled_from(STATES), st.lists(st.sampled_from(STATES), max_size=6))
def test_order_is_checked_against_the_ways_that_exist(start: State, states: list[State]) -> None:
    life = pack_life(Stamp(state, float(number)) for number, state in enumerate(states))
    if all(after in FOLLOWERS[before] for before, after in zip([start, *states], states, strict=False)):
        assert check_order(start, life) == [start, *states][-1]
    else:
        with pytest.raises(ValueError, match="cannot become"):
            check_order(start, life)


def test_a_wrong_way_is_named() -> None:
    with pytest.raises(ValueError, match="a sample that is consumed cannot become done"):
        check_order("done", stamp("consumed", 1.0) + stamp("done", 2.0))


def test_every_state_can_be_reached_and_left_but_the_final_ones() -> None:
    reached: set[State] = {"admitted"}
    for _ in STATES:
        reached |= {follower for state in reached for follower in FOLLOWERS[state]}
    assert reached == set(STATES)
    assert {state for state in STATES if not FOLLOWERS[state]} == FINAL


def test_a_sample_can_be_aborted_wherever_it_stands_and_taken_back_from_any_lease() -> None:
    under_way = set(STATES) - FINAL
    assert all("aborted" in FOLLOWERS[state] for state in under_way)
    assert all("admitted" in FOLLOWERS[state] for state in under_way - {"admitted"})
    assert not any("consumed" in FOLLOWERS[state] or "filtered" in FOLLOWERS[state] for state in under_way - {"done"})


def test_seconds_add_up_over_turns_and_the_last_state_has_no_end() -> None:
    life = pack_life(
        [Stamp("waiting", 1.0), Stamp("generating", 3.0), Stamp("environment", 7.0), Stamp("generating", 7.5), Stamp("done", 9.0)]
    )
    assert retrace("leased", life)[1] == {"waiting": 2.0, "generating": 5.5, "environment": 0.5}
    assert retrace("leased", b"")[1] == {}
    assert retrace("leased", stamp("waiting", 5.0))[1] == {}


@given(st.lists(times, min_size=1, max_size=20))
def test_seconds_make_up_the_whole_life(moments: list[float]) -> None:
    turns: list[State] = ["environment", "generating"]
    life = [Stamp(turns[number % 2], moment) for number, moment in enumerate(sorted(moments))]
    _, spent = retrace("leased", pack_life(life))
    assert sum(spent.values()) == pytest.approx(life[-1].time - life[0].time, abs=1e-3)
    assert all(seconds >= 0 for seconds in spent.values())
