"""Values between a program and its tests: what crosses as data, what stays behind, and what a lying side cannot send."""

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import io
import json
import math
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.sandbox.exchange import MAX_MESSAGE_BYTES, OPERATIONS, OPERATIONS_ON_TESTS, Link, LinkLost, StandIn, restore
from drumroll.sandbox.pipes import Pipe

numbers = st.one_of(st.integers(), st.integers(min_value=10**300), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False))
exact = st.one_of(st.fractions(), st.decimals(allow_nan=False), st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)))
times = st.one_of(st.dates(), st.datetimes(), st.timedeltas())
scalars = st.one_of(st.none(), st.booleans(), numbers, exact, times, st.text(), st.binary(), st.binary().map(bytearray))
hashable = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(hashable, inner),
        st.dictionaries(hashable, inner).map(collections.OrderedDict),
        st.sets(hashable),
        st.frozensets(hashable),
        st.lists(inner).map(collections.deque),
        st.lists(hashable).map(collections.Counter),
    ),
    max_leaves=20,
)


def quiet_link() -> Link:
    return Link(io.BytesIO(), io.BytesIO(), OPERATIONS)


def cross(value: Any) -> Any:
    return quiet_link().decode(json.loads(json.dumps(quiet_link().encode(value))))


@given(values)
def test_plain_data_arrives_equal_and_of_the_same_type(value: Any) -> None:
    arrived = cross(value)
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize("value", [math.nan, complex(math.nan, -math.inf), decimal.Decimal("NaN")])
def test_what_is_not_a_number_arrives_as_such(value: Any) -> None:
    assert repr(cross(value)) == repr(value)


def test_rare_types_and_types_themselves_arrive() -> None:
    aware = datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.UTC)
    for value in (
        aware,
        datetime.time(1, 2),
        slice(1, None, 2),
        int,
        collections.Counter,
        fractions.Fraction,
        ValueError,
        math,
        -0.0,
        True,
    ):
        assert repr(cross(value)) == repr(value)
    grouped = cross(collections.defaultdict(list, {"a": [1]}))
    grouped["b"].append(2)
    assert grouped == {"a": [1], "b": [2]}


@given(values, values)
def test_restoring_makes_equal_and_keeps_the_outer_object(old: Any, new: Any) -> None:
    assert restore(old, new) == new
    kept: list[Any] = [old]
    restore(kept, [new])
    assert kept == [new]


def test_restoring_keeps_inner_objects() -> None:
    row, entry = [1], {"a": [2]}
    table = [row, entry, (row,)]
    restore(table, [[1, 5], {"a": [2, 6]}, ([7],), 8])
    assert table[0] is row
    assert table[1] is entry
    assert table == [row, {"a": [2, 6]}, (row,), 8]


@contextlib.contextmanager
def connected(**program: Any) -> Iterator[Callable[[str], Any]]:
    """A function that gets the stand-in for a name of the program, which a thread serves."""
    with contextlib.ExitStack() as stack:
        calls, answers = stack.enter_context(Pipe()), stack.enter_context(Pipe())
        modes = ((calls.read, "rb"), (answers.write, "wb"), (answers.read, "rb"), (calls.write, "wb"))
        files: list[Any] = [stack.enter_context(open(file, mode, closefd=False)) for file, mode in modes]
        theirs, ours = Link(files[0], files[1], OPERATIONS), Link(files[2], files[3], OPERATIONS_ON_TESTS)
        theirs.give(program)

        def serve() -> None:
            with pytest.raises(LinkLost):
                theirs.serve()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield lambda name: ours.ask("item", 0, name)
        finally:
            calls.close_write()
            thread.join()


class Liar:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class LyingInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


Point = collections.namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 3


class OwnError(ValueError):
    pass


def test_overridden_equality_stays_behind() -> None:
    with connected(liar=Liar(), number=LyingInt(1), among=[Liar()]) as get:
        assert type(get("liar")) is StandIn
        assert get("liar") != 5
        assert get("number") != 5
        assert get("among") != [5]
        assert 5 not in [get("liar")]


def test_what_only_extends_a_builtin_is_compared_by_its_value() -> None:
    with connected(point=Point(1, 2), colour=Colour.RED) as get:
        assert get("point") == (1, 2)
        assert get("point") != (1, 3)
        assert get("point").y == 2
        assert get("colour") == 3


