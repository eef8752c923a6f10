"""Level files in Boxoban's format: a line `; number`, the lines of a board, an empty line, and so on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from drumroll.envs.sokoban.level import Level, parse_level
from drumroll.errors import DataError


def pick_level(path: str, number: int) -> Level:
    """Level `number` of a file, or of the `.txt` files of a folder in the order of their names; it begins again behind the last one."""
    texts = read_texts(path)
    where, rows = texts[number % len(texts)]
    level = parse_level(rows, where)
    if level.is_solved:
        raise DataError(f"{where}: all boxes are on targets already; a level that is still to be solved was expected.")
    return level


@cache  # one process plays many levels of few files
def read_texts(path: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Where each level stands, and its lines. They are kept as text: a folder may hold a million of them."""
    place = Path(path).expanduser()
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    try:
        texts = [level for file in files for level in _levels(file)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"levels '{path}' cannot be read: {error}. Relative paths start at the working directory.") from error
    if not texts:
        raise DataError(f"'{path}' holds no levels; a text file in Boxoban's format was expected, or a folder of such .txt files.")
    return tuple(texts)


def _levels(file: Path) -> list[tuple[str, tuple[str, ...]]]:
    levels: list[tuple[str, list[str]]] = []
    is_open = False
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if line.startswith(";"):
            is_open = False
        elif line.strip():
            if not is_open:
                levels.append((f"'{file}', line {number}", []))
            levels[-1][1].append(line)
            is_open = True
        else:
            is_open = False
    return [(where, tuple(rows)) for where, rows in levels]
