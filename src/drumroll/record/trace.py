"""A run's timeline as a trace that Perfetto and chrome://tracing open.

    store ──► intervals of all lives ──► scratch database, which sorts them on disk ──► rows that do not overlap ──► JSON

Every interval becomes one event, in a process by where it was spent and a thread by what it occupied there:

    controller            spans of the run's roles, a row per role
    scheduler             admitted, leased, waiting, done
    engine N              generating, a row per slot
    environment worker N  environment
    rewards of worker N   reward

What overlaps is laid out on as few further rows as it needs. A few samples are in memory at a time, however many there are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from heapq import heappop, heappush
from itertools import chain, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TextIO

from drumroll.errors import RunFolderError
from drumroll.life import STATES, Span, State, unpack_life
from drumroll.record.encoding import to_json
from drumroll.record.files import aside
from drumroll.record.folder import RunFolder
from drumroll.record.store import Reader, SampleLife

_KINDS = ("scheduler", "engine", "environment worker", "rewards of worker")
_KIND_OF: dict[State, int] = {"generating": 1, "environment": 2, "reward": 3}
"""By the state; all others are the scheduler's."""
_SCHEDULER, _ENGINE = 0, 1
_SCRATCH = """
PRAGMA journal_mode = OFF;
CREATE TABLE samples (number INTEGER PRIMARY KEY, args TEXT);
CREATE TABLE intervals (
    kind INTEGER, place INTEGER, track INTEGER, start INTEGER, "end" INTEGER,
    sample INTEGER, state INTEGER, attempt INTEGER, version INTEGER
);
"""
_SORT = 'CREATE INDEX in_order ON intervals (kind, place, track, start, "end", sample, state, attempt, version)'
_SORTED = """
SELECT kind, place, track, start, "end", state, attempt, version, args FROM intervals CROSS JOIN samples ON number = sample
ORDER BY kind, place, track, start, "end", sample
"""


class _Event(NamedTuple):
    process: str
    track: str
    """What it occupies there, for example `slot 3`."""
    start: int
    """Microseconds since the epoch."""
    end: int
    name: str
    """As JSON, as `args`."""
    args: str


def write_trace(folder: RunFolder, out: Path) -> int:
    """Write the timeline of all samples that have left the ledger, and of the run's roles, to a new file in Chrome's trace event
    format. Returns the number of events.

    Example: `write_trace(RunFolder.open("runs/quickstart"), Path("trace.json"))`."""
    if out.exists():
        raise RunFolderError(f"'{out}' exists already, and nothing is overwritten. Choose another name.")
    with Reader(folder.store) as reader, closing(sqlite3.connect("")) as scratch:  # without a name: a file that goes when it is closed
        scratch.executescript(_SCRATCH)
        _collect(reader.lives(), scratch)
        spans = reader.spans()
        (earliest,) = scratch.execute("SELECT MIN(start) FROM intervals").fetchone()
        starts = [event.start for event in _span_events(spans)] + ([] if earliest is None else [earliest])
        if not starts:
            raise RunFolderError(
                f"'{folder.root}' has nothing to draw: no sample has left the scheduler yet, or the run was recorded by a drumroll "
                f"that kept no lives."
            )
        with aside(out) as draft, draft.open("w", encoding="ascii") as file:
            return _write(file, chain(_span_events(spans), _life_events(scratch)), min(starts))


def _collect(lives: Iterable[SampleLife], scratch: sqlite3.Connection) -> None:
    """Put every interval of every life into the scratch database, and sort it."""
    for number, sample in enumerate(lives):
        if not sample.life:
            continue
        args = {"sample": sample.sample_id, "task": sample.task_id, "ended": sample.state, "reward": sample.reward}
        scratch.execute("INSERT INTO samples VALUES (?, ?)", (number, to_json(args)))
        scratch.executemany("INSERT INTO intervals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", _intervals(number, sample.life))
    scratch.execute(_SORT)


def _intervals(number: int, life: bytes) -> Iterator[tuple[int, ...]]:
    """A stamp's state lasts until the next stamp. The last one has no end, and no interval."""
    attempt = -1
    for stamp, following in pairwise(unpack_life(life)):
        attempt += stamp.state == "leased"
        state = STATES.index(stamp.state)
        kind = _KIND_OF.get(stamp.state, _SCHEDULER)
        place = -1 if kind == _SCHEDULER else stamp.place
        track = state if kind == _SCHEDULER else stamp.slot if kind == _ENGINE else 0
        yield kind, place, track, *_microseconds(stamp.time, following.time), number, state, max(0, attempt), stamp.version


def _microseconds(start: float, end: float) -> tuple[int, int]:
    """From seconds. Clocks are set, and those of two machines differ: nothing ends before it begins."""
    return round(start * 1e6), round(max(start, end) * 1e6)


def _span_events(spans: Sequence[Span]) -> Iterator[_Event]:
    for role, name, step, start, end in sorted(spans, key=lambda span: (span.role, span.start, span.end)):
        yield _Event("controller", role, *_microseconds(start, end), to_json(name), to_json({"step": step}))


def _life_events(scratch: sqlite3.Connection) -> Iterator[_Event]:
    for kind, place, track, start, end, state, attempt, version, args in scratch.execute(_SORTED):
        process = _KINDS[kind] if kind == _SCHEDULER else f"{_KINDS[kind]} {place}"
        name = STATES[state]
        row = f"slot {track}" if kind == _ENGINE and track >= 0 else name
        yield _Event(process, row, start, end, f'"{name}"', f'{args[:-1]}, "attempt": {attempt}, "version": {version}}}')


def _write(file: TextIO, events: Iterable[_Event], first: int) -> int:
    """Write events that come sorted by process, row and time; returns how many. Times are relative to `first`."""
    number = tid = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for pid, (process, of_process) in enumerate(groupby(events, attrgetter("process")), start=1):
        file.write((",\n" if number else "") + _named("process", process, pid, 0))
        for track, of_track in groupby(of_process, attrgetter("track")):
            lanes = _Lanes()
            tids: list[int] = []
            for event in of_track:
                lane = lanes.take(event.start, event.end)
                if lane == len(tids):
                    tid += 1
                    tids.append(tid)
                    file.write(",\n" + _named("thread", f"{track} ({lane + 1})" if lane else track, pid, tid))
                number += 1
                file.write(
                    f',\n{{"ph": "X", "name": {event.name}, "pid": {pid}, "tid": {tids[lane]}, '
                    f'"ts": {event.start - first}, "dur": {event.end - event.start}, "args": {event.args}}}'
                )
    file.write("\n]}\n")
    return number


def _named(what: str, name: str, pid: int, tid: int) -> str:
    """Metadata that names a process or a thread and keeps it in its order."""
    place = {"ph": "M", "pid": pid, "tid": tid}
    names = to_json({**place, "name": f"{what}_name", "args": {"name": name}})
    order = to_json({**place, "name": f"{what}_sort_index", "args": {"sort_index": pid if what == "process" else tid}})
    return f"{names},\n{order}"


class _Lanes:
    """Lays intervals, given in the order of their starts, out on as few lanes as they need, the first free one each."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []
        """Heap of (end, lane)."""
        self._free: list[int] = []
        """Heap."""

    def take(self, start: int, end: int) -> int:
        while self._busy and self._busy[0][0] <= start:
            heappush(self._free, heappop(self._busy)[1])
        lane = heappop(self._free) if self._free else len(self._busy)
        heappush(self._busy, (end, lane))
        return lane
