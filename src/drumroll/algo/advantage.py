"""Rewards → how much better than expected each trajectory was. Pure functions of `Batch`, registered as `advantage`.

Shape suffixes: N trajectories, T tokens of the batch. An estimator returns [N] (one value for all tokens of a trajectory)
or [T]; `broadcast` makes [T] of either. What a trajectory earned is its reward with the rewards of its single tokens, such as a
KL penalty. Where all rewards that are compared with each other are equal there is nothing to learn, and the advantage is exactly 0
rather than a rounding error divided by another. docs/algorithms.md has the formulas.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from torch import Tensor

from drumroll.algo.segments import rewards_by_token, spread, to_go, trajectory_rewards
from drumroll.registry import register
from drumroll.types import Batch


@register.advantage("grpo", needs=("groups",))
def grpo(batch: Batch, *, scale_by_std: bool = True, eps: PositiveFloat = 1e-6) -> Tensor:
    """GRPO (arXiv 2402.03300): reward minus group mean, over population std, [N]; a group of one or without variance gets 0.

    Options:
        scale_by_std: Divide by the group's standard deviation; false: only subtract its mean.
        eps: Added to the standard deviation, so that tiny ones do not blow the advantage up.
    """
    return standardised(trajectory_rewards(batch), batch.group_index, scale_by_std=scale_by_std, eps=eps)


@register.advantage("dr_grpo", needs=("groups",))
def dr_grpo(batch: Batch) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): reward minus group mean, [N]; goes with the aggregation `constant_length`."""
    return standardised(trajectory_rewards(batch), batch.group_index, scale_by_std=False)


@register.advantage("rloo", needs=("groups",))
def rloo(batch: Batch) -> Tensor:
    """RLOO (arXiv 2402.14740): reward minus the mean reward of the group's other trajectories, [N]; a group of one gets 0."""
    reward_N = trajectory_rewards(batch)
    size_N = group_sum(torch.ones_like(reward_N), batch.group_index)
    others_N = (group_sum(reward_N, batch.group_index) - reward_N) / (size_N - 1).clamp(min=1)
    return (reward_N - others_N).masked_fill(~group_varies(reward_N, batch.group_index), 0.0)


@register.advantage("reinforce")
def reinforce(batch: Batch, *, subtract_mean: bool = True) -> Tensor:
    """REINFORCE: reward, minus the batch's mean reward unless told otherwise, [N].

    Options:
        subtract_mean: Subtract the mean reward of the batch.
    """
    reward_N = trajectory_rewards(batch)
    return standardised(reward_N, torch.zeros_like(batch.group_index), scale_by_std=False) if subtract_mean else reward_N


@register.advantage("reinforce_pp")
def reinforce_pp(batch: Batch, *, eps: PositiveFloat = 1e-6) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): each token's rewards to go, standardised over all tokens of the batch, [T].

    Options:
        eps: Added to the standard deviation, so that tiny ones do not blow the advantage up.
    """
    return whitened(to_go(rewards_by_token(batch), batch), batch, eps=eps)


@register.advantage("reinforce_pp_baseline", needs=("groups",))
def reinforce_pp_baseline(batch: Batch, *, eps: PositiveFloat = 1e-6) -> Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262): reward minus group mean, over the standard deviation of the whole batch, [N].

    Options:
        eps: Added to the standard deviation, so that tiny ones do not blow the advantage up.
    """
    centred_N = standardised(trajectory_rewards(batch), batch.group_index, scale_by_std=False)
    return centred_N / (centred_N.square().mean().sqrt() + eps) if len(centred_N) else centred_N


@register.advantage("remax", needs=("groups", "greedy"))
def remax(batch: Batch) -> Tensor:
    """ReMax (arXiv 2310.10505): reward minus that of the group's greedy sample, [N]; 0 for that one, and in a group that has none."""
    reward_N, greedy_N = trajectory_rewards(batch), batch.temperature == 0
    num_greedy_N = group_sum(greedy_N.to(reward_N.dtype), batch.group_index)
    baseline_N = group_sum(reward_N.masked_fill(~greedy_N, 0.0), batch.group_index) / num_greedy_N.clamp(min=1)
    return (reward_N - baseline_N).masked_fill(greedy_N | (num_greedy_N == 0), 0.0)


def broadcast(advantage: Tensor, batch: Batch) -> Tensor:
    """[N] or [T] → [T], 0 outside the loss mask."""
    if advantage.shape == batch.rewards.shape:
        advantage_T = spread(advantage, batch)
    elif advantage.shape == batch.loss_mask.shape:
        advantage_T = advantage
    else:
        raise ValueError(
            f"an advantage must have one value per trajectory [{batch.num_trajectories}] or per token [{batch.num_tokens}]; "
            f"got shape {list(advantage.shape)}"
        )
    return advantage_T.float().masked_fill(~batch.loss_mask, 0.0)


def whitened(value_T: Tensor, batch: Batch, *, eps: float = 1e-6) -> Tensor:
    """[T]: minus the mean over the loss mask, over the standard deviation there; 0 outside it, and where all are equal."""
    inside = batch.loss_mask.nonzero().squeeze(1)
    return torch.zeros_like(value_T).index_copy(0, inside, standardised(value_T[inside], torch.zeros_like(inside), eps=eps))


def standardised(value_N: Tensor, group_index: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """[N]: minus the mean of the group, over its population standard deviation unless told otherwise; 0 where all are equal."""
    centred_N = value_N - group_mean(value_N, group_index)
    if scale_by_std:
        centred_N = centred_N / (group_std(value_N, group_index) + eps)
    return centred_N.masked_fill(~group_varies(value_N, group_index), 0.0)


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
