"""Whether the samples that a step keeps are as long as samples are: speed must not buy a bias towards short answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[int] | NDArray[np.int64]
"""Tokens of each sample."""


def kept_length_ratio(kept: Lengths, complete: Lengths, censored: Lengths) -> float:
    """Mean length of the samples that were kept, over the estimated mean of the population they were drawn from.

    `complete` are all samples that came to their own end: kept, rejected or superfluous. `censored` are those that were cut off, at
    their lengths so far. Below 1, what is kept is shorter than what the policy writes; nan where nothing was kept.

    Example: the shorter half is kept and the rest is cut off on the way:
    `kept_length_ratio([10, 20], [10, 20], [20, 20])` = 15 / 17.5.
    """
    population = population_mean(complete, censored)
    return _mean(np.asarray(kept, np.int64)) / population if len(kept) and population else float("nan")


def population_mean(complete: Lengths, censored: Lengths) -> float:
    """Kaplan and Meier's estimate of the mean length, from complete lengths and from lower bounds of others.

    It holds where what cuts samples off does not know how long they would have become. Nothing is known beyond the largest length
    seen: where a censored sample has it, this is the restricted mean, of lengths that are counted up to there and no further, and
    so rather too small than too large.
    """
    ended, cut = np.asarray(complete, np.int64), np.asarray(censored, np.int64)
    if not len(cut):
        return _mean(ended)
    length, place = np.unique(np.concatenate([ended, cut]), return_inverse=True)
    num_ended = np.bincount(place[: len(ended)], minlength=len(length))
    num_reached = np.bincount(place)[::-1].cumsum()[::-1]  # samples that got as far as each length, wherever they ended
    longer = np.cumprod(1.0 - num_ended / num_reached)  # share of the population that is longer than each length
    return float(np.diff(length, prepend=0) @ np.concatenate([[1.0], longer[:-1]]))


def _mean(lengths: NDArray[np.int64]) -> float:
    """Of whole numbers, so that their order is of no consequence; 0 where there are none."""
    return int(lengths.sum()) / len(lengths) if len(lengths) else 0.0
