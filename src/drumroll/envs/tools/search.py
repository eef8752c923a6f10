"""Search over a folder of text files by BM25. The index is made once in a process."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from pydantic import PositiveInt

from drumroll.errors import DataError
from drumroll.registry import register, require

require("bm25s", extra="tools")

SUFFIXES = (".md", ".txt")
MAX_WORDS = 64
"""Different words of a query that count."""

_one_at_a_time = Lock()


@register.tool("search")
async def search(
    query: str,
    *,
    folder: str,
    num_results: PositiveInt = 3,
    passage_chars: PositiveInt = 500,
) -> str:
    """Searches the documents for words and returns the best passages, each with the name of its file.

    Args:
        query: The words to look for.

    Options:
        folder: Folder with .md and .txt files, at any depth; they are read once.
        num_results: Passages that are shown.
        passage_chars: Length of a passage, in characters.
    """
    found = await asyncio.to_thread(lambda: _index(folder, passage_chars).find(query, num_results))
    return "\n\n".join(f"[{passage.file}]\n{passage.text}" for passage in found) or "nothing was found"


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document. Example: `Passage("animals/cats.md", "Cats sleep most of the day.")`."""

    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Index:
    """Passages, and their words as bm25s counts them."""

    passages: tuple[Passage, ...]
    ranking: Any
    """The `bm25s.BM25`."""

    def find(self, query: str, num_results: int) -> list[Passage]:
        """The best passages that share a word with the query, best first; of equal ones the earlier."""
        known = [word for word in dict.fromkeys(words(query)) if word in self.ranking.vocab_dict][:MAX_WORDS]
        if not known:
            return []
        scores = self.ranking.get_scores(known)
        hits = np.flatnonzero(scores > 0)
        best = hits[np.argsort(-scores[hits], kind="stable")][:num_results]
        return [self.passages[number] for number in best.tolist()]


def words(text: str) -> list[str]:
    """Words in small letters: `words("The cat's 9 lives")` → `["the", "cat", "s", "9", "lives"]`."""
    return re.findall(r"\w+", text.lower())


def split_passages(text: str, size: int) -> Iterator[str]:
    """A text in pieces of at most `size` characters: whole paragraphs where they fit, cut between words where not."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        stripped = paragraph.strip()
        for piece in [stripped] if len(stripped) <= size else textwrap.wrap(stripped, size, replace_whitespace=False):
            if passage and len(passage) + 2 + len(piece) > size:
                yield passage
                passage = ""
            passage = f"{passage}\n\n{piece}" if passage and piece else passage or piece
    if passage:
        yield passage


def _index(folder: str, passage_chars: int) -> Index:
    with _one_at_a_time:  # whoever comes while it is made waits for it
        return _make_index(folder, passage_chars)


@cache
def _make_index(folder: str, passage_chars: int) -> Index:
    import bm25s

    root = Path(folder)
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    passages = tuple(
        Passage(path.relative_to(root).as_posix(), text)
        for path in files
        for text in split_passages(path.read_text(encoding="utf-8", errors="replace"), passage_chars)
        if words(text)
    )
    if not passages:
        raise DataError(
            f"tool 'search': the folder '{folder}' holds no text in files that end in {' or '.join(SUFFIXES)}. "
            f"Give `folder` as the tool's option, as a path from the working directory."
        )
    ranking = bm25s.BM25()
    ranking.index([words(passage.text) for passage in passages], show_progress=False)
    return Index(passages, ranking)
