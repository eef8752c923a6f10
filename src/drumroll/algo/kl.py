"""Distance to the reference model, token by token, and how it joins a loss.

With r = p_ref / p at a sampled token, the estimators of KL(p ‖ p_ref) are k1 = -log r, k2 = (log r)² / 2 and
k3 = r - 1 - log r. k1 and k3 are unbiased values. As a term of the loss k2's and k3's gradients pull towards the reference,
while k1's own gradient is zero in expectation: use it to report, or with advantages.
Shape suffixes: T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from drumroll.algo.loss import Loss
from drumroll.types import Batch, TokenLoss

Estimator = Literal["k1", "k2", "k3"]


def k1(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """Log-ratio: unbiased, of either sign."""
    return logp_T - ref_logp_T


def k2(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """Half the squared log-ratio: positive, slightly biased."""
    return (logp_T - ref_logp_T) ** 2 / 2


def k3(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """Unbiased and positive."""
    log_ratio_T = ref_logp_T - logp_T
    return torch.expm1(log_ratio_T) - log_ratio_T


ESTIMATORS: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def with_kl(loss: Loss, coef: float, estimator: Estimator = "k3") -> Loss:
    """The loss plus `coef` times the KL to `batch.ref_logp`, reported as `kl`."""
    estimate = ESTIMATORS[estimator]

    def loss_with_kl(logp_T: Tensor, batch: Batch) -> TokenLoss:
        if batch.ref_logp is None:
            raise ValueError("a KL term needs `batch.ref_logp`, the reference model's log-probabilities; the batch has none")
        outside_T = ~batch.loss_mask
        kl_T = estimate(logp_T.masked_fill(outside_T, 0.0), batch.ref_logp.masked_fill(outside_T, 0.0))
        inner = loss(logp_T, batch)
        return TokenLoss(inner.loss + coef * kl_T, {**inner.metrics, "kl": kl_T.detach()})

    return loss_with_kl
