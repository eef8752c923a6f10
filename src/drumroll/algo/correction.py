"""Off-policy correction: what makes up for tokens that other weights sampled. Pure functions of `Batch`, registered as `correction`.

A correction says by what factor each token's loss is multiplied. In full that would be p_old / p_behaviour: how likely the
weights before the step's first update make the token (`old_logp`), over how likely it was when it was sampled
(`behaviour_logp`). A loss's own ratio goes from there, p / p_old, so the two together lead from the weights that sampled to
the weights being trained. Shape suffixes: T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drumroll.algo.loss import Loss
from drumroll.registry import register
from drumroll.types import Batch, TokenLoss

Correction = Callable[[Batch], Tensor]
"""batch → [T] factors. `batch.old_logp` is never None here; what stands outside the loss mask is of no consequence."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are cut here, in both directions: far beyond use, and long before float32 overflows."""


@register.correction("none")
def none(batch: Batch) -> Tensor:
    """Every token counts as if the weights being trained had sampled it, [T]."""
    return torch.ones_like(batch.behaviour_logp)


@register.correction("truncated_is")
def truncated_is(batch: Batch, *, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling: p_old / p_behaviour of each token, at most `cap`, [T]."""
    if cap < 1.0:
        raise ValueError(f"correction 'truncated_is': `cap` is {cap:g}; below 1 it would shrink tokens that need no correction")
    return full_ratio(batch).clamp(max=cap)


def full_ratio(batch: Batch) -> Tensor:
    """[T] p_old / p_behaviour, 1 outside the mask."""
    assert batch.old_logp is not None, "a trainer fills in `old_logp` before it calls a loss"
    log_ratio_T = (batch.old_logp - batch.behaviour_logp).masked_fill(~batch.loss_mask, 0.0)
    return log_ratio_T.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def with_correction(loss: Loss, correct: Correction) -> Loss:
    """The loss times the factors, which are constants to the gradient and 1 outside the loss mask.

    Reported are the factors as `correction_weight`, and as `correction_truncated` the tokens whose factor is below their full
    ratio by more than rounding: those that the correction keeps from counting in full.
    """

    def corrected_loss(logp_T: Tensor, batch: Batch) -> TokenLoss:
        factor_T = correct(batch).detach()
        if factor_T.shape != batch.loss_mask.shape:
            raise ValueError(f"a correction must have one factor per token [{batch.num_tokens}]; got shape {list(factor_T.shape)}")
        factor_T = factor_T.masked_fill(~batch.loss_mask, 1.0)
        truncated_T = (factor_T * 1.001 < full_ratio(batch)).float()
        inner = loss(logp_T, batch)
        return TokenLoss(inner.loss * factor_T, {**inner.metrics, "correction_weight": factor_T, "correction_truncated": truncated_T})

    return corrected_loss
