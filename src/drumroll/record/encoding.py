"""How values become bytes: trajectories as msgpack, everything else as strict JSON. Pure functions; nothing here opens a file.

A trajectory comes back as it went in: numpy arrays and scalars keep their dtypes, tuples stay tuples, integers may be of
any size. A value of a task that has no encoding (an image, say) is kept as its `repr`, so that an odd dataset column never
stops a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from drumroll.errors import RunFolderError
from drumroll.types import Sampling, Task, Trajectory, Turn

FORMAT = 2
"""Version of the msgpack layout; a payload with a larger one is refused. 1 had `timings`, which are left out when it is read."""

_ENCODER = json.JSONEncoder(allow_nan=False)
_TUPLE, _ARRAY, _BIG_INT = 1, 2, 3
_REPR_CHARACTERS = 200


_STORED = tuple(f.name for f in fields(Trajectory) if f.name not in ("life", "reward_stats"))
_TASK = tuple(f.name for f in fields(Task))
_SAMPLING = tuple(f.name for f in fields(Sampling))


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The trajectory as msgpack, without its life, which the store has in the sample's row, and without what its rewards cost."""
    values = {name: getattr(trajectory, name) for name in _STORED}
    task = {name: getattr(trajectory.task, name) for name in _TASK}
    turns = [[turn.author, turn.start, turn.end, turn.text, turn.reward, turn.state] for turn in trajectory.turns]  # faster than tuples
    sampling = {name: getattr(trajectory.sampling, name) for name in _SAMPLING}
    branches = [encode_trajectory(branch) for branch in trajectory.branches]
    return _pack({"format": FORMAT, **values, "task": task, "turns": turns, "sampling": sampling, "branches": branches})


def decode_trajectory(payload: bytes) -> Trajectory:
    """The trajectory that `encode_trajectory` was given, without its life and what its rewards cost."""
    values = _unpack(payload)
    found = values["format"]
    if found > FORMAT:
        raise RunFolderError(
            f"trajectory payload has format {found}, this drumroll reads up to {FORMAT}: upgrade drumroll to read this run."
        )
    values["task"] = Task(**values["task"])
    values["turns"] = tuple(Turn(*turn) for turn in values["turns"])
    values["sampling"] = Sampling(**values["sampling"])
    values["branches"] = tuple(decode_trajectory(branch) for branch in values.get("branches", ()))
    return Trajectory(**{name: values[name] for name in _STORED if name in values})


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: numbers that JSON lacks become the strings "NaN", "Infinity" and "-Infinity", which `float` reads back."""
    encoder = _ENCODER if indent is None else json.JSONEncoder(allow_nan=False, indent=indent)
    return encoder.encode(_jsonable(value))


def _jsonable(value: Any) -> Any:
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict() | Mapping():
            return {str(key): _jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [_jsonable(item) for item in value]
        case np.generic() | np.ndarray():
            return _jsonable(value.tolist())
        case _:
            return str(value)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_extension, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _unpack(payload: bytes) -> Any:
    return msgpack.unpackb(payload, ext_hook=_from_extension, strict_map_key=False, unicode_errors="surrogatepass")


def _extension(value: Any) -> Any:
    """What msgpack packs in place of a value that it does not know by itself."""
    match value:
        case tuple():
            return msgpack.ExtType(_TUPLE, _pack(list(value)))
        case np.ndarray() | np.generic() if value.dtype.kind in "biufcMm":
            array = np.asarray(value)
            return msgpack.ExtType(_ARRAY, msgpack.packb([array.dtype.str, array.shape, array.tobytes()]))
        case np.ndarray():
            return value.tolist()
        case int() if not -(2**63) <= value < 2**64:
            return msgpack.ExtType(_BIG_INT, str(int(value)).encode())
        case Mapping():
            return dict(value)
        case str():  # from here on subclasses, such as enumerations and numpy strings
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case bytes() | list():
            return value[:]
        case _:
            return repr(value)[:_REPR_CHARACTERS]


def _from_extension(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(_unpack(data))
    if code == _ARRAY:
        dtype, shape, raw = _unpack(data)
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()[()]
    if code == _BIG_INT:
        return int(data)
    return msgpack.ExtType(code, data)
