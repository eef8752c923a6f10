"""What goes into a payload comes out of it, value for value and dtype for dtype."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import fields, replace
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from record_samples import make_trajectory

from drumroll.errors import RunFolderError
from drumroll.record.encoding import decode_trajectory, encode_trajectory, to_json
from drumroll.types import Sampling, Task, Trajectory, Turn

TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=20)  # lone surrogates and control characters included
NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**80), 2**80)
DATA = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)
NAMED = st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 12))

    def array(dtype: Any) -> Any:
        return draw(hnp.arrays(dtype, length))

    return Trajectory(
        sample_id=draw(TEXT),
        group_id=draw(TEXT),
        task=Task(
            id=draw(TEXT),
            prompt=draw(st.none() | TEXT),
            messages=draw(st.none() | st.lists(st.dictionaries(TEXT, DATA, max_size=2), max_size=2).map(tuple)),
            domain=draw(TEXT),
            data=draw(st.dictionaries(TEXT, DATA, max_size=3)),
        ),
        turns=tuple(
            draw(
                st.lists(
                    st.builds(Turn, st.sampled_from(["environment", "policy"]), st.integers(0, 9), st.integers(0, 9), TEXT), max_size=3
                )
            )
        ),
        token_ids=array(np.int32),
        loss_mask=array(np.bool_),
        logp=array(np.float32),
        token_version=array(np.int32),
        sampling=draw(st.builds(Sampling, stop=st.lists(TEXT, max_size=2).map(tuple), temperature=st.floats(0, 2))),
        seed=draw(st.integers(0, 2**63 - 1)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        stop_reason="stop",
        reward_parts=draw(NAMED),
        success=draw(st.none() | st.booleans()),
        error=draw(TEXT),
        metrics=draw(NAMED),
        life=draw(st.binary(max_size=8)),
        attempt=draw(st.integers(0, 9)),
        fault=draw(st.sampled_from(["", "engine", "environment", "reward"])),
    )


def assert_same(found: Trajectory, expected: Trajectory) -> None:
    for f in fields(Trajectory):
        ours, theirs = getattr(found, f.name), getattr(expected, f.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert ours.flags.writeable
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours == theirs, f.name


@settings(max_examples=150, deadline=None)
@given(trajectories())
def test_roundtrip(trajectory: Trajectory) -> None:
    """Its life is not in the payload: the store has it in the sample's row."""
    assert_same(decode_trajectory(encode_trajectory(trajectory)), replace(trajectory, life=b""))


@settings(max_examples=80, deadline=None)
@given(hnp.arrays(hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufcMm"), hnp.array_shapes(min_dims=1, min_side=0)))
def test_arrays_in_a_task_keep_dtype_and_shape(array: np.ndarray) -> None:
    task = Task(id="t", data={"array": array, "view": array[::-1], "pair": ({"x": array},)})
    data = decode_trajectory(encode_trajectory(make_trajectory(task=task))).task.data
    for found, expected in ((data["array"], array), (data["view"], array[::-1]), (data["pair"][0]["x"], array)):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_odd_values_never_stop_the_recorder() -> None:
    class Color(str, Enum):  # noqa: UP042 - its `str` is not its value
        RED = "red"

    class Picture:
        def __repr__(self) -> str:
            return "<Picture " + "x" * 1000

    odd = {
        "scalar": np.float32(0.1),
        "text": np.str_("a"),
        "color": Color.RED,
        "ordered": OrderedDict(b=1, a=2),
        "texts": np.array(["a", "bc"]),
        "picture": Picture(),
        3: {(1, 2): "tuple key"},
    }
    data = decode_trajectory(encode_trajectory(make_trajectory(task=Task(id="t", data=odd)))).task.data
    assert isinstance(data["scalar"], np.float32)
    assert data["scalar"] == np.float32(0.1)
    assert (data["text"], data["color"], data["texts"]) == ("a", "red", ["a", "bc"])
    assert list(data["ordered"]) == ["b", "a"]
    assert data["picture"].startswith("<Picture")
    assert len(data["picture"]) == 200
    assert data[3] == {(1, 2): "tuple key"}


def test_the_first_format_is_read() -> None:
    payload = msgpack.unpackb(encode_trajectory(make_trajectory(attempt=3)), strict_map_key=False)
    del payload["attempt"], payload["fault"]
    old = msgpack.packb({**payload, "format": 1, "timings": {"leased": 1.5, "generate_s": 2.0}})
    assert_same(decode_trajectory(old), make_trajectory())


def test_a_future_format_is_refused() -> None:
    payload = msgpack.unpackb(encode_trajectory(make_trajectory()), strict_map_key=False)
    with pytest.raises(RunFolderError, match=r"format 99.*upgrade drumroll"):
        decode_trajectory(msgpack.packb({**payload, "format": 99}))


def test_json_is_always_valid() -> None:
    text = to_json({"a": math.nan, "b": [math.inf, -math.inf], "c": np.float32(1.5), "d": np.arange(2), "e": (True, None), 5: "x"})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(text, parse_constant=refuse)
    assert found == {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": 1.5, "d": [0, 1], "e": [True, None], "5": "x"}
    assert math.isnan(float(found["a"]))
    assert float(found["b"][1]) == -math.inf
