"""Distance to the reference model, token by token, and how it joins a loss or the rewards.

With r = p_ref / p at a sampled token, the estimators of KL(p ‖ p_ref) are k1 = -log r, k2 = (log r)² / 2 and
k3 = r - 1 - log r. k1 and k3 are unbiased values. As a term of the loss k2's and k3's gradients pull towards the reference,
while k1's own gradient is zero in expectation; in the rewards k1 is the one that is unbiased.
Shape suffixes: T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from drumroll.algo.loss import LARGEST_LOG_RATIO, Loss
from drumroll.types import Batch, TokenLoss

Estimator = Literal["k1", "k2", "k3"]

MOST_ERROR = 0.2
"""The adaptive coefficient takes a distance for at most this much off its target, as a share of that."""


def k1(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """Log-ratio: unbiased, of either sign."""
    return logp_T - ref_logp_T


def k2(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """Half the squared log-ratio: positive, slightly biased."""
    return (logp_T - ref_logp_T) ** 2 / 2


def k3(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """Unbiased and positive."""
    log_ratio_T = ref_logp_T - logp_T
    return torch.expm1(log_ratio_T.clamp(max=LARGEST_LOG_RATIO)) - log_ratio_T


ESTIMATORS: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def distance(logp_T: Tensor, batch: Batch, estimator: Estimator) -> Tensor:
    """[T] from the reference, 0 outside the mask; k1 is the log-ratio to it."""
    if batch.ref_logp is None:
        raise ValueError("a distance from the reference model needs `batch.ref_logp`, its log-probabilities; the batch has none")
    outside_T = ~batch.loss_mask
    return ESTIMATORS[estimator](logp_T.masked_fill(outside_T, 0.0), batch.ref_logp.masked_fill(outside_T, 0.0))


def with_kl(loss: Loss, coef: float, estimator: Estimator = "k3") -> Loss:
    """The loss plus `coef` (or `batch.kl_coef`, where there is one) times the KL to `batch.ref_logp`, reported as `kl`."""

    def loss_with_kl(logp_T: Tensor, batch: Batch) -> TokenLoss:
        kl_T = distance(logp_T, batch, estimator)
        inner = loss(logp_T, batch)
        term_T = coef * kl_T if batch.kl_coef is None else batch.kl_coef.masked_fill(~batch.loss_mask, 0.0) * kl_T
        return TokenLoss(inner.loss + term_T, {**inner.metrics, "kl": kl_T.detach()})

    return loss_with_kl


def sampled_kl(batch: Batch, estimator: Estimator) -> Tensor:
    """[T]: KL to the reference of the weights before the step's first update, or, where nobody asked those, of the ones that sampled."""
    return distance(batch.behaviour_logp if batch.old_logp is None else batch.old_logp, batch, estimator)


def adapted(coef: float, kl: float, target: float, num_trajectories: int, horizon: float) -> float:
    """The next step's coefficient (arXiv 1909.08593): larger where `kl` was above `target`, smaller where it was below."""
    error = min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR)
    return coef * (1.0 + error * min(1.0, num_trajectories / horizon))
