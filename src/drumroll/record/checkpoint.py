"""Checkpoints on disk: there whole or not at all, damage noticed, the old ones cleared away.

    <root>/latest.json            {name, number, time}: the newest checkpoint; replaced last
           step-000010/state.json      the controller's state
                       rank0/...       whatever `fill` wrote
                       manifest.json   number, time, score, and size and SHA-256 of every other file

A checkpoint is made in a hidden folder, brought to disk, and renamed into place. `manifest.json` and `latest.json` carry a
checksum of themselves, so that a flipped bit anywhere is noticed. On a filesystem without renames (any fsspec URL) files are
uploaded one by one with the manifest last: a folder without one is no checkpoint. A folder `step-000010~7` is a newer
checkpoint of the same name, whose writer was killed before it removed the older one (or that lies where nothing is renamed).

One process writes a root; `number` counts its checkpoints and says which is newer, whatever the clock did in between.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self
from uuid import uuid4

from drumroll.errors import CheckpointError, DiskNearlyFull
from drumroll.record.files import aside

FORMAT = 1
"""Version of the layout; a checkpoint with a larger one is refused."""

RESERVE_BYTES = 256 * 2**20
"""What a checkpoint leaves free on the disk for the run's other files."""

_MANIFEST, _STATE, _LATEST = "manifest.json", "state.json", "latest.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_DRAFT = re.compile(r"\..+\.[0-9a-f]{8}")
_FLOAT = "$float"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GROWTH = 1.1
"""How much larger than the last checkpoint the next one may be."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every file has been checked."""

    name: str
    path: Path
    """A local folder; of a remote root a copy, which goes when the store is closed."""
    state: dict[str, Any]
    time: float
    """Seconds since the epoch when it was written."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint (or the pointer, `latest.json`) that cannot be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is on disk: what it took."""

    name: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Manifest:
    folder: str
    name: str
    number: int
    time: float
    score: float | None
    pinned: bool
    files: Mapping[str, tuple[int, str]]
    """Path in the folder → size and SHA-256."""

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        values = {name: getattr(self, name) for name in ("name", "number", "time", "score", "pinned")}
        return _seal({"format": FORMAT, **values, "files": {file: list(facts) for file, facts in self.files.items()}})

    @classmethod
    def from_bytes(cls, raw: bytes, folder: str) -> _Manifest:
        values = _unseal(raw, _MANIFEST)
        found = values.pop("format")
        if found > FORMAT:
            raise CheckpointError(f"has format {found}, this drumroll reads up to {FORMAT}: upgrade drumroll to use it")
        if values["name"] != _name_of(folder):
            raise CheckpointError(f"{_MANIFEST} belongs to the checkpoint '{values['name']}'")
        return cls(folder=folder, **{**values, "files": {file: (size, digest) for file, (size, digest) in values["files"].items()}})


