"""BM25 over texts, by the library bm25s."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from drumroll.envs.webshop.reward import words
from drumroll.registry import require

require("bm25s", extra="webshop")

DIGITS = 4
"""Scores that agree in so many decimals are ties, whatever order a machine adds floats in."""


class Index:
    """Finds texts by their words. Short words and numbers count as any others, because sizes are made of them.

    Example: `Index(["red mug", "red shoe 7"]).search("shoe 7", most=10) == [1]`.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        import bm25s

        self._bm25 = bm25s.BM25()
        self._bm25.index([words(text) for text in texts], show_progress=False)

    def search(self, query: str, most: int) -> list[int]:
        """Numbers of the best texts that share a word with the query, best first; of equals, the earlier one first."""
        tokens = words(query)
        if not tokens:
            return []
        scores = np.round(self._bm25.get_scores(tokens), DIGITS)
        found = np.flatnonzero(scores)
        if len(found) > most:  # sort only those that can be among the best
            found = found[scores[found] >= np.partition(scores[found], -most)[-most]]
        ranked = found[np.argsort(-scores[found], kind="stable")]
        return [int(number) for number in ranked[:most]]
