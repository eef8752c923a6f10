"""How far the trainer's log-probabilities are from those that the engines sampled at.

Both compute the same weights by different kernels, in different batches, and where samples are stale also other weights. A small difference
is rounding; one that grows says that what is trained is not what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NUM_POINTS = 201
"""Points of the distribution that a rank tells the others."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


class Spread(NamedTuple):
    """Log-ratios of one rank: how many, the sum and the largest of their sizes, and points of their distribution in equal steps."""

    num_tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    points: tuple[float, ...] = ()


def spread_of(log_ratios: Sequence[Tensor]) -> Spread:
    """Of this rank's tokens: log-probability by the trainer minus that of sampling, not a number where a token does not count."""
    values = torch.cat(list(log_ratios)).float().cpu() if log_ratios else torch.zeros(0)
    values = values[~values.isnan()].sort().values
    if not len(values):
        return Spread()
    places = torch.linspace(0, len(values) - 1, min(NUM_POINTS, len(values))).round().long()
    sizes = values.abs()
    return Spread(len(values), float(sizes.sum(dtype=torch.float64)), float(sizes.max()), tuple(values[places].tolist()))


def mismatch(ranks: Sequence[Spread]) -> dict[str, float]:
    """Mean and largest difference of log-probabilities over all ranks, and quantiles of the ratio; nothing where there are no tokens.

    With several ranks, quantiles are those of their points together, each rank's of equal weight."""
    ranks = [rank for rank in ranks if rank.num_tokens]
    if not ranks:
        return {}
    points = torch.tensor([point for rank in ranks for point in rank.points], dtype=torch.float64)
    ratios = torch.quantile(points, torch.tensor(list(QUANTILES.values()), dtype=torch.float64)).exp().tolist()
    return {
        "mismatch/logp_mean": sum(rank.total for rank in ranks) / sum(rank.num_tokens for rank in ranks),
        "mismatch/logp_max": max(rank.largest for rank in ranks),
        **{f"mismatch/ratio_{name}": value for name, value in zip(QUANTILES, ratios, strict=True)},
    }
