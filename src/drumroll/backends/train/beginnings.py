"""Which tokens of a batch a pass has to compute: beginnings that trajectories share once, and nothing behind what is asked for.

    a b c d        a b c                      three trajectories, of each of which is asked what follows all tokens but the last
    a b e f   ─►       e         ─►   a b c | a b e | x y          attention sees the trajectories put together again
    x y z          x y

A token's states depend on the tokens before it alone, so those of a shared beginning are the same in every trajectory, and the gradients
that its copies get add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumroll.types import Batch

WORTH_IT = 1 / 16
"""The share of tokens from which on it pays to gather shared ones before each layer's attention."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A pass over a part of a batch's tokens."""

    rows: Tensor
    """[U] where the tokens lie in the batch, ascending."""
    asked: Tensor
    """[R] which of them are at the places that were asked for."""
    lengths: list[int]
    """Of the trajectories, as far as they are needed: T tokens together."""
    source: Tensor | None
    """[T] which of the rows each of those tokens is; None where each is a row of its own."""


def computed(batch: Batch, places: Tensor) -> Computed:
    """The tokens without which nothing can be said at `places` [R]; both are on the CPU."""
    tokens, start, where = batch.token_ids.numpy(), batch.offsets.numpy()[:-1], places.numpy()
    owner = np.searchsorted(start, where, side="right") - 1
    length = np.ones(len(start), dtype=np.int64)
    np.maximum.at(length, owner, where - start[owner] + 1)
    begin = np.cumsum(length) - length
    whole = np.repeat(start - begin, length) + np.arange(length.sum())
    first = _first_copies(tokens, start, begin, length, whole)
    rows = np.unique(first)
    source = np.searchsorted(rows, first)
    if len(rows) > len(whole) * (1 - WORTH_IT):
        rows, source = whole, np.arange(len(whole))
    asked = source[begin[owner] + where - start[owner]]
    is_shared = len(rows) < len(whole)
    return Computed(torch.from_numpy(rows), torch.from_numpy(asked), length.tolist(), torch.from_numpy(source) if is_shared else None)


def _first_copies(
    tokens: NDArray[np.int64], start: NDArray[np.int64], begin: NDArray[np.int64], length: NDArray[np.int64], whole: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[T] for each token, where in the batch the first one lies that has the same tokens before it. In the order of their texts, whatever
    trajectories share they share with their neighbours."""
    first = whole.copy()
    texts = [tokens[at : at + size] for at, size in zip(start, length, strict=True)]
    order = sorted(range(len(texts)), key=lambda number: texts[number].tolist())
    for before, number in pairwise(order):
        size = min(len(texts[before]), len(texts[number]))
        differs = texts[before][:size] != texts[number][:size]
        shared = int(differs.argmax()) if differs.any() else size
        first[begin[number] : begin[number] + shared] = first[begin[before] : begin[before] + shared]
    return first
