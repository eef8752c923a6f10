"""Per-token losses of log-probabilities. Pure functions, registered as `loss`.

A loss says what every token costs; how much each token counts is `batch.weight` (see `aggregate`), so no loss ever sums or
averages over a batch. Some take a ratio of a whole trajectory: every micro-batch holds whole trajectories. The ratio is to `old_logp`,
the weights before the step's first update; a `correction` leads from those to the weights that sampled.
Shape suffixes: N trajectories, T tokens of the batch. Gradients outside the loss mask are exactly 0. docs/algorithms.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from drumroll.algo.segments import spread, trajectory_mean, trajectory_sum
from drumroll.registry import register
from drumroll.types import Batch, TokenLoss

Loss = Callable[[Tensor, Batch], TokenLoss]
"""(logp [T] with gradient, batch) → TokenLoss. `batch.old_logp` is never None here."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are cut here, in both directions, before they become ratios: far beyond use, and long before float32 overflows."""

ClipLow = Annotated[float, Field(ge=0.0, lt=1.0)]
"""How far below 1 a ratio may fall."""
ClipHigh = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""How far above 1 a ratio may rise."""
RatioFloor = Annotated[float, Field(ge=0.0, le=1.0)]
"""The smallest value of a ratio."""
RatioCap = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]
"""The largest value of a ratio."""


def needs_of(loss: Loss) -> Collection[str]:
    """Fields of the batch that a trainer must fill in for this loss: `entropy`, or none."""
    needs: Collection[str] = getattr(loss, "needs", ())
    return needs


@register.loss("ppo_clip")
def ppo_clip(
    logp_T: Tensor,
    batch: Batch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347): no gain from moving the ratio to `old_logp` beyond 1 - clip_low or 1 + clip_high.

    Unequal bounds are DAPO's (arXiv 2503.14476), `dual_clip` is of arXiv 1912.09729.

    Options:
        clip_low: A token's ratio may fall this far below 1 before it gains nothing more.
        clip_high: A token's ratio may rise this far above 1 before it gains nothing more.
        dual_clip: A token of negative advantage costs no more than this times its advantage, however far its ratio rises; null: no limit.
    """
    log_ratio_T = _log_ratio(logp_T, batch)
    return _clipped(ratio(log_ratio_T), log_ratio_T, batch, clip_low, clip_high, dual_clip)


