"""The order of tasks: complete, repeatable, and resumed exactly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.data.cursor import TaskCursor
from drumroll.errors import DataError
from drumroll.types import Task


def tasks(count):
    return [Task(f"train-{i}", prompt=str(i)) for i in range(count)]


def ids(taken):
    return [task.id for task in taken]


@given(st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_holds_every_task_once_in_another_order(count, seed):
    cursor = TaskCursor(tasks(count), seed)
    assert len(cursor) == count
    epochs = [ids(cursor.take(count)) for _ in range(4)]
    assert all(sorted(epoch) == sorted(ids(tasks(count))) for epoch in epochs)
    if count > 10:
        assert len(set(map(tuple, epochs))) == 4


@given(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_no_task_twice_in_one_take_that_all_tasks_can_fill(count, sizes):
    cursor = TaskCursor(tasks(count), seed=1)
    for size in sizes:
        taken = ids(cursor.take(size))
        assert len(taken) == size
        assert len(set(taken)) == size or size > count


@given(st.integers(1, 20), st.lists(st.integers(1, 25), max_size=8), st.lists(st.integers(1, 25), min_size=1, max_size=8))
def test_a_restored_cursor_goes_on_exactly(count, before, after):
    cursor = TaskCursor(tasks(count), seed=7)
    for size in before:
        cursor.take(size)
    state = json.loads(json.dumps(cursor.state()))
    expected = [ids(cursor.take(size)) for size in after]
    restored = TaskCursor(tasks(count), seed=7)
    restored.take(3)
    restored.load_state(state)
    assert [ids(restored.take(size)) for size in after] == expected


def test_the_order_is_the_same_on_every_machine():
    assert [task.prompt for task in TaskCursor(tasks(6), seed=0).take(8)] == ["2", "1", "4", "0", "5", "3", "3", "1"]


def test_other_seeds_and_other_tasks_are_noticed():
    state = TaskCursor(tasks(5), seed=0).state()
    assert ids(TaskCursor(tasks(50), seed=0).take(50)) != ids(TaskCursor(tasks(50), seed=1).take(50))
    with pytest.raises(DataError, match="drawn with seed 0, and this run has seed 1"):
        TaskCursor(tasks(5), seed=1).load_state(state)
    with pytest.raises(DataError, match="ids or their order differ"):
        TaskCursor(tasks(6), seed=0).load_state(state)
    with pytest.raises(DataError, match="no tasks"):
        TaskCursor([], seed=0)
