"""The `algo` section of a config as functions: what a pipeline asks for, and what a worker rebuilds from the same section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from drumroll.algo.advantage import broadcast
from drumroll.algo.aggregate import Aggregation, token_weights
from drumroll.algo.correction import with_correction
from drumroll.algo.kl import with_kl
from drumroll.algo.loss import Loss
from drumroll.config.models import AlgoConfig
from drumroll.registry import REGISTRY, bind
from drumroll.types import Batch


@dataclass(frozen=True)
class Algorithm:
    """Advantage, loss and token weights, with their options filled in.

    Not picklable by design: a process that needs it builds it from `AlgoConfig.model_validate(cfg.model_dump())`.
    """

    estimate: Callable[[Batch], Tensor]
    """The registered advantage, [N] or [T]."""
    loss: Loss
    """The registered loss times the correction's factors, plus the KL term; both where the section has them."""
    aggregation: Aggregation
    needs: frozenset[str]
    """Fields that somebody must fill in before the update, besides the advantages: for example `ref_logp`."""

    def advantage(self, batch: Batch) -> Tensor:
        """[T] float32, 0 outside the loss mask."""
        return broadcast(self.estimate(batch), batch)

    def weights(self, batch: Batch, constant_length: int | None = None) -> Tensor:
        """[T] float32 of one whole update. `constant_length` is the budget of one reply; the aggregation of that name needs it."""
        return token_weights(batch, self.aggregation, constant_length)


def build_algorithm(cfg: AlgoConfig) -> Algorithm:
    """Resolve the section's names and fill in their options."""
    advantage = REGISTRY.lookup("advantage", cfg.advantage.kind)
    loss = REGISTRY.lookup("loss", cfg.loss.kind)
    needs = {*advantage.needs, *loss.needs}
    loss_function: Loss = bind(loss, cfg.loss.model_dump(exclude={"kind"}))
    if cfg.correction is not None:
        correction = REGISTRY.lookup("correction", cfg.correction.kind)
        needs |= {*correction.needs}
        loss_function = with_correction(loss_function, bind(correction, cfg.correction.model_dump(exclude={"kind"})))
    if cfg.kl is not None:  # after the correction, which is for the surrogate alone
        needs.add("ref_logp")
        loss_function = with_kl(loss_function, cfg.kl.coef, cfg.kl.estimator)
    return Algorithm(
        estimate=bind(advantage, cfg.advantage.model_dump(exclude={"kind"})),
        loss=loss_function,
        aggregation=cfg.aggregation,
        needs=frozenset(needs),
    )
