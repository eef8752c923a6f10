"""Writing files so that no reader ever sees half of one: whole files and folders aside and renamed, JSON lines at once. Locks."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import yaml

from drumroll.errors import CheckpointError
from drumroll.record.encoding import to_json

LOCK_WAIT_S = 15.0
"""How long a lock may stay with a process of a run that was killed, which takes its other processes down after it."""


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write a file or folder to.

    When the block ends well, what was written is on disk and takes the place of `path`; otherwise it is removed and `path`
    stays as it was. A folder never replaces one that holds anything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        yield draft
        for part in [*draft.rglob("*"), draft]:
            _sync(part)
        os.replace(draft, path)
        _sync(path.parent)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with aside(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=2) + "\n")


def write_yaml(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True))


class JsonLines:
    """A file that grows by one JSON object a line. Each line is on its way to disk, whole, when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)
        _sync(path.parent)
        if self._file.tell() and not self._ends_well():
            self._file.write(b"\n")  # the line that a killed writer left unfinished stays alone

    def append(self, record: Mapping[str, Any]) -> None:
        self._file.write(to_json(record).encode() + b"\n")

    def size(self) -> int:
        """Bytes so far."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Bring everything so far to disk, where a power cut cannot take it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _ends_well(self) -> bool:
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) == b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without lines that are unfinished; none when there is no file yet."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def truncate_to(path: Path, size: int, superseded: Path) -> None:
    """Cut a JSON-lines file back to its first `size` bytes; what is cut off is appended to `superseded` first.

    A crash in between loses nothing: done again, it may only put the same lines there twice."""
    content = path.read_bytes() if path.exists() else b""
    kept, cut = content[:size], content[size:]
    if len(kept) < size or (kept and not kept.endswith(b"\n")):
        raise CheckpointError(
            f"'{path}' is not the file that the checkpoint saw: it has {len(content)} bytes, and no line ends at byte {size}. "
            f"It was edited or replaced, or the checkpoint is of another run."
        )
    if cut:
        with superseded.open("ab") as file:
            file.write(cut if cut.endswith(b"\n") else cut + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.truncate(path, size)
        _sync(path)


def take_lock(handle: int) -> bool:
    """Take the exclusive lock of an open file or folder; it is given back when the last copy of `handle` is closed.

    Waits up to `LOCK_WAIT_S` for a holder to go, and says whether it did."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
