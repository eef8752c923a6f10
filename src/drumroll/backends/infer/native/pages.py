"""Which page holds what: shared beginnings, pages at rest, pages that are free. Pure bookkeeping.

A page that is full, or that ends a prompt, is *sealed* under a key made of all tokens up to its end. Requests that begin with the same
tokens find it by that key and hold it together. A page that nobody holds any more stays where it is, at rest, until its place is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

Key = bytes


@dataclass(slots=True)
class Holding:
    """Pages of one slot, in their order."""

    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    """Of the pages that the tokens to fill need."""
    num_promised: int = 0
    """Pages that the slot will still take while it is filled."""
    is_sealable: bool = True
    """Whether all that the pages hold was computed with the present weights."""


class PageBook:
    """`num_pages` pages of `page_size` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))[::-1]
        self._num_holders = [0] * num_pages
        self._resting: dict[int, None] = {}
        """Sealed pages that nobody holds, the longest at rest first."""
        self._by_key: dict[Key, int] = {}
        self._keys_of: dict[int, list[Key]] = {}

    @property
    def num_available(self) -> int:
        """Pages that `take` would give."""
        return len(self._free) + len(self._resting)

    def keys(self, tokens: Sequence[int]) -> Iterator[Key]:
        """One key for each page that the tokens fill, and one for a rest."""
        ids, key = np.asarray(tokens, dtype=np.int64), b""
        for start in range(0, len(ids), self.page_size):
            key = hashlib.blake2b(key + ids[start : start + self.page_size].tobytes(), digest_size=16).digest()
            yield key

    def find(self, key: Key) -> int | None:
        return self._by_key.get(key)

    def hold(self, page: int) -> None:
        self._resting.pop(page, None)
        self._num_holders[page] += 1

    def take(self) -> int | None:
        """A page without contents, held once; None when all are held."""
        if self._free:
            page = self._free.pop()
        elif self._resting:
            page = next(iter(self._resting))
            del self._resting[page]
            self._unseal(page)
        else:
            return None
        self._num_holders[page] = 1
        return page

    def seal(self, page: int, key: Key) -> None:
        """From now on the page is found under the key, unless another one is already."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._keys_of.setdefault(page, []).append(key)

    def release(self, pages: Sequence[int]) -> None:
        """One holder of each less. Of those that come to rest, the last is given up first: what follows a page is of no use without it."""
        for page in reversed(pages):
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                if page in self._keys_of:
                    self._resting[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """No page is found any more; whoever holds one goes on."""
        self._by_key.clear()
        self._keys_of.clear()
        self._free += self._resting
        self._resting.clear()

    def _unseal(self, page: int) -> None:
        for key in self._keys_of.pop(page):
            del self._by_key[key]
