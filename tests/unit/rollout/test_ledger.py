"""The ledger: every way that exists, every way that does not, and each sample leaves once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.life import FINAL, FOLLOWERS, STATES, Stamp, State, pack_life, unpack_life
from drumroll.rollout.ledger import Ledger, Sample


def sample(sample_id: str = "g/000", group_id: str = "g") -> Sample:
    return Sample(sample_id, None, 0, group_id, "task", "default")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def admitted(ledger: Ledger, state: State = "admitted") -> Sample:
    """A sample in some state, brought there by a way that exists."""
    ways: dict[State, tuple[State, ...]] = {
        "leased": ("leased",),
        "environment": ("leased", "environment"),
        "waiting": ("leased", "waiting"),
        "generating": ("leased", "generating"),
        "reward": ("leased", "reward"),
        "done": ("leased", "done"),
    }
    one = sample()
    ledger.admit(one)
    for step in ways.get(state, ()):
        ledger.move(one, step)
    return one


@pytest.mark.parametrize("before", [state for state in STATES if state not in FINAL])
@pytest.mark.parametrize("after", STATES)
def test_a_sample_moves_along_the_ways_that_exist_and_no_others(before: State, after: State) -> None:
    ledger = Ledger(Clock())
    one = admitted(ledger, before)
    life = one.life
    if after in FOLLOWERS[before]:
        ledger.move(one, after)
        assert one.state == after
        assert unpack_life(one.life)[-1].state == after
        assert ledger.counts[after] == 1
        assert ledger.counts.total() == 1
    else:
        with pytest.raises(ValueError, match=f"sample 'g/000' is {before} and cannot become {after}"):
            ledger.move(one, after)
        assert (one.state, one.life) == (before, life)
        assert ledger.counts == {before: 1} | {state: 0 for state in ledger.counts if state != before}


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_sample_leaves_exactly_once(state: State) -> None:
    ledger = Ledger(Clock())
    one = admitted(ledger, "leased" if state in ("aborted", "failed") else "done")
    departure = ledger.leave(one, state, "why")
    assert (departure.sample_id, departure.group_id, departure.task_id, departure.domain) == ("g/000", "g", "task", "default")
    assert (departure.state, departure.reason, departure.attempt) == (state, "why", -1)
    assert unpack_life(departure.life)[-1].state == state
    assert len(ledger) == 0
    assert list(ledger) == []
    for again in FINAL:
        with pytest.raises(ValueError, match="cannot become"):
            ledger.leave(one, again)


@pytest.mark.parametrize("state", [state for state in STATES if state not in FINAL])
def test_no_sample_leaves_in_a_state_that_is_not_final(state: State) -> None:
    ledger = Ledger(Clock())
    one = admitted(ledger)
    with pytest.raises(ValueError, match=f"{state} is no state to leave in"):
        ledger.leave(one, state)
    assert list(ledger) == [one]


def test_a_sample_is_admitted_once() -> None:
    ledger = Ledger(Clock())
    ledger.admit(sample())
    with pytest.raises(ValueError, match="'g/000' is in the ledger already"):
        ledger.admit(sample())
    assert len(ledger) == 1
    assert ledger.counts["admitted"] == 1


def test_changes_are_stamped_with_time_version_and_place() -> None:
    ledger = Ledger(Clock())
    ledger.version = 3
    one = sample()
    ledger.admit(one)
    ledger.version = 4
    ledger.move(one, "leased", place=2)
    assert unpack_life(one.life) == [Stamp("admitted", 1.0, 3), Stamp("leased", 2.0, 4, 2)]


def test_a_workers_stamps_are_added_as_they_are() -> None:
    ledger = Ledger(Clock())
    one = admitted(ledger, "leased")
    stamps = [Stamp("generating", 5.0, 1, 3, 7), Stamp("reward", 6.0, -1, 0), Stamp("done", 7.0, -1, 0)]
    ledger.follow(one, pack_life(stamps))
    assert one.state == "done"
    assert unpack_life(one.life)[2:] == stamps
    assert ledger.counts["done"] == 1
    assert ledger.counts["leased"] == 0


def test_a_worker_cannot_send_a_sample_a_way_that_does_not_exist() -> None:
    ledger = Ledger(Clock())
    one = admitted(ledger, "leased")
    before = one.life
    with pytest.raises(ValueError, match="waiting cannot become done"):
        ledger.follow(one, pack_life([Stamp("waiting", 5.0), Stamp("done", 6.0)]))
    assert (one.state, one.life) == ("leased", before)


def test_an_empty_life_changes_nothing() -> None:
    ledger = Ledger(Clock())
    one = admitted(ledger, "leased")
    ledger.follow(one, b"")
    assert one.state == "leased"
    assert ledger.counts["leased"] == 1


def test_samples_may_leave_while_the_ledger_is_read() -> None:
    ledger = Ledger(Clock())
    for number in range(5):
        ledger.admit(sample(f"g/{number:03d}"))
    for one in ledger:
        ledger.leave(one, "aborted", "the end")
    assert len(ledger) == 0
    assert ledger.counts["aborted"] == 5


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(STATES)), max_size=60))
def test_whatever_is_tried_samples_are_in_the_ledger_or_have_left_once(moves: list[tuple[int, State]]) -> None:
    ledger = Ledger(Clock())
    samples = [sample(f"g/{number:03d}") for number in range(5)]
    for one in samples:
        ledger.admit(one)
    departures = []
    for number, state in moves:
        one = samples[number]
        try:
            if state in FINAL:
                departures.append(ledger.leave(one, state))
            else:
                ledger.move(one, state)
        except ValueError:
            pass
        assert ledger.counts.total() == 5
        assert all(count >= 0 for count in ledger.counts.values())
    left = [departure.sample_id for departure in departures]
    assert sorted([*left, *(one.sample_id for one in ledger)]) == [one.sample_id for one in samples]
    assert sum(ledger.counts[state] for state in FINAL) == len(left)