@register.loss("gspo")
def gspo(logp_T: Tensor, batch: Batch, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> TokenLoss:
    """GSPO (arXiv 2507.18071): PPO's clipped surrogate with one ratio per trajectory, the geometric mean of its tokens'.

    Options:
        clip_low: A trajectory's ratio may fall this far below 1 before it gains nothing more.
        clip_high: A trajectory's ratio may rise this far above 1 before it gains nothing more.
    """
    log_ratio_T = _log_ratio(logp_T, batch)
    ratio_T = spread(ratio(trajectory_mean(log_ratio_T, batch)), batch)
    return _clipped(ratio_T, log_ratio_T, batch, clip_low, clip_high)


@register.loss("gspo_token")
def gspo_token(logp_T: Tensor, batch: Batch, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> TokenLoss:
    """GSPO-token (arXiv 2507.18071): the value of GSPO's ratio, with each token's gradient its own; for advantages that differ by token.

    Options:
        clip_low: A trajectory's ratio may fall this far below 1 before it gains nothing more.
        clip_high: A trajectory's ratio may rise this far above 1 before it gains nothing more.
    """
    log_ratio_T = _log_ratio(logp_T, batch)
    ratio_T = spread(ratio(trajectory_mean(log_ratio_T.detach(), batch)), batch)
    own_T = (log_ratio_T - log_ratio_T.detach()).exp()  # 1, with the gradient of the log-probability
    return _clipped(ratio_T * own_T, log_ratio_T, batch, clip_low, clip_high)


@register.loss("cispo")
def cispo(logp_T: Tensor, batch: Batch, *, floor: RatioFloor = 0.0, cap: RatioCap = 5.0) -> TokenLoss:
    """CISPO (arXiv 2506.13585): policy gradient times the ratio held between `floor` and `cap`, which is a constant to the gradient.

    Options:
        floor: Smaller ratios count as this one.
        cap: Larger ratios count as this one.
    """
    log_ratio_T = _log_ratio(logp_T, batch)
    ratio_T = ratio(log_ratio_T.detach())
    held_T = ratio_T.clamp(floor, cap)
    loss_T = -advantages(batch) * held_T * _inside(logp_T, batch)
    return TokenLoss(loss_T, {"clip_fraction": (held_T != ratio_T).float(), **_drift(log_ratio_T)})


@register.loss("topr")
def topr(logp_T: Tensor, batch: Batch) -> TokenLoss:
    """TOPR (arXiv 2503.14286): policy gradient; trajectories of negative advantage count by p / p_behaviour, at most 1.

    It makes up for tokens that other weights sampled by itself, and goes without a correction."""
    advantage_T, log_ratio_T = advantages(batch), _log_ratio(logp_T, batch)
    to_behaviour_T = (logp_T.detach() - batch.behaviour_logp).masked_fill(~batch.loss_mask, 0.0)
    taper_T = spread(ratio(trajectory_sum(to_behaviour_T, batch)).clamp(max=1.0), batch)
    factor_T = torch.where(advantage_T < 0, taper_T, 1.0)
    return TokenLoss(-advantage_T * factor_T * _inside(logp_T, batch), {"taper": factor_T, **_drift(log_ratio_T)})


@register.loss("kimi")
def kimi(logp_T: Tensor, batch: Batch, *, tau: PositiveFloat = 0.1) -> TokenLoss:
    """Kimi k1.5's objective (arXiv 2501.12599): (advantage - `tau` × the trajectory's log-ratio)² / 2 `tau`, in equal shares per token.

    Where advantages differ by token, each goes with its own token's part of the log-ratio.

    Options:
        tau: How strongly the policy is held to the weights before the step's first update.
    """
    advantage_T, log_ratio_T = advantages(batch), _log_ratio(logp_T, batch)
    tokens_N = trajectory_sum(batch.loss_mask.float(), batch).clamp(min=1)
    share_T = spread(tau / 2 * trajectory_sum(log_ratio_T, batch) ** 2 / tokens_N, batch).masked_fill(~batch.loss_mask, 0.0)
    loss_T = share_T - advantage_T * log_ratio_T + advantage_T**2 / (2 * tau * spread(tokens_N, batch))
    return TokenLoss(loss_T, _drift(log_ratio_T))


@register.loss("policy_gradient")
def policy_gradient(logp_T: Tensor, batch: Batch) -> TokenLoss:
    """REINFORCE: minus advantage times log-probability, for updates on the weights that sampled the tokens."""
    return TokenLoss(-advantages(batch) * _inside(logp_T, batch), _drift(_log_ratio(logp_T, batch)))


@register.loss("cross_entropy")
def cross_entropy(logp_T: Tensor, batch: Batch) -> TokenLoss:
    """Minus the log-probability: imitation of the tokens in the loss mask."""
    logp_T = _inside(logp_T, batch)
    return TokenLoss(-logp_T, {"token_probability": logp_T.detach().exp()})


def advantages(batch: Batch) -> Tensor:
    """[T], 0 outside the mask."""
    if batch.advantages is None:
        raise ValueError("this loss needs `batch.advantages`; the batch has none. Imitation without rewards is loss 'cross_entropy'.")
    return batch.advantages.masked_fill(~batch.loss_mask, 0.0)


def ratio(log_ratio: Tensor) -> Tensor:
    """Of any shape: the ratio, always finite."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _clipped(
    ratio_T: Tensor, log_ratio_T: Tensor, batch: Batch, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """The larger of the plain and the clipped surrogate's loss."""
    advantage_T = advantages(batch)
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(plain_T, clipped_T)
    stopped_T = clipped_T > plain_T
    if dual_clip is not None:
        most_T = torch.where(advantage_T < 0, -advantage_T * dual_clip, torch.inf)
        stopped_T = stopped_T | (loss_T > most_T)
        loss_T = torch.minimum(loss_T, most_T)
    return TokenLoss(loss_T, {"clip_fraction": stopped_T.float(), **_drift(log_ratio_T)})


def _inside(logp_T: Tensor, batch: Batch) -> Tensor:
    """[T], 0 outside the mask."""
    return logp_T.masked_fill(~batch.loss_mask, 0.0)


def _log_ratio(logp_T: Tensor, batch: Batch) -> Tensor:
    """[T] log-ratio to the weights before the step's first update, 0 outside the mask."""
    assert batch.old_logp is not None, "a trainer fills in `old_logp` before it calls a loss"
    return (logp_T - batch.old_logp).masked_fill(~batch.loss_mask, 0.0)


def _drift(log_ratio_T: Tensor) -> dict[str, Tensor]:
    """How far the policy has moved from `old_logp`."""
    log_ratio_T = log_ratio_T.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return {"ratio": log_ratio_T.exp(), "approx_kl": torch.expm1(log_ratio_T) - log_ratio_T}