def test_objects_are_used_through_stand_ins() -> None:
    class Box:
        def __init__(self, content: list[int]) -> None:
            self.content = content

        def __len__(self) -> int:
            return len(self.content)

        def __getitem__(self, key: Any) -> Any:
            return self.content[key]

        def __setitem__(self, key: int, value: int) -> None:
            self.content[key] = value

        def __str__(self) -> str:
            return "a box"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Box) and self.content == other.content

        __hash__ = None  # type: ignore[assignment]

    with connected(Box=Box, first=lambda box, *, target=0: box[target]) as get:
        make, first = get("Box"), get("first")
        box = make([1, 2, 3])
        box[0] = 7
        box.name = "left"
        assert (len(box), box[0], box[1:], list(box), str(box), box.name) == (3, 7, [2, 3], [7, 2, 3], "a box", "left")
        assert first(box, target=2) == 3
        assert box == make([7, 2, 3])
        assert box != make([])
        assert bool(box)
        assert not make([])
        assert isinstance(box, make)
        assert not isinstance(3, make)
        assert not hasattr(box, "missing")
        with pytest.raises(TypeError):
            box + 1


def test_generators_are_lazy() -> None:
    def count() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    with connected(count=count) as get:
        numbers = get("count")()
        assert [next(numbers), next(numbers)] == [0, 1]
        assert next(value for value in numbers if value > 5) == 6


def test_arguments_changed_in_place_are_changed_here_too() -> None:
    def spoil(rows: list[list[int]], *, seen: set[int]) -> None:
        rows[0].append(9)
        seen.add(4)
        raise KeyError("after the change")

    with connected(spoil=spoil, sort=lambda items: items.sort()) as get:
        row, seen, items = [1], {3}, [3, 1, 2]
        assert get("sort")(items) is None
        assert items == [1, 2, 3]
        with pytest.raises(KeyError):
            get("spoil")([row], seen=seen)
        assert row == [1, 9]
        assert seen == {3, 4}


def test_functions_of_a_test_can_be_called_and_nothing_else() -> None:
    def look(function: Any) -> str:
        return str(function.__globals__)

    with connected(apply=lambda function, value: function(value) + 1, look=look) as get:
        assert get("apply")(lambda value: value * 10, 4) == 41
        with pytest.raises(ZeroDivisionError):
            get("apply")(lambda value: value / 0, 4)
        with pytest.raises(KeyError, match="get"):
            get("look")(lambda value: value)


def test_errors_arrive_as_what_they_are() -> None:
    def fail(kind: str) -> None:
        raise {
            "own": OwnError("a"),
            "value": ValueError("b", 2),
            "decode": UnicodeDecodeError("utf8", b"x", 0, 1, "c"),
            "stop": StopIteration(3),
        }[kind]

    with connected(fail=fail, OwnError=OwnError) as get:
        own = get("OwnError")
        assert issubclass(own, ValueError)
        with pytest.raises(own, match="a"):
            get("fail")("own")
        with pytest.raises(ValueError) as raised:
            get("fail")("value")
        assert raised.value.args == ("b", 2)
        assert vars(raised.value) == {"from_program": True}
        with pytest.raises(UnicodeError):
            get("fail")("decode")


def test_a_call_cannot_end_the_loop_around_it() -> None:
    def stop(value: int) -> bool:
        raise StopIteration

    with connected(stop=stop) as get:
        with pytest.raises(RuntimeError, match="StopIteration"):
            all(map(get("stop"), [1, 2]))
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(iter(lambda: get("stop")(1), None))


def test_what_is_too_large_or_too_deep_is_an_error_of_the_call() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with connected(large=lambda: "x" * (MAX_MESSAGE_BYTES + 1), deep=lambda: deep, fine=lambda: 1) as get:
        with pytest.raises(ValueError, match="too large"):
            get("large")()
        with pytest.raises(RecursionError):
            get("deep")()
        assert get("fine")() == 1


NO_VALUES = (
    *(b'["mine"]', b'["unknown",1]', b'{"a":1}', b'["set",["list"]]', b'["dict",1]', b'["float","x"]', b"[]", b"[[]]"),
    *(b'["module","drumroll"]', b'["type","Link"]', b'["yours",7]', b'["exception",[],"ValueError","x"]'),
)


@pytest.mark.parametrize(
    "message",
    [
        *(b'["ok",%s,null]' % value for value in NO_VALUES),
        *(b'["raise",[%s,[],""],null]' % value for value in (b'["exception",-1,"SystemExit","x"]', b'["type","int"]', b"5")),
        *(b'["ok"]', b"{}", b"null", b"\xff", b"", b"[" * 100_000),
    ],
)
def test_a_side_that_breaks_the_rules_is_lost(message: bytes) -> None:
    link = Link(io.BytesIO(struct.pack("<Q", len(message)) + message), io.BytesIO(), OPERATIONS_ON_TESTS)
    with pytest.raises(LinkLost):
        link.ask("item", 0, "name")
    assert link.lost
    with pytest.raises(LinkLost):
        link.ask("item", 0, "name")


def test_a_message_that_claims_to_be_huge_is_not_read() -> None:
    link = Link(io.BytesIO(struct.pack("<Q", 1 << 60)), io.BytesIO(), OPERATIONS_ON_TESTS)
    with pytest.raises(LinkLost, match="too long"):
        link.ask("item", 0, "name")
