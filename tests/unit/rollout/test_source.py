"""Where groups come from, and that none is lost between two runs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.data.cursor import TaskCursor
from drumroll.rollout.source import GroupRequest, ListSource, TaskSource
from drumroll.types import Sampling, Task

TASKS = [Task(id=f"t{number}", prompt="?") for number in range(5)]


def source(groups_per_round: int = 3, attempt: int = 0) -> TaskSource:
    return TaskSource(TaskCursor(TASKS, seed=1), groups_per_round=groups_per_round, group_size=4, attempt=lambda: attempt)


def test_a_list_gives_exactly_its_groups() -> None:
    requests = [GroupRequest(f"g{n}", TASKS[n], 2, ("eval", n)) for n in range(3)]
    one = ListSource(requests)
    assert [one.draw() for _ in range(5)] == [*requests, None, None]
    one.settle("g0", "consumed", ())


def test_names_say_round_and_place() -> None:
    one = source(3)
    drawn = [one.draw() for _ in range(7)]
    assert [request.group_id for request in drawn] == [
        *(f"train/000001/{place:04d}" for place in range(3)),
        *(f"train/000002/{place:04d}" for place in range(3)),
        "train/000003/0000",
    ]
    assert all(request.size == 4 for request in drawn)
    assert [request.task for request in drawn] == TaskCursor(TASKS, seed=1).take(3) + _next_rounds()


def _next_rounds() -> list[Task]:
    cursor = TaskCursor(TASKS, seed=1)
    cursor.take(3)
    return [*cursor.take(3), cursor.take(3)[0]]


def test_a_group_that_was_put_off_has_another_name_and_the_same_seeds() -> None:
    request = GroupRequest("train/000001/0002", TASKS[0], 4, ("train/000001/0002",))
    assert request.name == "train/000001/0002"
    again = GroupRequest(request.group_id, request.task, request.size, request.seed_parts, times_put_off=2)
    assert again.name == "train/000001/0002+2"
    assert again.seed_parts == request.seed_parts


def test_going_back_draws_other_samples_of_the_same_tasks() -> None:
    first, other = source(attempt=0).draw(), source(attempt=2).draw()
    assert (first.group_id, first.task) == (other.group_id, other.task)
    assert first.seed_parts == ("train/000001/0000",)
    assert other.seed_parts == ("train/000001/0000", "attempt-2")


def test_a_group_is_settled_once() -> None:
    one = source()
    group_id = one.draw().group_id
    one.settle(group_id, "consumed", ())
    with pytest.raises(KeyError):
        one.settle(group_id, "consumed", ())


@given(st.integers(1, 7), st.lists(st.one_of(st.just("draw"), st.integers(0, 5)), max_size=40))
def test_nothing_drawn_and_unsettled_is_lost_and_the_order_is_kept(groups_per_round: int, events: list[str | int]) -> None:
    one = source(groups_per_round)
    open_: list[GroupRequest] = []
    for event in events:
        if event == "draw":
            open_.append(one.draw())
        elif open_:
            one.settle(open_.pop(int(event) % len(open_)).group_id, "consumed", ())
    other = source(groups_per_round)
    other.load_state(json.loads(json.dumps(one.state())))
    assert [other.draw() for _ in open_] == open_
    # Beyond them both go on alike.
    assert [other.draw() for _ in range(10)] == [one.draw() for _ in range(10)]


def test_a_state_that_was_loaded_can_be_saved_again_without_change() -> None:
    one = source()
    drawn = [one.draw() for _ in range(4)]
    one.settle(drawn[1].group_id, "consumed", ())
    state = one.state()
    other = source()
    other.load_state(state)
    assert other.state() == state
    other.draw()
    assert other.state() == state


def test_the_first_attempt_of_a_group_is_greedy_where_others_are_compared_with_it() -> None:
    one = TaskSource(TaskCursor(TASKS, seed=1), groups_per_round=3, group_size=4, sampling=Sampling(temperature=0.7), has_greedy=True)
    assert [one.draw().sampling_of(number).temperature for number in range(4)] == [0.0, 0.7, 0.7, 0.7]
    assert [source().draw().sampling_of(number).temperature for number in range(4)] == [1.0] * 4
