"""Per-token losses of log-probabilities. Pure functions, registered as `loss`.

A loss says what every token costs; how much each token counts is `batch.weight` (see `aggregate`), so no loss ever sums or
averages. Shape suffixes: T tokens of the batch. Gradients outside the loss mask are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drumroll.registry import register
from drumroll.types import Batch, TokenLoss

Loss = Callable[[Tensor, Batch], TokenLoss]
"""(logp [T] with gradient, batch) → TokenLoss. `batch.old_logp` is never None here."""


@register.loss("ppo_clip")
def ppo_clip(logp_T: Tensor, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """PPO's clipped surrogate: no gain from moving the ratio to `old_logp` beyond 1 - clip_low or 1 + clip_high."""
    advantage_T = _advantages(batch)
    log_ratio_T = _log_ratio(logp_T, batch)
    ratio_T = log_ratio_T.exp()
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"clip_fraction": (clipped_T > plain_T).float(), **_drift(log_ratio_T)}
    return TokenLoss(torch.maximum(plain_T, clipped_T), metrics)


@register.loss("policy_gradient")
def policy_gradient(logp_T: Tensor, batch: Batch) -> TokenLoss:
    """REINFORCE: minus advantage times log-probability, for updates on the weights that sampled the tokens."""
    loss_T = -_advantages(batch) * logp_T.masked_fill(~batch.loss_mask, 0.0)
    return TokenLoss(loss_T, _drift(_log_ratio(logp_T, batch)))


@register.loss("cross_entropy")
def cross_entropy(logp_T: Tensor, batch: Batch) -> TokenLoss:
    """Minus the log-probability: imitation of the tokens in the loss mask."""
    logp_T = logp_T.masked_fill(~batch.loss_mask, 0.0)
    return TokenLoss(-logp_T, {"token_probability": logp_T.detach().exp()})


def _advantages(batch: Batch) -> Tensor:
    if batch.advantages is None:
        raise ValueError("this loss needs `batch.advantages`; the batch has none. Imitation without rewards is loss 'cross_entropy'.")
    return batch.advantages.masked_fill(~batch.loss_mask, 0.0)


def _log_ratio(logp_T: Tensor, batch: Batch) -> Tensor:
    """[T] log-ratio to the weights before the step's first update, 0 outside the mask."""
    assert batch.old_logp is not None, "a trainer fills in `old_logp` before it calls a loss"
    return (logp_T - batch.old_logp).masked_fill(~batch.loss_mask, 0.0)


def _drift(log_ratio_T: Tensor) -> dict[str, Tensor]:
    """How far the policy has moved from `old_logp`."""
    log_ratio_T = log_ratio_T.detach()
    return {"ratio": log_ratio_T.exp(), "approx_kl": torch.expm1(log_ratio_T) - log_ratio_T}