class CheckpointStore:
    """The checkpoints of one run, under a local folder or any fsspec URL.

    After each checkpoint these remain: the newest `keep_last`, the `keep_best` with the best score, and all that are pinned.
    Those that `newest_good` found damaged do not count and stay for the user to look at. A root may be read at any time, but
    `newest_good` and `load` are for the process that owns the run: another one may find a folder gone that the owner has just
    cleared away.

    Example: `CheckpointStore(folder / "checkpoints").write("step-000010", lambda out: model.save(out / "trainer"), {"step": 10})`.
    """

    def __init__(self, root: str | Path, *, keep_last: int = 2, keep_best: int = 0, higher_is_better: bool = True) -> None:
        assert keep_last >= 1, f"keep_last: {keep_last}; a checkpoint that is not kept needs not be written"
        assert keep_best >= 0, f"keep_best: {keep_best}"
        self._shelf = _shelf(root)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._sign = 1.0 if higher_is_better else -1.0
        self._damaged: set[str] = set()
        self._expected_bytes: int | None = None
        """Of the next checkpoint; None until one is written."""
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._error: BaseException | None = None

    def write(
        self, name: str, fill: Callable[[Path], None], state: Mapping[str, Any], score: float | None = None, *, pinned: bool = False
    ) -> Saved:
        """Write a checkpoint; when this returns it is on disk and `latest.json` names it.

        `fill` gets an empty local folder and writes the payload into it, on the writer's thread. `state` is kept as JSON: text
        keys, floats exact, NaN and infinities included; tuples come back as lists; anything else is refused. One of the same
        name is replaced when the new one is complete. Raises `DiskNearlyFull` (before or on the way), another `CheckpointError`,
        or what `fill` raised; the checkpoints that were there and the pointer are then as they were. An error of an earlier
        `write_async` is raised first, and nothing is written.
        """
        self.write_async(name, fill, state, score, pinned=pinned)
        saved = self.wait()
        assert saved is not None, "the writer's thread ended with neither a checkpoint nor an error"
        return saved

    def write_async(
        self, name: str, fill: Callable[[Path], None], state: Mapping[str, Any], score: float | None = None, *, pinned: bool = False
    ) -> None:
        """`write` without waiting for it: the state is taken now, and what `fill` writes must not change until it has run.

        At most one is in flight: this waits for the one before. What went wrong with that one is raised here, and the new one
        is then not begun. A name, state or disk that will not do is noticed before this returns.
        """
        self.wait()
        text = self._begin(name, state)

        def work() -> None:
            try:
                self._saved = self._write(name, fill, text, score, pinned)
            except BaseException as error:  # raised again by `wait`
                self._error = error

        self._thread = threading.Thread(target=work, name=f"checkpoint {name}", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether a `write_async` is under way, so that another one would wait."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Saved | None:
        """Wait for what `write_async` began, and raise what went wrong with it. None when nothing was begun since the last call."""
        self._settle()
        self._thread = None
        saved, self._saved = self._saved, None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return saved

    def close(self) -> None:
        """Wait as `wait` does, and remove what was downloaded."""
        try:
            self.wait()
        finally:
            self._shelf.close()

    def names(self) -> list[str]:
        """The checkpoints that are there, oldest first; nothing of them is checked but their manifests."""
        self._settle()
        manifests, _ = self._manifests()
        return list(dict.fromkeys(manifest.name for manifest in manifests))

    def verify(self, name: str) -> None:
        """Raise `CheckpointError`, with every file that is wrong and how, unless each one has the size and content it was written with."""
        self._settle()
        manifest = self._find(name)
        with self._naming(manifest.folder):
            _compare(manifest, lambda file: self._shelf.digest(manifest.folder, file))

    def load(self, name: str) -> Checkpoint:
        """One checkpoint by name, checked."""
        self._settle()
        return self._load(self._find(name))

    def newest_good(self) -> tuple[Checkpoint, list[Skipped]] | None:
        """The newest checkpoint that is not damaged, and what had to be skipped for it; None when there never was any.

        One that is complete counts even when its writer was killed before `latest.json` named it. When there are only damaged
        ones, or the pointer names one that is gone, `CheckpointError` says so: a run never starts anew unasked.
        """
        self._settle()
        manifests, unreadable = self._manifests()
        there = {_name_of(folder) for folder in [*(m.folder for m in manifests), *(s.name for s in unreadable)]}
        skipped = [*self._check_pointer(there), *unreadable]
        for manifest in reversed(manifests):
            try:
                return self._load(manifest), skipped
            except CheckpointError as error:
                self._damaged.add(manifest.folder)
                skipped.append(Skipped(manifest.folder, str(error)))
        if not skipped:
            return None
        reasons = "\n".join(f"  {s.name}: {s.reason}" for s in skipped)
        raise CheckpointError(f"'{self._shelf.root}' holds no checkpoint that can be used:\n{reasons}")

    def _settle(self) -> None:
        """Folders come and go while a checkpoint is written: wait until that is over, well or not."""
        if self._thread is not None:
            self._thread.join()

    def _begin(self, name: str, state: Mapping[str, Any]) -> bytes:
        """What can be refused is refused here, before anything is written; returns the state as JSON."""
        if not _NAME.fullmatch(name) or name == _LATEST:
            raise CheckpointError(f"'{name}' is no name for a checkpoint. Use letters, digits, '_', '-' and '.', a letter or digit first.")
        text = json.dumps(_plain(state, "state"), allow_nan=False).encode() + b"\n"
        with self._explaining(name):
            if self._expected_bytes is None:
                self._shelf.tidy()
                manifests, _ = self._manifests()
                self._expected_bytes = manifests[-1].num_bytes if manifests else len(text)
            free = self._shelf.free_bytes()
        needed = int(self._expected_bytes * _GROWTH) + RESERVE_BYTES
        if free < needed:
            raise DiskNearlyFull(
                f"checkpoint '{name}' was not begun: the disk for '{self._shelf.root}' is nearly full, with {_megabytes(free)} free. A "
                f"checkpoint needs {_megabytes(needed)} (as large as the last one, and a reserve for the run's other files). "
                f"Free some space, or keep fewer checkpoints."
            )
        return text

    def _write(self, name: str, fill: Callable[[Path], None], state: bytes, score: float | None, pinned: bool) -> Saved:
        start = time.monotonic()
        with self._explaining(name):
            manifests, unreadable = self._manifests()
            folders = {m.folder for m in manifests} | {s.name for s in unreadable}
            older = sorted(folder for folder in folders if _name_of(folder) == name)
            if name in self._shelf.listing().keys() - folders:
                raise CheckpointError(
                    f"'{self._shelf.root}' has a folder '{name}' that is no checkpoint. Nothing is overwritten: move it away."
                )
            number = max([m.number for m in manifests] + [self._pointer_number()]) + 1
            folder = f"{name}~{number}" if older else name
            with self._shelf.draft(folder) as draft:
                draft.mkdir(parents=True, exist_ok=True)
                fill(draft)
                (draft / _STATE).write_bytes(state)
                files = {p.relative_to(draft).as_posix(): _digest(p) for p in sorted(draft.rglob("*")) if p.is_file()}
                assert _MANIFEST not in files, f"`fill` wrote a {_MANIFEST}, which is the store's own"
                is_score = score is not None and math.isfinite(score)
                manifest = _Manifest(folder, name, number, time.time(), score if is_score else None, pinned, files)
                (draft / _MANIFEST).write_bytes(manifest.to_bytes())
            try:
                self._shelf.replace(_LATEST, _seal({"name": name, "number": number, "time": manifest.time}))
            except BaseException:
                self._shelf.remove(folder)
                raise
        self._expected_bytes = manifest.num_bytes
        self._clear_away([*older, *self._superfluous([*(m for m in manifests if m.name != name), manifest])])
        if folder != name:
            with self._only_warn(f"'{folder}' could not be renamed to '{name}'"):
                self._shelf.rename(folder, name)
        return Saved(name, manifest.num_bytes, time.monotonic() - start)

    def _superfluous(self, manifests: Sequence[_Manifest]) -> list[str]:
        good = [m for m in manifests if not m.pinned and m.folder not in self._damaged]
        rated = [m for m in good if m.score is not None]
        best = sorted(rated, key=lambda m: (self._sign * (m.score or 0.0), m.number), reverse=True)[: self._keep_best]
        kept = {m.number for m in [*good[-self._keep_last :], *best]}
        return [m.folder for m in good if m.number not in kept]

    def _clear_away(self, folders: Sequence[str]) -> None:
        for folder in folders:
            with self._only_warn(f"the old checkpoint '{folder}' could not be removed"):
                self._shelf.remove(folder)
                self._damaged.discard(folder)

    @contextmanager
    def _explaining(self, name: str) -> Iterator[None]:
        """Say of an error of the disk which checkpoint it has prevented, and whether it is for want of space."""
        try:
            yield
        except Exception as error:
            if _is_disk_full(error):
                raise DiskNearlyFull(
                    f"checkpoint '{name}' could not be written to '{self._shelf.root}' for want of space: {error}. "
                    f"The checkpoints before it are intact. Free some space, or keep fewer."
                ) from error
            if isinstance(error, OSError):
                raise CheckpointError(f"checkpoint '{name}' could not be written to '{self._shelf.root}': {error}.") from error
            raise

    @contextmanager
    def _only_warn(self, what: str) -> Iterator[None]:
        """The new checkpoint is safe by now: what fails in the cleaning up must not fail it."""
        try:
            yield
        except Exception as error:  # every filesystem has exceptions of its own
            warnings.warn(f"{what} in '{self._shelf.root}': {error}.", stacklevel=3)

    def _manifests(self) -> tuple[list[_Manifest], list[Skipped]]:
        """Every checkpoint whose manifest can be trusted, oldest first, and those whose manifest cannot."""
        manifests, unreadable = [], []
        for folder, files in self._shelf.listing().items():
            if _MANIFEST in files or (self._shelf.is_atomic and _STATE in files):
                try:
                    manifests.append(self._manifest(folder))
                except CheckpointError as error:
                    unreadable.append(Skipped(folder, str(error)))
        return sorted(manifests, key=lambda manifest: manifest.number), unreadable

    def _manifest(self, folder: str) -> _Manifest:
        with self._naming(folder):
            try:
                raw = self._shelf.read(f"{folder}/{_MANIFEST}")
            except FileNotFoundError:
                raise CheckpointError(f"{_MANIFEST} is missing") from None
            return _Manifest.from_bytes(raw, folder)

    def _find(self, name: str) -> _Manifest:
        manifests, unreadable = self._manifests()
        if found := [manifest for manifest in manifests if manifest.name == name]:
            return found[-1]
        for skipped in unreadable:
            if _name_of(skipped.name) == name:
                raise CheckpointError(skipped.reason)
        known = ", ".join(dict.fromkeys(manifest.name for manifest in manifests)) or "none"
        raise CheckpointError(f"no checkpoint '{name}' in '{self._shelf.root}'. There are: {known}.")

    def _load(self, manifest: _Manifest) -> Checkpoint:
        with self._naming(manifest.folder):
            path = self._shelf.fetch(manifest.folder)
            _compare(manifest, lambda file: _digest(path / file))
            state = json.loads((path / _STATE).read_bytes(), object_hook=_revive)
        return Checkpoint(manifest.name, path, state, manifest.time)

    def _check_pointer(self, names: set[str]) -> list[Skipped]:
        try:
            raw = self._shelf.read(_LATEST)
        except FileNotFoundError:
            return []
        try:
            name = _unseal(raw, _LATEST)["name"]
        except CheckpointError as error:
            return [Skipped(_LATEST, f"{error}; the folders tell which is the newest")]
        return [] if name in names else [Skipped(name, f"is gone, but {_LATEST} names it as the newest")]

    def _pointer_number(self) -> int:
        with suppress(FileNotFoundError, CheckpointError):
            return int(_unseal(self._shelf.read(_LATEST), _LATEST)["number"])
        return 0

    @contextmanager
    def _naming(self, folder: str) -> Iterator[None]:
        """Say of which checkpoint an error is; one of the disk makes it as unusable as a wrong byte."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint '{folder}' in '{self._shelf.root}' is damaged: {error}") from error
        except OSError as error:
            raise CheckpointError(f"checkpoint '{folder}' in '{self._shelf.root}' cannot be read: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Shelf(Protocol):
    """Where folders are kept. All names are relative to `root`."""

    root: str
    is_atomic: ClassVar[bool]
    """Whether a folder appears whole; where it does not, one without a manifest is half an upload."""

    def listing(self) -> dict[str, set[str]]:
        """Folders and what lies in each, drafts left out."""

    def read(self, file: str) -> bytes: ...

    def digest(self, folder: str, file: str) -> tuple[int, str]: ...

    def fetch(self, folder: str) -> Path:
        """The folder as a local one."""

    def draft(self, folder: str) -> AbstractContextManager[Path]:
        """A local folder to fill, which becomes `folder` when the block ends well and nothing when it does not."""

    def replace(self, file: str, content: bytes) -> None: ...

    def rename(self, folder: str, name: str) -> None:
        """Where that is possible at once; otherwise nothing happens."""

    def remove(self, folder: str) -> None:
        """So that what is left after a crash is not taken for a checkpoint."""

    def tidy(self) -> None:
        """Remove what a killed writer left."""

    def free_bytes(self) -> int:
        """Space for drafts."""

    def close(self) -> None: ...


class _LocalShelf:
    is_atomic: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._path = root.expanduser().absolute()

    def listing(self) -> dict[str, set[str]]:
        folders = {}
        with suppress(FileNotFoundError):
            for entry in sorted(self._path.iterdir()):
                with suppress(FileNotFoundError, NotADirectoryError):
                    if not entry.name.startswith("."):
                        folders[entry.name] = set(os.listdir(entry))
        return folders

    def read(self, file: str) -> bytes:
        return (self._path / file).read_bytes()

    def digest(self, folder: str, file: str) -> tuple[int, str]:
        return _digest(self._path / folder / file)

    def fetch(self, folder: str) -> Path:
        return self._path / folder

    def draft(self, folder: str) -> AbstractContextManager[Path]:
        return aside(self._path / folder)

    def replace(self, file: str, content: bytes) -> None:
        with aside(self._path / file) as draft:
            draft.write_bytes(content)

    def rename(self, folder: str, name: str) -> None:
        os.rename(self._path / folder, self._path / name)

    def remove(self, folder: str) -> None:
        doomed = self._path / f".{folder}.{uuid4().hex[:8]}"
        os.rename(self._path / folder, doomed)
        shutil.rmtree(doomed)

    def tidy(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for entry in self._path.iterdir():
            if _DRAFT.fullmatch(entry.name):
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._path).free

    def close(self) -> None:
        pass


class _RemoteShelf:
    is_atomic: ClassVar[bool] = False

    def __init__(self, url: str) -> None:
        self.root = url
        try:
            self._fs, self._path = importlib.import_module("fsspec").core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"'{url}' is no place for checkpoints: {error}. Give a folder, or a URL that fsspec can open.") from error
        self._local = tempfile.TemporaryDirectory(prefix="drumroll-checkpoint-")

    def listing(self) -> dict[str, set[str]]:
        """Empty folders, which only some filesystems have, count for nothing."""
        self._fs.invalidate_cache()
        folders: dict[str, set[str]] = {}
        with suppress(FileNotFoundError):
            for path in self._fs.find(self._path):
                folder, *inside = PurePosixPath(path).relative_to(self._path).parts
                if inside:
                    folders.setdefault(folder, set()).add(inside[0])
        return folders

    def read(self, file: str) -> bytes:
        content: bytes = self._fs.cat_file(f"{self._path}/{file}")
        return content

    def digest(self, folder: str, file: str) -> tuple[int, str]:
        path = f"{self._path}/{folder}/{file}"
        with self._fs.open(path, "rb") as content:
            return int(self._fs.size(path)), hashlib.file_digest(content, "sha256").hexdigest()

    def fetch(self, folder: str) -> Path:
        copy = Path(tempfile.mkdtemp(dir=self._local.name)) / folder
        for path in self._fs.find(f"{self._path}/{folder}"):
            file = copy / PurePosixPath(path).relative_to(PurePosixPath(self._path) / folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(path, str(file))
        return copy

    @contextmanager
    def draft(self, folder: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._local.name) as draft:
            yield Path(draft)
            try:
                self._upload(Path(draft), folder)
            except Exception as error:  # every filesystem has exceptions of its own
                with suppress(Exception):
                    self.remove(folder)
                raise CheckpointError(f"checkpoint '{folder}' could not be uploaded to '{self.root}': {error}") from error

    def replace(self, file: str, content: bytes) -> None:
        self._fs.pipe_file(f"{self._path}/{file}", content)

    def rename(self, folder: str, name: str) -> None:
        pass

    def remove(self, folder: str) -> None:
        """The manifest first and the state last: what a crash leaves is known for half a checkpoint."""
        path = f"{self._path}/{folder}"
        files = {file: _last(file) for file in self._fs.find(path)}
        for file in sorted(files, key=lambda file: (files[file] == _STATE) - (files[file] == _MANIFEST)):
            self._fs.rm_file(file)
        with suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    def tidy(self) -> None:
        for folder, files in self.listing().items():
            if _STATE in files and _MANIFEST not in files:
                self.remove(folder)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._local.name).free

    def close(self) -> None:
        self._local.cleanup()

    def _upload(self, draft: Path, folder: str) -> None:
        """The state first, so that half an upload is known for what it is; the manifest last."""
        files = [path.relative_to(draft).as_posix() for path in sorted(draft.rglob("*")) if path.is_file()]
        for file in sorted(files, key=lambda file: (file == _MANIFEST) - (file == _STATE)):
            remote = f"{self._path}/{folder}/{file}"
            self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(draft / file), remote)


def _shelf(root: str | Path) -> _Shelf:
    if isinstance(root, Path) or "://" not in root:
        return _LocalShelf(Path(root))
    if root.startswith(("file://", "local://")):
        return _LocalShelf(Path(root.partition("://")[2]))
    return _RemoteShelf(root)


def _name_of(folder: str) -> str:
    return folder.partition("~")[0]


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as content:
        return os.fstat(content.fileno()).st_size, hashlib.file_digest(content, "sha256").hexdigest()


def _compare(manifest: _Manifest, digest: Callable[[str], tuple[int, str]]) -> None:
    wrong = []
    for file, (size, content) in manifest.files.items():
        try:
            found_size, found = digest(file)
        except (FileNotFoundError, NotADirectoryError):
            wrong.append(f"{file} is missing")
            continue
        if found_size != size:
            wrong.append(f"{file} has {found_size} bytes and was written with {size}")
        elif found != content:
            wrong.append(f"{file} has the right size, but its content is not what was written")
    if wrong:
        raise CheckpointError("; ".join(wrong))


def _seal(values: Mapping[str, Any]) -> bytes:
    """JSON that holds a checksum of itself."""
    digest = hashlib.sha256(json.dumps(values, allow_nan=False).encode()).hexdigest()
    return json.dumps({**values, "sha256": digest}, allow_nan=False, indent=1).encode() + b"\n"


def _unseal(raw: bytes, file: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(raw)
        del values["sha256"]
        if raw == _seal(values):
            return values
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise CheckpointError(f"{file} is not as it was written ({len(raw)} bytes)")


def _plain(value: Any, where: str) -> Any:
    """A value as JSON can hold it exactly; one that it cannot is refused, with its place."""
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
        case Mapping():
            for key in value:
                if not isinstance(key, str) or key == _FLOAT:
                    raise CheckpointError(f"{where}: the key {key!r} cannot be kept in a checkpoint's state, which is JSON. Use text.")
            return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case _:
            raise CheckpointError(
                f"{where}: a {type(value).__name__} cannot be kept in a checkpoint's state, which is JSON. "
                f"Turn it into numbers, text, lists and mappings, or write it to a file of its own."
            )


def _revive(values: dict[str, Any]) -> Any:
    return float(values[_FLOAT]) if values.keys() == {_FLOAT} else values


def _is_disk_full(error: BaseException | None) -> bool:
    """Also where a library or another process turned the error into text."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    return any(os.strerror(code) in str(error) for code in _DISK_FULL) or _is_disk_full(error.__cause__ or error.__context__)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
