"""A sample's life: the states it passes through, which may follow which, and the stamps that record them.

    admitted ─► leased ─► environment ─► waiting ─► generating ─┐
       ▲          │           ▲                                 ├─► reward ─► done ─► consumed
       └──────────┴───────────┴──── the next turn ◄─────────────┘              └────► filtered
       taken back: leased again               aborted, failed: from wherever it stands

Every sample that is admitted ends in exactly one of `FINAL`. A stamp says when a state began; the next stamp ends it. Stamps
are kept packed, 19 bytes each: they are passed on far more often than they are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

State = Literal["admitted", "leased", "environment", "waiting", "generating", "reward", "done", "consumed", "filtered", "aborted", "failed"]
"""admitted: wanted, and not yet handed out; leased: on its way to an environment worker; environment: the environment thinks;
waiting: for a slot of its engine; generating: in a slot; reward: being judged; done: waits for its group and its step;
consumed: trained on, or evaluated; filtered: complete, and rejected with its group; aborted: no longer wanted; failed: given up
after several attempts."""

STATES: tuple[State, ...] = State.__args__  # type: ignore[attr-defined]
FINAL: frozenset[State] = frozenset({"consumed", "filtered", "aborted", "failed"})

_ANYWHERE: frozenset[State] = frozenset({"admitted", "aborted", "failed"})
FOLLOWERS: dict[State, frozenset[State]] = {
    "admitted": frozenset({"leased", "aborted", "failed"}),
    "leased": _ANYWHERE | {"environment", "waiting", "generating", "reward", "done"},
    "environment": _ANYWHERE | {"waiting", "generating", "reward", "done"},
    "waiting": _ANYWHERE | {"generating", "environment"},
    "generating": _ANYWHERE | {"waiting", "environment", "reward", "done"},
    "reward": _ANYWHERE | {"done"},
    "done": frozenset({"consumed", "filtered", "aborted", "admitted"}),
    **dict.fromkeys(FINAL, frozenset()),
}
"""What may come after each state. From anywhere before `done` a sample may be taken back to be leased again."""


class Stamp(NamedTuple):
    """The beginning of a state."""

    state: State
    time: float
    """Seconds since the epoch."""
    version: int = -1
    """Step of the weights: the engine's where it generates, the learner's otherwise; -1 where nobody knows."""
    place: int = -1
    """Rank of the engine (`waiting`, `generating`) or environment worker; -1 is the controller."""
    slot: int = -1
    """Of the engine, while generating."""


_STAMP = struct.Struct("<Bdiih")
_CODE = {state: code for code, state in enumerate(STATES)}


def stamp(state: State, time: float, version: int = -1, place: int = -1, slot: int = -1) -> bytes:
    """One stamp, packed. A life is the stamps joined."""
    return _STAMP.pack(_CODE[state], time, version, place, slot)


def unpack_life(life: bytes) -> list[Stamp]:
    """The stamps, in the order of their times."""
    return [Stamp(STATES[code], *rest) for code, *rest in _STAMP.iter_unpack(life)]


def pack_life(stamps: Iterable[Stamp]) -> bytes:
    return b"".join(stamp(*each) for each in stamps)


def last_state(life: bytes) -> State:
    return STATES[life[-_STAMP.size]]


def retrace(state: State, life: bytes) -> tuple[State, dict[State, float]]:
    """Where `life` leads from `state`, and how long it spent in each of its own states; the last one has no end. A `ValueError` where
    it takes a way that does not exist."""
    seconds: dict[State, float] = {}
    began: float | None = None
    for code, time, _, _, _ in _STAMP.iter_unpack(life):
        follower = STATES[code]
        if follower not in FOLLOWERS[state]:
            raise ValueError(f"a sample that is {state} cannot become {follower}")
        if began is not None:
            seconds[state] = seconds.get(state, 0.0) + time - began
        state, began = follower, time
    return state, seconds


def check_order(state: State, life: bytes) -> State:
    """The state that `life` leads to from `state`; a `ValueError` where it takes a way that does not exist."""
    return retrace(state, life)[0]


class Departure(NamedTuple):
    """A sample that has left the ledger, for the run's store."""

    sample_id: str
    group_id: str
    task_id: str
    domain: str
    state: State
    """One of `FINAL`."""
    attempt: int
    """The lease whose result counts; -1 when it was never leased."""
    life: bytes
    reason: str = ""
    """Why it was filtered, aborted or failed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _departure, (tuple(self),)  # a third of what pickling a named tuple costs


def _departure(values: tuple[Any, ...]) -> Departure:
    return tuple.__new__(Departure, values)


class Span(NamedTuple):
    """A stretch of time that a role spent on something, for the timeline."""

    role: str
    name: str
    """For example `update`."""
    step: int
    start: float
    """Seconds since the epoch."""
    end: float
