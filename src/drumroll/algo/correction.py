"""Off-policy correction: what makes up for tokens that other weights sampled. Pure functions of `Batch`, registered as `correction`.

A correction says by what factor each token's loss is multiplied. In full that would be p_old / p_behaviour: how likely the
weights before the step's first update make the token (`old_logp`), over how likely it was when it was sampled
(`behaviour_logp`). A loss's own ratio goes from there, p / p_old, so the two together lead from the weights that sampled to
the weights being trained. At the level `token` every token has its own ratio, at the level `sequence` all tokens of a trajectory
have the product of theirs. Shape suffixes: N trajectories, T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from drumroll.algo.loss import Loss, RatioCap, ratio
from drumroll.algo.segments import spread, trajectory_mean, trajectory_sum
from drumroll.config.models import RatioBounds
from drumroll.registry import register
from drumroll.types import Batch, TokenLoss

Correction = Callable[[Batch], Tensor]
"""batch → [T] factors. `batch.old_logp` is never None here; what stands outside the loss mask is of no consequence."""

Level = Literal["token", "sequence"]


@register.correction("none")
def none(batch: Batch) -> Tensor:
    """Every token counts as if the weights being trained had sampled it, [T]."""
    return torch.ones_like(batch.behaviour_logp)


@register.correction("decoupled")
def decoupled(batch: Batch) -> Tensor:
    """Decoupled PPO (arXiv 2110.00641, 2505.24298): the full p_old / p_behaviour of each token, while the loss clips p / p_old, [T]."""
    return full_ratio(batch)


@register.correction("truncated_is")
def truncated_is(batch: Batch, *, cap: RatioCap = 2.0, level: Level = "token") -> Tensor:
    """Truncated importance sampling: p_old / p_behaviour of each token, or of its trajectory, at most `cap`, [T].

    Options:
        cap: Larger ratios count as this one.
        level: token: every token has its own ratio; sequence: all tokens of a trajectory have the product of theirs.
    """
    return full_ratio(batch, level).clamp(max=cap)


@register.correction("masked_is")
def masked_is(batch: Batch, *, bounds: RatioBounds = (0.5, 5.0), level: Level = "token") -> Tensor:
    """Masked importance sampling: p_old / p_behaviour of each token, or of its trajectory; outside `bounds` it counts nothing, [T].

    Options:
        bounds: Smallest and largest ratio that counts.
        level: token: every token has its own ratio; sequence: all tokens of a trajectory have the product of theirs.
    """
    ratio_T = full_ratio(batch, level)
    low, high = bounds
    return ratio_T.masked_fill((ratio_T < low) | (ratio_T > high), 0.0)


def full_ratio(batch: Batch, level: Level = "token") -> Tensor:
    """[T] p_old / p_behaviour of each token or of its trajectory, 1 outside the mask."""
    log_ratio_T = _log_ratio(batch)
    if level == "sequence":
        log_ratio_T = spread(trajectory_sum(log_ratio_T, batch), batch).masked_fill(~batch.loss_mask, 0.0)
    return ratio(log_ratio_T)


def with_correction(loss: Loss, correct: Correction, level: Level = "token") -> Loss:
    """The loss times the factors, which are constants to the gradient and 1 outside the loss mask.

    Reported are the factors as `correction_weight`, and as `correction_truncated` the tokens whose factor is below their full
    ratio (at the level of the correction) by more than rounding: those that the correction keeps from counting in full.
    """

    def corrected_loss(logp_T: Tensor, batch: Batch) -> TokenLoss:
        factor_T = correct(batch).detach()
        if factor_T.shape != batch.loss_mask.shape:
            raise ValueError(f"a correction must have one factor per token [{batch.num_tokens}]; got shape {list(factor_T.shape)}")
        factor_T = factor_T.masked_fill(~batch.loss_mask, 1.0)
        truncated_T = (factor_T * 1.001 < full_ratio(batch, level)).float()
        inner = loss(logp_T, batch)
        return TokenLoss(inner.loss * factor_T, {**inner.metrics, "correction_weight": factor_T, "correction_truncated": truncated_T})

    return corrected_loss


def with_rejection(loss: Loss, bounds: tuple[float, float]) -> Loss:
    """The loss, 0 for trajectories whose mean p_old / p_behaviour (the geometric mean over their tokens) is outside `bounds`.

    Their tokens are reported as `rejected`."""
    low, high = bounds

    def rejecting_loss(logp_T: Tensor, batch: Batch) -> TokenLoss:
        ratio_N = ratio(trajectory_mean(_log_ratio(batch), batch))
        rejected_T = spread((ratio_N < low) | (ratio_N > high), batch) & batch.loss_mask
        inner = loss(logp_T, batch)
        return TokenLoss(inner.loss.masked_fill(rejected_T, 0.0), {**inner.metrics, "rejected": rejected_T.float()})

    return rejecting_loss


def _log_ratio(batch: Batch) -> Tensor:
    """[T] from the weights that sampled to those before the step's first update, 0 outside the mask."""
    assert batch.old_logp is not None, "a trainer fills in `old_logp` before it calls a loss"
    return (batch.old_logp - batch.behaviour_logp).masked_fill(~batch.loss_mask, 0.0)
