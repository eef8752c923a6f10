"""Rewards → how much better than expected each trajectory was. Pure functions of `Batch`, registered as `advantage`.

Shape suffixes: N trajectories, T tokens of the batch. An estimator returns [N] (one value for all tokens of a trajectory)
or [T]; `broadcast` makes [T] of either. Where all rewards that are compared with each other are equal there is nothing to
learn, and the advantage is exactly 0 rather than a rounding error divided by another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drumroll.registry import register
from drumroll.types import Batch


@register.advantage("grpo")
def grpo(batch: Batch, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Reward minus group mean, over population std, [N]; a group of one or without variance gets 0."""
    centred_N = batch.rewards - group_mean(batch.rewards, batch.group_index)
    if scale_by_std:
        centred_N = centred_N / (group_std(batch.rewards, batch.group_index) + eps)
    return centred_N.masked_fill(~group_varies(batch.rewards, batch.group_index), 0.0)


@register.advantage("rloo")
def rloo(batch: Batch) -> Tensor:
    """Reward minus the mean reward of the group's other trajectories, [N]; a group of one gets 0."""
    size_N = group_sum(torch.ones_like(batch.rewards), batch.group_index)
    others_N = (group_sum(batch.rewards, batch.group_index) - batch.rewards) / (size_N - 1).clamp(min=1)
    return (batch.rewards - others_N).masked_fill(~group_varies(batch.rewards, batch.group_index), 0.0)


@register.advantage("reinforce")
def reinforce(batch: Batch, *, subtract_mean: bool = True) -> Tensor:
    """Reward, minus the batch's mean reward unless told otherwise, [N]."""
    if not subtract_mean:
        return batch.rewards
    one_group_N = torch.zeros_like(batch.group_index)
    centred_N = batch.rewards - group_mean(batch.rewards, one_group_N)
    return centred_N.masked_fill(~group_varies(batch.rewards, one_group_N), 0.0)


def broadcast(advantage: Tensor, batch: Batch) -> Tensor:
    """[N] or [T] → [T], 0 outside the loss mask."""
    if advantage.shape == batch.rewards.shape:
        advantage_T = advantage.repeat_interleave(batch.offsets.diff(), output_size=batch.num_tokens)
    elif advantage.shape == batch.loss_mask.shape:
        advantage_T = advantage
    else:
        raise ValueError(
            f"an advantage must have one value per trajectory [{batch.num_trajectories}] or per token [{batch.num_tokens}]; "
            f"got shape {list(advantage.shape)}"
        )
    return advantage_T.float().masked_fill(~batch.loss_mask, 0.0)


def group_sum(value_N: Tensor, group_index: Tensor) -> Tensor:
    """[N]: for every trajectory, the sum over its group."""
    return value_N.new_zeros(_num_groups(group_index)).index_add(0, group_index, value_N)[group_index]


def group_mean(value_N: Tensor, group_index: Tensor) -> Tensor:
    """[N]: for every trajectory, the mean over its group."""
    return group_sum(value_N, group_index) / group_sum(torch.ones_like(value_N), group_index)


def group_std(value_N: Tensor, group_index: Tensor) -> Tensor:
    """[N]: for every trajectory, the population standard deviation of its group."""
    return group_mean((value_N - group_mean(value_N, group_index)) ** 2, group_index).sqrt()


def group_varies(value_N: Tensor, group_index: Tensor) -> Tensor:
    """[N] bool: whether the group holds two different values."""
    ends = [
        value_N.new_zeros(_num_groups(group_index)).scatter_reduce(0, group_index, value_N, reduce, include_self=False)
        for reduce in ("amin", "amax")
    ]
    return (ends[0] != ends[1])[group_index]


def _num_groups(group_index: Tensor) -> int:
    return int(group_index.max()) + 1 if len(group_index) else 0
