"""Sums over stretches of a batch: over trajectories and their turns, and rewards at the tokens that earn them.

Shape suffixes: N trajectories, M turns, T tokens of the batch. Sums run in float64, so that they do not depend on what else is in
the batch by more than the last bit of a float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drumroll.types import Batch, Turns


def spread(value_N: Tensor, batch: Batch) -> Tensor:
    """[T]: every token has its trajectory's value. Differentiable."""
    value_T: Tensor = _Spread.apply(value_N, batch.offsets, batch.num_tokens)  # type: ignore[no-untyped-call]
    return value_T


def trajectory_of(batch: Batch) -> Tensor:
    """[T] int64: number of each token's trajectory."""
    return spread(torch.arange(batch.num_trajectories, device=batch.offsets.device), batch)


def trajectory_sum(value_T: Tensor, batch: Batch) -> Tensor:
    """[N]: sum over each trajectory's tokens. Differentiable."""
    return _sums(value_T, batch.offsets)


def trajectory_mean(value_T: Tensor, batch: Batch) -> Tensor:
    """[N]: mean over each trajectory's tokens in the loss mask, 0 where there are none. Differentiable."""
    inside_T = batch.loss_mask.to(value_T.dtype)
    return trajectory_sum(value_T.masked_fill(~batch.loss_mask, 0.0), batch) / trajectory_sum(inside_T, batch).clamp(min=1)


def trajectory_rewards(batch: Batch) -> Tensor:
    """[N]: what each trajectory earned, with what its single tokens did."""
    return batch.rewards if batch.token_rewards is None else batch.rewards + trajectory_sum(batch.token_rewards, batch)


def turn_rewards(batch: Batch, turns: Turns) -> Tensor:
    """[M]: what each turn earned, with what its single tokens did."""
    if batch.token_rewards is None:
        return turns.rewards
    before_T = torch.cat([batch.token_rewards.new_zeros(1), batch.token_rewards]).double().cumsum(0)
    return turns.rewards + (before_T[turns.ends] - before_T[turns.starts]).to(turns.rewards.dtype)


def rewards_by_token(batch: Batch) -> Tensor:
    """[T]: a turn's reward at its last token, what else a trajectory earned at its own last token, and `token_rewards` on top."""
    reward_T = torch.zeros(batch.num_tokens) if batch.token_rewards is None else batch.token_rewards.masked_fill(~batch.loss_mask, 0.0)
    rest_N = batch.rewards
    if batch.turns is not None:
        reward_T = reward_T.index_add(0, batch.turns.ends - 1, batch.turns.rewards)
        rest_N = rest_N - torch.zeros_like(rest_N).index_add(0, batch.turns.trajectory, batch.turns.rewards)
    has_tokens_N = batch.offsets.diff() > 0
    return reward_T.index_add(0, batch.offsets[1:][has_tokens_N] - 1, rest_N[has_tokens_N])


def to_go(value_T: Tensor, batch: Batch) -> Tensor:
    """[T]: the sum from each token to the end of its trajectory."""
    before_T = torch.cat([value_T.new_zeros(1), value_T]).double().cumsum(0)
    return (spread(before_T[batch.offsets[1:]], batch) - before_T[:-1]).to(value_T.dtype)


class _Spread(torch.autograd.Function):
    """Values for tokens, with gradients that are added in a fixed order: on CUDA, those of `repeat_interleave` are not."""

    @staticmethod
    def forward(ctx: Any, value_N: Tensor, offsets: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(offsets)
        return value_N.repeat_interleave(offsets.diff(), output_size=num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _sums(gradients[0], *ctx.saved_tensors), None, None


def _sums(value_T: Tensor, offsets: Tensor) -> Tensor:
    """[N]"""
    return torch.segment_reduce(value_T.double(), "sum", offsets=offsets, initial=0.0).to(value_T.dtype)
