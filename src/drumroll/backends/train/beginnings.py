"""Which tokens of a batch a pass has to compute: beginnings that trajectories share once, and nothing behind what is asked for.

    a b c d        a b c                      three trajectories, of each of which is asked what follows all tokens but the last
    a b e f   ─►       e         ─►   a b c | a b e | x y          attention sees the trajectories put together again
    x y z          x y

A token's states depend on the tokens before it alone, so those of a shared beginning are the same in every trajectory, and the gradients
that its copies get add up.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The tokens without which nothing can be said at `places` [R], which ascend; both are on the CPU."""
    tokens, bounds, where = batch.token_ids.numpy(), batch.offsets.numpy(), places.numpy()
    start, asked_before = bounds[:-1], np.searchsorted(where, bounds)
    num_asked = np.diff(asked_before)
    length = np.ones(len(start), dtype=np.int64)  # of trajectories of which nothing is asked, one token
    length[num_asked > 0] += where[asked_before[1:][num_asked > 0] - 1] - start[num_asked > 0]
    begin = np.cumsum(length) - length
    whole = np.repeat(start - begin, length) + np.arange(length.sum())
    place_in_whole = where + np.repeat(begin - start, num_asked)
    standing_for = _representatives([tokens[at : at + size] for at, size in zip(start, length, strict=True)], begin)
    is_own = standing_for == np.arange(len(whole))
    if is_own.sum() > len(whole) * (1 - WORTH_IT):
        return Computed(torch.from_numpy(whole), torch.from_numpy(place_in_whole), length.tolist(), None)
    source = (np.cumsum(is_own) - 1)[standing_for]
    return Computed(torch.from_numpy(whole[is_own]), torch.from_numpy(source[place_in_whole]), length.tolist(), torch.from_numpy(source))


def _representatives(texts: Sequence[NDArray[np.int64]], begin: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T] for each token of the texts, which lie end to end from `begin` on, where the one lies that stands for all that have the same
    tokens before them. In the order of their bytes, whatever texts share they share with their neighbours."""
    found = np.arange(sum(map(len, texts)))
    order = sorted(range(len(texts)), key=lambda number: texts[number].tobytes())
    for before, number in pairwise(order):
        size = min(len(texts[before]), len(texts[number]))
        differs = texts[before][:size] != texts[number][:size]
        shared = int(differs.argmax()) if differs.any() else size
        found[begin[number] : begin[number] + shared] = found[begin[before] : begin[before] + shared]
    return found
