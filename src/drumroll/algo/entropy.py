"""An entropy bonus: keeps the policy from settling too early. Shape suffixes: T tokens of the batch."""

from __future__ import annotations

from torch import Tensor

from drumroll.algo.loss import Loss
from drumroll.types import Batch, TokenLoss


def with_entropy(loss: Loss, coef: float) -> Loss:
    """The loss minus `coef` times `batch.entropy`, which a trainer fills in for losses that need it (`needs_of`)."""

    def loss_with_entropy(logp_T: Tensor, batch: Batch) -> TokenLoss:
        if batch.entropy is None:
            raise ValueError("an entropy bonus needs `batch.entropy`, with gradient; the batch has none")
        inner = loss(logp_T, batch)
        return TokenLoss(inner.loss - coef * batch.entropy.masked_fill(~batch.loss_mask, 0.0), inner.metrics)

    return loss_with_entropy
