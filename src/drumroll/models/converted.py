"""Models that were converted on this machine, in the user's cache folder: each once, and whole or not at all.

A folder is named after the contents of the file that it was made from, and holds the checksums of its own files. Whoever wants it waits
for a lock, so that one process converts and the others find the result; a process that is killed leaves the lock free and a draft, which
the next one throws away. A folder that is not as it was written is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drumroll.cache import cache_folder
from drumroll.errors import ModelError

FORMAT = 1
"""Number of the way in which files are converted: folders of another way are not used."""

MANIFEST = "conversion.json"


def converted_folder(source: Path) -> Path:
    """The Hugging Face folder of a GGUF file. Example: `converted_folder(Path("model.gguf"))`."""
    checksum = file_checksum(source)
    folder = cache_folder("models") / f"{source.stem}-{checksum[:16]}-{FORMAT}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f"{folder.name}.lock")):
            if not is_intact(folder):
                _make(source, checksum, folder)
    except OSError as error:
        raise ModelError(
            f"'{source}' could not be converted into '{folder}': {error}. Make room there, or let XDG_CACHE_HOME name another folder."
        ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """Whether a folder holds exactly what was written into it."""
    try:
        checksums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False
    return bool(checksums == _checksums(folder))


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(source: Path, checksum: str, folder: Path) -> None:
    from drumroll.models.gguf import convert_gguf

    draft = folder.with_name(f".{folder.name}.partial")
    for rest in (draft, folder):
        shutil.rmtree(rest, ignore_errors=True)
    convert_gguf(source, draft)
    manifest = {"source": source.name, "source_sha256": checksum, "files": _checksums(draft)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    draft.rename(folder)


def _checksums(folder: Path) -> dict[str, str]:
    return {file.name: file_checksum(file) for file in sorted(folder.iterdir()) if file.name != MANIFEST}


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time, and let go of when it ends in whatever way."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
