"""Which tokens do not count although the policy sampled them. Pure functions of `Batch`.

What does not count leaves the loss mask. Its trajectory is still compared with the rest of its group: the reward is as true as ever.
Shape suffixes: G groups, N trajectories, T tokens of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drumroll.algo.segments import spread, trajectory_sum
from drumroll.config.models import MasksConfig
from drumroll.types import Batch


def counting(
    batch: Batch, options: MasksConfig, version: int, *, is_cut_off_N: Tensor, rate_G: Tensor | None = None, trains_on_greedy: bool = True
) -> Tensor:
    """[T] bool: what the section leaves of the loss mask for trainers at `version`.

    `is_cut_off_N` says whose budget was spent; `rate_G` are the groups' success rates, where the section asks for them."""
    counts_T = torch.ones_like(batch.loss_mask)
    if not trains_on_greedy:
        counts_T &= sampled(batch)
    if options.cut_off:
        counts_T &= ~spread(is_cut_off_N, batch)
    if options.longer_than is not None:
        counts_T &= no_longer_than(batch, options.longer_than)
    if options.success_rate is not None:
        assert rate_G is not None, "a mask by success rate needs the rates"
        counts_T &= within(rate_G, options.success_rate, batch)
    if options.token_staleness is not None:
        counts_T &= fresh_tokens(batch, version - options.token_staleness)
    if options.trajectory_staleness is not None:
        counts_T &= fresh_trajectories(batch, version - options.trajectory_staleness)
    return counts_T


def sampled(batch: Batch) -> Tensor:
    """[T] bool: not of a greedy trajectory, which is there to be compared with."""
    return spread(batch.temperature > 0, batch)


def no_longer_than(batch: Batch, num_tokens: int) -> Tensor:
    """[T] bool: of a trajectory with at most that many tokens of the policy."""
    return spread(trajectory_sum(batch.loss_mask.double(), batch) <= num_tokens, batch)


def within(rate_G: Tensor, bounds: tuple[float, float], batch: Batch) -> Tensor:
    """[T] bool: of a group whose success rate is within the bounds. One that nobody can tell, NaN, is."""
    low, high = bounds
    return spread(~((rate_G < low) | (rate_G > high))[batch.group_index], batch)


def fresh_tokens(batch: Batch, oldest_version: int) -> Tensor:
    """[T] bool: of weights of that version or later."""
    return batch.token_version >= oldest_version


def fresh_trajectories(batch: Batch, oldest_version: int) -> Tensor:
    """[T] bool: of a trajectory all of whose tokens in the loss mask are of that version or later."""
    stale_T = batch.loss_mask & (batch.token_version < oldest_version)
    return spread(trajectory_sum(stale_T.double(), batch) == 0, batch)
