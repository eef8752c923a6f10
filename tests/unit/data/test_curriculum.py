"""The curriculum: what is right for the model comes first, and everything comes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config.models import CurriculumConfig
from drumroll.data.curriculum import Curriculum
from drumroll.data.cursor import TaskCursor
from drumroll.errors import DataError
from drumroll.types import Task


def tasks(count: int) -> list[Task]:
    return [Task(f"t{number}", prompt="?", data={"level": number % 4}) for number in range(count)]


def curriculum(count: int = 40, **options: float | int | str) -> Curriculum:
    return Curriculum(TaskCursor(tasks(count), seed=3), CurriculumConfig(**options))


def test_without_measurements_the_order_is_the_cursors() -> None:
    assert curriculum().take_numbers(10) == TaskCursor(tasks(40), seed=3).take_numbers(10)


def test_tasks_near_the_target_are_preferred() -> None:
    one = curriculum(level_field="level", lookahead=4, patience=100)
    for level, rate in enumerate((1.0, 0.5, 0.0, 0.9)):
        one.learn(level, rate)
    assert {number % 4 for number in one.take_numbers(8)} == {1}


def test_each_task_is_measured_by_itself_where_there_are_no_levels() -> None:
    one, order = curriculum(count=8, lookahead=2), TaskCursor(tasks(8), seed=3).take_numbers(8)
    one.learn(order[0], 1.0)
    assert one.take_numbers(4) == order[1:5]


def test_a_rate_is_remembered_and_forgotten() -> None:
    one = curriculum(memory=0.75)
    one.learn(0, 1.0)
    one.learn(0, 0.0)
    assert one.state()["rates"] == {"t0": 0.75}


@given(st.integers(1, 9), st.integers(2, 6), st.integers(1, 5), st.lists(st.floats(0, 1), min_size=40, max_size=40))
def test_no_task_is_passed_over_more_often_than_patience_allows(n: int, lookahead: int, patience: int, rates: list[float]) -> None:
    one = curriculum(lookahead=lookahead, patience=patience)
    for number, rate in enumerate(rates):
        one.learn(number, rate)
    drawn = [one.take_numbers(n) for _ in range(60)]
    assert all(len(numbers) == n for numbers in drawn)
    # Whatever overflows its patience at the same time is drawn in the next rounds.
    assert all(passed <= patience + lookahead for _, passed in one.state()["window"])
    counts = Counter(number for numbers in drawn for number in numbers)
    if 60 * n >= 40 * (patience + lookahead + 2):
        assert set(counts) == set(range(40))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 39), st.floats(0, 1)), max_size=20), st.integers(0, 19))
def test_it_goes_on_from_its_state(events: list[tuple[int, int, float]], cut: int) -> None:
    def play(one: Curriculum, some: list[tuple[int, int, float]]) -> list[list[int]]:
        drawn = []
        for n, number, rate in some:
            drawn.append(one.take_numbers(n))
            one.learn(number, rate)
        return drawn

    whole = curriculum()
    expected = play(whole, events)
    first, second = curriculum(), curriculum()
    drawn = play(first, events[:cut])
    second.load_state(json.loads(json.dumps(first.state())))
    assert drawn + play(second, events[cut:]) == expected


def test_a_missing_level_is_named() -> None:
    with pytest.raises(DataError, match=r"task 't\d+' has no column 'grade' .`curriculum.level_field`"):
        curriculum(level_field="grade").take_numbers(1)
