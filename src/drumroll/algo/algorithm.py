"""The `algo` section of a config as functions: what a pipeline asks for, and what a worker rebuilds from the same section.

rewards ──scale──► ┐
KL ──penalise────► ┴─► advantage ──scale──► ┐
log-probabilities ─────────────────────────►┴─► loss × correction + KL - entropy bonus ──× weights──► update
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.algo.advantage import broadcast
from drumroll.algo.aggregate import token_weights
from drumroll.algo.correction import with_correction, with_rejection
from drumroll.algo.entropy import with_entropy
from drumroll.algo.kl import adapted, sampled_kl, with_kl
from drumroll.algo.loss import Loss
from drumroll.algo.scaling import Running, normalise, normalise_by
from drumroll.algo.segments import spread
from drumroll.config.models import AlgoConfig, ScalingConfig
from drumroll.registry import REGISTRY, bind
from drumroll.types import Batch, TokenLoss

Carried = Mapping[str, float]
"""What an algorithm keeps from step to step, by names that are metrics too: the KL coefficient, means and spreads of the run so far.
Empty in the beginning."""

CARRIED = "algo/"
"""How the names of carried values begin."""


def carried_by(report: Mapping[str, float]) -> dict[str, float]:
    """The carried values among a step's metrics."""
    return {name: value for name, value in report.items() if name.startswith(CARRIED)}


@dataclass(frozen=True)
class Algorithm:
    """Advantage, loss and token weights, with their options filled in.

    Not picklable by design: a process that needs it builds it from `AlgoConfig.model_validate(cfg.model_dump())`.
    """

    config: AlgoConfig
    estimate: Callable[[Batch], Tensor]
    """The registered advantage, [N] or [T]."""
    loss: Loss
    """The registered loss times the correction's factors, plus the KL term, less the entropy bonus; each where the section has it."""
    needs: frozenset[str]
    """What must be there for it, besides the advantages: for example `ref_logp` (see `Entry.needs`)."""

    def advantage(self, batch: Batch) -> Tensor:
        """[T] float32, 0 outside the loss mask."""
        return broadcast(self.estimate(batch), batch)

    def weights(self, batch: Batch, constant_length: int | None = None) -> Tensor:
        """[T] float32 of one whole update. `constant_length` is the budget of one reply; the aggregation of that name needs it."""
        return token_weights(batch, self.config.aggregation, constant_length)

    def penalised(self, batch: Batch, carried: Carried) -> tuple[Batch, Carried]:
        """The batch with the KL taken off its tokens' rewards, or with the coefficient of the KL in the loss where that changes; and,
        where it does, the coefficient of the next step."""
        kl = self.config.kl
        if kl is None or (kl.applied_to == "loss" and kl.adaptive is None):
            return batch, carried
        coef = kl.coef if kl.adaptive is None else carried.get(f"{CARRIED}kl_coef", kl.coef)
        kl_T = sampled_kl(batch, kl.estimator)
        if kl.applied_to == "reward":
            batch = batch.with_fields(token_rewards=-coef * kl_T)
        else:
            batch = batch.with_fields(kl_coef=torch.full_like(kl_T, coef))
        if kl.adaptive is None:
            return batch, carried
        if batch.loss_mask.any():
            mean = float(kl_T[batch.loss_mask].double().mean())
            coef = adapted(coef, mean, kl.adaptive.target, batch.num_trajectories, kl.adaptive.horizon)
        return batch, {**carried, f"{CARRIED}kl_coef": coef}

    def scaled_rewards(self, batch: Batch, carried: Carried) -> tuple[Tensor, Tensor, Carried]:
        """[N] rewards as the section scales them; [N] the factors that they were multiplied by on the way; and what is known of all
        rewards so far. Trajectories without tokens are compared with, but were counted before."""
        return _scaled(batch.rewards, batch.group_index, batch.offsets.diff() > 0, self.config.reward_scaling, "reward", carried)

    def scaled_advantages(self, advantage_T: Tensor, batch: Batch, carried: Carried) -> tuple[Tensor, Carried]:
        """[T] advantages as the section scales them, 0 outside the loss mask; and what is known of all advantages so far."""
        inside = batch.loss_mask.nonzero().squeeze(1)
        group_T = spread(batch.group_index, batch)
        own = torch.ones_like(inside, dtype=torch.bool)
        scaled, _, carried = _scaled(advantage_T[inside], group_T[inside], own, self.config.advantage_scaling, "advantage", carried)
        return torch.zeros_like(advantage_T).index_copy(0, inside, scaled), carried


@dataclass(frozen=True)
class ComposedLoss:
    """A loss that says what it needs (see `needs_of`)."""

    function: Loss
    needs: frozenset[str]

    def __call__(self, logp_T: Tensor, batch: Batch) -> TokenLoss:
        return self.function(logp_T, batch)


def build_algorithm(cfg: AlgoConfig) -> Algorithm:
    """Resolve the section's names and fill in their options."""
    advantage = REGISTRY.lookup("advantage", cfg.advantage.kind)
    loss = REGISTRY.lookup("loss", cfg.loss.kind)
    needs = {*advantage.needs, *loss.needs}
    function: Loss = bind(loss, cfg.loss.model_dump(exclude={"kind"}))
    if cfg.correction is not None:
        correction = REGISTRY.lookup("correction", cfg.correction.kind)
        options = cfg.correction.model_dump(exclude={"kind"})
        needs |= {*correction.needs}
        function = with_correction(function, bind(correction, options), "sequence" if options.get("level") == "sequence" else "token")
    if cfg.kl is not None:
        needs.add("ref_logp")
        if cfg.kl.applied_to == "loss":  # after the correction, which is for the surrogate alone
            function = with_kl(function, cfg.kl.coef, cfg.kl.estimator)
    if cfg.entropy_coef is not None:
        needs.add("entropy")
        function = with_entropy(function, cfg.entropy_coef)
    if cfg.masks.sequence_ratio is not None:
        function = with_rejection(function, cfg.masks.sequence_ratio)
    return Algorithm(
        config=cfg,
        estimate=bind(advantage, cfg.advantage.model_dump(exclude={"kind"})),
        loss=ComposedLoss(function, frozenset(needs & {"entropy"})),
        needs=frozenset(needs),
    )


def _scaled(
    value_K: Tensor, group_K: Tensor, is_new_K: Tensor, cfg: ScalingConfig | None, name: str, carried: Carried
) -> tuple[Tensor, Tensor, Carried]:
    """[K] the values as the section says; [K] by what they were multiplied; and what is carried, with the new ones added where needed."""
    factor_K = torch.ones_like(value_K)
    if cfg is None:
        return value_K, factor_K, carried
    if cfg.normalise == "running":
        running = Running.of(carried, f"{CARRIED}{name}").add(value_K[is_new_K])
        carried = {**carried, **running.entries(f"{CARRIED}{name}")}
        value_K, factor_K = normalise_by(value_K, running, subtract_mean=cfg.subtract_mean)
    elif cfg.normalise is not None:
        one_or_each_K = group_K if cfg.normalise == "group" else torch.zeros_like(group_K)
        value_K, factor_K = normalise(value_K, one_or_each_K, subtract_mean=cfg.subtract_mean)
    return value_K if cfg.clip is None else value_K.clamp(*cfg.clip), factor_K, carried
