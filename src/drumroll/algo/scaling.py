"""Rewards and advantages on a common scale: minus a mean, over a standard deviation, held within bounds. Pure functions.

The mean and the deviation are those of the batch, of each group, or of everything since the run began; the last travel from step to
step as a `Running`. Shape suffixes: K values, N trajectories, M turns of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drumroll.algo.advantage import group_mean, group_std, group_varies
from drumroll.types import Batch, Turns


@dataclass(frozen=True, slots=True)
class Running:
    """Mean and spread of all values that were ever added.

    Example: `Running().add(torch.tensor([1.0, 3.0]))` → count 2, mean 2, squares 2.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def add(self, values: Tensor) -> Running:
        if not len(values):
            return self
        values = values.double()
        count, mean = self.count + len(values), float(values.mean())
        squares = float((values - mean).square().sum())
        apart = mean - self.mean
        return Running(
            count=count,
            mean=self.mean + apart * len(values) / count,
            squares=self.squares + squares + apart * apart * self.count * len(values) / count,
        )

    @property
    def std(self) -> float:
        """Of the population; 0 without values."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def entries(self, name: str) -> dict[str, float]:
        """As plain values, for example `reward_mean`."""
        return {f"{name}_count": self.count, f"{name}_mean": self.mean, f"{name}_squares": self.squares}

    @classmethod
    def of(cls, entries: Mapping[str, float], name: str) -> Running:
        """What `entries` gave; a fresh one where there is nothing."""
        return cls(*(entries.get(f"{name}_{part}", 0.0) for part in ("count", "mean", "squares")))


def normalise(value_K: Tensor, group_K: Tensor, *, subtract_mean: bool = True, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """[K] values over the standard deviation of their group, less its mean; and [K] the factors that they were multiplied by.

    Where all values of a group are equal the factor is 0."""
    factor_K = (1.0 / (group_std(value_K, group_K) + eps)).masked_fill(~group_varies(value_K, group_K), 0.0)
    return (value_K - group_mean(value_K, group_K) * subtract_mean) * factor_K, factor_K


def normalise_by(value_K: Tensor, running: Running, *, subtract_mean: bool = True, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The same by the mean and the standard deviation of everything so far."""
    factor = 1.0 / (running.std + eps) if running.std > 0 else 0.0
    return (value_K - running.mean * subtract_mean) * factor, torch.full_like(value_K, factor)


def replace_rewards(batch: Batch, reward_N: Tensor, factor_N: Tensor) -> Batch:
    """The batch with other rewards. Those of turns are multiplied by the factor; what is then left of a trajectory's belongs to its last
    turn."""
    turns = batch.turns
    if turns is not None:
        turns = _with_sums(replace(turns, rewards=turns.rewards * factor_N[turns.trajectory]), reward_N)
    return batch.with_fields(rewards=reward_N, turns=turns)


def _with_sums(turns: Turns, reward_N: Tensor) -> Turns:
    """The turns with the last one of each trajectory changed so that a trajectory's sum up to its reward."""
    rest_N = reward_N - torch.zeros_like(reward_N).index_add(0, turns.trajectory, turns.rewards)
    is_last_M = torch.ones_like(turns.trajectory, dtype=torch.bool)
    is_last_M[:-1] = turns.trajectory[1:] != turns.trajectory[:-1]
    return replace(turns, rewards=turns.rewards + rest_N[turns.trajectory] * is_last_M)
