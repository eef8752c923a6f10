"""Rows of a dataset file or folder, whatever its format, as plain Python values.

JSON lines, JSON lists and Parquet files are read here; folders (a `save_to_disk` one, or one of data files with splits)
by the `datasets` library, which is imported only then.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumroll.config.models import SourceConfig
from drumroll.errors import DataError
from drumroll.hub import looks_like_path, nearest_sibling, refuse_revision, resolve_folder
from drumroll.registry import nearest

Row = dict[str, Any]
Located = tuple[str, Row]
"""Where a row stands, for error messages ("line 7"), and the row."""


def read_rows(source: SourceConfig) -> list[Located]:
    """At most `source.limit` rows; an empty dataset is an error."""
    if source.seeds is not None:
        return [(f"seed {seed}", {"seed": seed}) for seed in itertools.islice(source.seed_numbers, source.limit)]
    path = Path(source.path).expanduser()
    if path.is_file():
        refuse_revision(source.path, source.revision, DataError)
        if source.split is not None:
            raise DataError(f"'{source.path}' is one file, so it has no split '{source.split}'. Remove `split`, or give the folder.")
        located = _file_rows(path)
    elif not path.exists() and looks_like_path(source.path):
        raise DataError(f"'{source.path}' does not exist.{nearest_sibling(path)} Relative paths start at the working directory.")
    else:
        located = _folder_rows(resolve_folder(source.path, source.revision, "dataset", DataError), source)
    rows = [(where, plain(row, f"'{source.path}', {where}")) for where, row in itertools.islice(located, source.limit)]
    if not rows:
        raise DataError(f"'{source.path}' holds no rows.")
    return rows


def plain(row: Mapping[str, Any], where: str) -> Row:
    """The row as values that JSON can hold: dates become ISO text, bytes base64 text, decimals floats."""

    def value_of(value: Any, column: str) -> Any:
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {str(key): value_of(item, column) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [value_of(item, column) for item in value]
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, datetime.timedelta):
            return value.total_seconds()
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        if isinstance(value, decimal.Decimal):
            return float(value)
        if hasattr(value, "tolist"):  # NumPy's scalars and arrays
            return value_of(value.tolist(), column)
        raise DataError(f"{where}: column '{column}' holds a {type(value).__name__}; tasks carry only text, numbers, lists and mappings.")

    return {str(column): value_of(value, str(column)) for column, value in row.items()}


def _file_rows(path: Path) -> Iterator[Located]:
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_list, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"'{path}': files ending in '{path.suffix}' cannot be read. Known: {', '.join(readers)}, or a dataset folder.")
    try:
        yield from reader(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read: {error}") from error


def _json_lines(path: Path) -> Iterator[Located]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"'{path}', line {number}: not JSON: {error.msg} at column {error.colno}: {line.strip()[:80]!r}") from error
            yield f"line {number}", _checked(row, f"'{path}', line {number}")


def _json_list(path: Path) -> Iterator[Located]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"'{path}', line {error.lineno}: not JSON: {error.msg}. A file with one object on each line must end in .jsonl."
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"'{path}' holds a {type(rows).__name__}; a list of objects was expected.")
    for number, row in enumerate(rows):
        yield f"row {number}", _checked(row, f"'{path}', row {number}")


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: {json.dumps(row)[:80]} is not an object with named columns.")
    return row


def _parquet(path: Path) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            numbers = itertools.count()
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"row {next(numbers)}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"'{path}' is not a readable Parquet file: {error}") from error


def _folder_rows(folder: Path, source: SourceConfig) -> Iterator[Located]:
    import datasets

    datasets.disable_progress_bars()
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            loaded = datasets.load_from_disk(str(folder))
        else:
            with tempfile.TemporaryDirectory() as cache:  # streamed, so hardly anything lands there, and nothing in the user's folders
                loaded = datasets.load_dataset(str(folder), streaming=True, cache_dir=cache)
    except Exception as error:
        raise DataError(
            f"'{source.path}' holds no dataset: neither one saved by `save_to_disk` nor Parquet, JSON-lines or other data files "
            f"that `datasets` can read ({type(error).__name__}: {error})"
        ) from error
    rows = _pick_split(loaded, source)
    try:
        for number, row in enumerate(rows):
            yield f"row {number}", row
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"'{source.path}' cannot be read: {type(error).__name__}: {error}") from error


def _pick_split(loaded: Any, source: SourceConfig) -> Any:
    if not isinstance(loaded, Mapping):  # a folder that `Dataset.save_to_disk` wrote holds one split without naming it
        if source.split is not None:
            raise DataError(f"'{source.path}' holds a single dataset without splits. Remove `split: {source.split}`.")
        return loaded
    splits = list(loaded)
    if source.split in loaded:
        return loaded[source.split]
    if source.split is not None:
        raise DataError(f"'{source.path}' has no split '{source.split}'.{nearest(source.split, splits)} There are: {', '.join(splits)}.")
    if len(splits) > 1:
        raise DataError(f"'{source.path}' has several splits ({', '.join(splits)}): say which, for example `split: {splits[0]}`.")
    return loaded[splits[0]]
