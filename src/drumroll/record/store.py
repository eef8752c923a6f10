"""The trajectory store: one SQLite row per sample that has left the ledger, and payloads in append-only segment files.

    recorder process                      any other process, at any time
      Writer.add ──► segment-000000.seg ◄── Reader.load(sample_id)
             └─────► index.sqlite (WAL) ◄── Reader.query(Filter(...))

A batch's payloads are on disk before the transaction that names them commits, so a row that can be seen can be loaded.
A record is its length and CRC-32 (little-endian, 4 bytes each) and then the payload of `record.encoding`: a tail that a
crash tore off is recognised. Every batch begins with an empty record, which is the place of its samples without payload: those
whose worker was lost, or that were never leased. Readers take no lock that the writer waits for.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from drumroll.errors import RunFolderError, UserError
from drumroll.life import Departure, Span
from drumroll.record.encoding import decode_trajectory, encode_trajectory, to_json
from drumroll.record.files import take_lock
from drumroll.types import Trajectory

SCHEMA = 3
"""Version of the tables and the record layout; a store with a larger one is refused. 2 added `superseded`; 3 added the samples'
lives, those that were not consumed, and the spans of roles."""

SEGMENT_BYTES = 64 * 2**20
"""A segment that has grown past this is followed by a new one."""

_HEADER = struct.Struct("<II")
_INDEX = "index.sqlite"
_REPLY_CHARACTERS = 200
_TABLES = """
CREATE TABLE samples (
    sample_id TEXT PRIMARY KEY, phase TEXT NOT NULL, step INTEGER NOT NULL, group_id TEXT NOT NULL, task_id TEXT NOT NULL,
    domain TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, attempt INTEGER NOT NULL, life BLOB NOT NULL, reward REAL,
    success INTEGER, stop_reason TEXT NOT NULL, num_prompt_tokens INTEGER NOT NULL, num_new_tokens INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL, temperature REAL, seed INTEGER, reward_parts TEXT NOT NULL, metrics TEXT NOT NULL,
    error TEXT NOT NULL, reply TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    time REAL NOT NULL, superseded INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX samples_by_step ON samples (phase, step);
CREATE TABLE spans (role TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, start REAL NOT NULL, "end" REAL NOT NULL);
"""
_LATER_COLUMNS = {"superseded": (2, "0"), "state": (3, "'consumed'"), "reason": (3, "''"), "attempt": (3, "0"), "life": (3, "x''")}
"""The schema that brought a column, and the column's value in stores of earlier ones."""
_MARK_BITS = 40
"""A mark is a segment's number and, in this many lower bits, a place in it."""

Order = Literal["newest", "oldest", "best", "worst", "longest"]

_ORDERS: dict[Order, str] = {
    "newest": "rowid DESC",
    "oldest": "rowid",
    "best": "reward IS NULL, reward DESC, rowid",
    "worst": "reward IS NULL, reward, rowid",
    "longest": "num_new_tokens DESC, rowid",
}


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What the index knows of a sample. The fields are the table's columns."""

    sample_id: str
    phase: str
    """`train`, `eval`, or what else the run called it."""
    step: int
    group_id: str
    task_id: str
    domain: str
    state: str
    """How its life ended: consumed, filtered, aborted or failed."""
    reason: str
    """Why it was not consumed."""
    attempt: int
    """The lease whose result counts; -1 when it was never leased."""
    life: bytes
    """Its stamps (see `drumroll.life`)."""
    reward: float | None
    success: bool | None
    stop_reason: str
    num_prompt_tokens: int
    """0 without payload, as `num_new_tokens`."""
    num_new_tokens: int
    oldest_version: int
    temperature: float | None
    """None without payload, as `seed`."""
    seed: int | None
    reward_parts: Mapping[str, float]
    metrics: Mapping[str, float]
    error: str
    reply: str
    """Beginning of the policy's last turn."""
    segment: int
    offset: int
    length: int
    """Of its payload; 0 when it has none."""
    time: float
    """Seconds since the epoch when it was written."""
    superseded: bool = False
    """Whether the run was taken back to before this sample, which a later one with its name has not replaced."""

    @property
    def has_payload(self) -> bool:
        """Whether the store holds its text and tokens."""
        return self.length > 0


class SampleLife(NamedTuple):
    """What a timeline needs of a sample."""

    sample_id: str
    task_id: str
    state: str
    reward: float | None
    life: bytes


_COLUMNS = tuple(f.name for f in fields(SampleRow))
_UPSERT = (
    f"INSERT INTO samples ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    f"ON CONFLICT (sample_id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _COLUMNS[1:])}"
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of numbers, ends included unless they are open."""

    low: float = -math.inf
    high: float = math.inf
    low_is_open: bool = False
    high_is_open: bool = False

    @classmethod
    def at(cls, value: float) -> Bounds:
        return cls(value, value)

    @classmethod
    def parse(cls, text: str) -> Bounds:
        """`0.5`, `>=0.5`, `>0.5`, `<=0.5`, `<0.5`, or `0.2..0.8`."""
        number = r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
        if match := re.fullmatch(rf"(>=|<=|>|<|==?|){number}", text.strip()):
            sign, value = match[1], float(match[2])
            if sign.startswith(">"):
                return cls(low=value, low_is_open=sign == ">")
            if sign.startswith("<"):
                return cls(high=value, high_is_open=sign == "<")
            return cls.at(value)
        if match := re.fullmatch(rf"{number}\.\.{number}", text):
            return cls(float(match[1]), float(match[2]))
        raise UserError(f"'{text}' is no range of numbers. Write 0.5, >=0.5, >0.5, <=0.5, <0.5 or 0.2..0.8.")

    def conditions(self, column: str) -> Iterator[tuple[str, float]]:
        if self.low > -math.inf:
            yield f"{column} {'>' if self.low_is_open else '>='} ?", self.low
        if self.high < math.inf:
            yield f"{column} {'<' if self.high_is_open else '<='} ?", self.high


@dataclass(frozen=True, slots=True)
class Filter:
    """Which samples a query wants; what is None does not matter. Superseded ones are wanted only when asked for."""

    phase: str | None = None
    step: Bounds | None = None
    reward: Bounds | None = None
    domain: str | None = None
    state: str | None = None
    stop_reason: str | None = None
    success: bool | None = None
    task_id: str | None = None
    group_id: str | None = None
    superseded: bool | None = False

    def where(self) -> tuple[str, list[Any]]:
        """An SQL condition and its parameters."""
        conditions: list[tuple[str, Any]] = []
        for f in fields(self):
            match getattr(self, f.name):
                case None:
                    pass
                case Bounds() as bounds:
                    conditions += bounds.conditions(f.name)
                case value:
                    conditions.append((f"{f.name} = ?", _text(value) if isinstance(value, str) else value))
        return " AND ".join(text for text, _ in conditions) or "TRUE", [value for _, value in conditions]


class Writer:
    """Writes the store, a new one or one that is there. One at a time: a second one on the same folder is refused."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            if not take_lock(self._lock):
                raise RunFolderError(f"'{folder}' is being written by another process. A store has one writer; readers may be many.")
            self._db = sqlite3.connect(folder / _INDEX, timeout=30.0)
            self._prepare()
        except BaseException:
            os.close(self._lock)
            raise
        # A segment is never appended to after a restart, so that whatever a crash left at its end stays behind.
        self._number = max((int(path.stem.removeprefix("segment-")) for path in folder.glob("segment-*.seg")), default=-1)
        self._open_next_segment()

    def add(self, phase: str, step: int, departures: Sequence[Departure], trajectories: Iterable[Trajectory] = ()) -> None:
        """Write a row for each departure, in one transaction; samples that are there already are replaced.

        The trajectory of the attempt that counts gives a row its payload and figures. Others are ignored: they are attempts that
        were given up, or of samples that have not left yet."""
        if not departures:
            return
        results = {(trajectory.sample_id, trajectory.attempt): trajectory for trajectory in trajectories}
        start = self._segment.tell()
        now = time.time()
        records = [_record(b"")]
        empty = (self._number, start, 0, now, 0)
        offset = start + len(records[0])
        rows = []
        for departure in departures:
            trajectory = results.get((departure.sample_id, departure.attempt)) if results else None
            if trajectory is None:
                rows.append(_row(phase, step, departure) + _no_figures(departure) + empty)
                continue
            records.append(_record(encode_trajectory(trajectory)))
            place = (self._number, offset, len(records[-1]) - _HEADER.size, now, 0)
            rows.append(_row(phase, step, departure) + _figures(trajectory) + place)
            offset += len(records[-1])
        try:
            self._segment.write(b"".join(records))
            self._segment.flush()
            os.fsync(self._segment.fileno())
            with self._db:
                self._db.executemany(_UPSERT, rows)
        except BaseException:
            self._abandon(start)
            raise
        if offset >= self._segment_bytes:
            self._segment.close()
            self._open_next_segment()

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Write what roles did, and when. Going back to a checkpoint leaves it as it is: the time was spent."""
        with self._db:
            self._db.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?)", spans)

    def mark(self) -> int:
        """The place that the store has grown to, for `supersede`; everything before it is safe on disk."""
        os.fsync(self._lock)  # the handle is the folder's: the names of its segments
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return self._number << _MARK_BITS | self._segment.tell()

    def supersede(self, mark: int) -> int:
        """Mark what was written since `mark` as superseded: the run goes on from a checkpoint of then. Returns how many.

        A sample that is written again under its name replaces the superseded one. One that was there before the mark and was
        written again after it is superseded as well: its first record is gone, and the run that goes on makes it anew."""
        with self._db:
            sql = f"UPDATE samples SET superseded = 1 WHERE (segment << {_MARK_BITS} | offset) >= ? AND NOT superseded"
            return self._db.execute(sql, [mark]).rowcount

    def close(self) -> None:
        """End writing, and leave one plain database file that can be read from anywhere, read-only folders included."""
        self._segment.close()
        with closing(self._db), suppress(sqlite3.OperationalError):  # a reader that is still there keeps the log in use
            self._db.execute("PRAGMA busy_timeout = 0")
            self._db.execute("PRAGMA journal_mode = DELETE")
        os.close(self._lock)

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        found = _schema_version(self._db, self._folder)
        if found < SCHEMA:
            change = _upgrade(found) if found else _TABLES
            self._db.executescript(f"BEGIN; {change} PRAGMA user_version = {SCHEMA}; COMMIT;")

    def _open_next_segment(self) -> None:
        self._number += 1
        self._segment = _segment_file(self._folder, self._number).open("xb")

    def _abandon(self, start: int) -> None:
        """Forget a batch that could not be written; the next one goes to a new segment."""
        with suppress(OSError):
            self._segment.close()
        with suppress(OSError):
            os.truncate(_segment_file(self._folder, self._number), start)
        self._open_next_segment()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Reader:
    """Reads a store, also one that is being written: each call sees everything committed before it."""

    def __init__(self, folder: Path) -> None:
        index = folder / _INDEX
        if not index.is_file():
            raise RunFolderError(f"'{folder}' has no trajectories yet: there is no {_INDEX} in it.")
        self._folder = folder
        self._db = sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
        with self._close_on_error():
            found = _schema_version(self._db, folder)
            if found == 0:
                raise RunFolderError(f"'{folder}' has no trajectories yet: its writer has only just started.")
            if found < SCHEMA:
                self._db.execute(f"CREATE TEMP VIEW samples AS {_as_of_now(found, 'main.samples')}")
                self._db.execute('CREATE TEMP TABLE spans (role, name, step, start, "end")')

    def query(self, where: Filter = Filter(), order: Order = "oldest", limit: int | None = None) -> list[SampleRow]:  # noqa: B008 - frozen
        """The samples that a filter lets through."""
        condition, values = where.where()
        sql = f"SELECT {', '.join(_COLUMNS)} FROM samples WHERE {condition} ORDER BY {_ORDERS[order]} LIMIT ?"
        return [_from_columns(columns) for columns in self._db.execute(sql, [*values, -1 if limit is None else limit]).fetchall()]

    def count(self, where: Filter = Filter()) -> int:  # noqa: B008 - frozen
        condition, values = where.where()
        (number,) = self._db.execute(f"SELECT COUNT(*) FROM samples WHERE {condition}", values).fetchone()
        return int(number)

    def row(self, sample_id: str) -> SampleRow:
        """One sample's row, or an error that names samples like it."""
        sql = f"SELECT {', '.join(_COLUMNS)} FROM samples WHERE sample_id = ?"
        columns = self._db.execute(sql, [_text(sample_id)]).fetchone()
        if columns is None:
            like = self._db.execute("SELECT sample_id FROM samples WHERE instr(sample_id, ?) LIMIT 3", [_text(sample_id)]).fetchall()
            hint = f" Samples with that in their name: {', '.join(name for (name,) in like)}." if like else ""
            raise RunFolderError(f"no sample '{sample_id}' in '{self._folder}'.{hint} `drumroll show RUN` lists them.")
        return _from_columns(columns)

    def lives(self) -> Iterator[SampleLife]:
        """Every sample's life, superseded ones included, in the order in which they left. One at a time is in memory."""
        sql = f"SELECT {', '.join(SampleLife._fields)} FROM samples ORDER BY rowid"
        return map(SampleLife._make, self._db.execute(sql))

    def spans(self) -> list[Span]:
        """What roles did, in the order in which it began."""
        return [Span(*columns) for columns in self._db.execute("SELECT * FROM spans ORDER BY start, rowid").fetchall()]

    def load(self, sample_id: str) -> Trajectory:
        """The whole trajectory, exactly as it was recorded, with the whole life of its sample."""
        row = self.row(sample_id)
        if not row.has_payload:
            raise RunFolderError(f"'{sample_id}' has no text and tokens: {why_no_payload(row)}. `drumroll show RUN SAMPLE` shows its life.")
        path = _segment_file(self._folder, row.segment)
        try:
            with path.open("rb") as file:
                file.seek(row.offset)
                record = file.read(_HEADER.size + row.length)
        except OSError as error:
            raise RunFolderError(f"'{path}', which holds the tokens of '{sample_id}', cannot be read: {error.strerror}.") from error
        payload = record[_HEADER.size :]
        if len(payload) != row.length or _HEADER.unpack(record[: _HEADER.size]) != (row.length, zlib.crc32(payload)):
            raise RunFolderError(
                f"'{path}': the record of '{sample_id}' at byte {row.offset} is torn or damaged "
                f"({len(payload)} of {row.length} bytes are there). Its figures are still in the index; its text and tokens are lost."
            )
        return replace(decode_trajectory(payload), life=row.life)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _segment_file(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:06d}.seg"


def _schema_version(db: sqlite3.Connection, folder: Path) -> int:
    """The store's schema version, 0 when it has no tables yet. One that this code does not know is an error."""
    try:
        (found,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise RunFolderError(f"'{folder / _INDEX}' is no trajectory index: {error}.") from error
    if found > SCHEMA:
        raise RunFolderError(
            f"'{folder}' was written by a newer drumroll: store schema {found}, this one knows up to {SCHEMA}. Upgrade drumroll to read it."
        )
    return int(found)


def _as_of_now(found: int, table: str) -> str:
    """A query that gives a table of an earlier schema the columns of this one."""
    columns = []
    for name in _COLUMNS:
        since, value = _LATER_COLUMNS.get(name, (1, ""))
        columns.append(name if since <= found else f"{value} AS {name}")
    return f"SELECT rowid, {', '.join(columns)} FROM {table}"


def _upgrade(found: int) -> str:
    """What makes a store of an earlier schema one of this."""
    return (
        f"ALTER TABLE samples RENAME TO earlier; DROP INDEX samples_by_step; {_TABLES} "
        f"INSERT INTO samples (rowid, {', '.join(_COLUMNS)}) {_as_of_now(found, 'earlier')}; DROP TABLE earlier;"
    )


def why_no_payload(row: SampleRow) -> str:
    """Why a sample has no text and tokens, for a message."""
    reason = f" ({row.reason})" if row.reason else ""
    if row.attempt < 0:
        return f"it was {row.state}{reason} before any worker had it"
    return f"it was {row.state}{reason}, and nothing came back of attempt {row.attempt}"


def _record(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def _row(phase: str, step: int, departure: Departure) -> tuple[Any, ...]:
    """The first columns, up to `life`. They and those of the figures are made by the million: hence plain tuples."""
    sample_id, group_id, task_id, domain, state, attempt, life, reason = departure
    return _text(sample_id), phase, step, _text(group_id), _text(task_id), _text(domain), state, _text(reason), attempt, life


def _figures(trajectory: Trajectory) -> tuple[Any, ...]:
    """The columns from `reward` to `reply`."""
    num_new_tokens = trajectory.num_new_tokens
    return (
        None if trajectory.reward is None else float(trajectory.reward),
        None if trajectory.success is None else bool(trajectory.success),
        trajectory.stop_reason,
        len(trajectory.token_ids) - num_new_tokens,
        num_new_tokens,
        int(trajectory.token_version[trajectory.loss_mask].min()) if num_new_tokens else -1,
        float(trajectory.sampling.temperature),
        int(trajectory.seed),
        to_json(trajectory.reward_parts) if trajectory.reward_parts else "{}",
        to_json(trajectory.metrics) if trajectory.metrics else "{}",
        _text(trajectory.error),
        _text(trajectory.last_reply[:_REPLY_CHARACTERS]),
    )


_ABORTED, _FAILED = ((None, None, reason, 0, 0, -1, None, None, "{}", "{}", "", "") for reason in ("aborted", "failed"))


def _no_figures(departure: Departure) -> tuple[Any, ...]:
    """The columns from `reward` to `reply`, of a sample without a trajectory."""
    return _ABORTED if departure.state == "aborted" else _FAILED


def _text(text: str) -> str:
    """Without the lone surrogates that UTF-8 lacks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _from_columns(columns: tuple[Any, ...]) -> SampleRow:
    values = dict(zip(_COLUMNS, columns, strict=True))
    values["success"] = None if values["success"] is None else bool(values["success"])
    values["superseded"] = bool(values["superseded"])
    for name in ("reward_parts", "metrics"):
        values[name] = {key: float(value) for key, value in json.loads(values[name]).items()}
    return SampleRow(**values)
