"""Losses that learn from preferences. Pure functions of log-probabilities (or scores) and a `Batch`, registered as `preference_loss`.

Such a loss compares whole replies, so it is no sum of losses of single tokens. It is computed from the sums over each reply and stands on
one token: the last one of the pair's chosen reply, or of the reply itself where there are no pairs. That token alone has a weight
(`preference_weights`), 1 over the pairs of the update, which is fixed before the batch is split; the gradient reaches every token through
the sums. A batch of pairs `keeps_groups`, so that both replies of a pair are in the same pass, and splitting it changes nothing.

In such a batch the chosen and the rejected reply of a pair have the same `group_index` and the rewards +1 and -1; replies without a
partner have +1 if they are wanted and -1 if not. `baseline` is subtracted from a reply's score before it is compared: a margin, or KTO's
reference point.

What a loss needs: `pairs`, `ref_logp`, `reference_point` (in `baseline`), or `scores`: a model with a scalar head, whose score of a whole
reply stands at the reply's last token and takes the place of the log-probabilities.

Shape suffixes: T tokens, N replies, P pairs of the batch. Gradients outside the loss mask are exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from drumroll.algo.kl import distance
from drumroll.algo.loss import Loss
from drumroll.algo.segments import trajectory_mean, trajectory_of, trajectory_sum
from drumroll.config.models import NonNegativeFloat, PreferenceConfig
from drumroll.registry import REGISTRY, bind, register
from drumroll.types import Batch, TokenLoss

_ROUNDING = 1e-5
"""A policy and a reference with the same weights differ by less, when they are divided over other ranks or read by other code."""


@register.preference_loss("dpo", needs=("pairs", "ref_logp"))
def dpo(
    logp_T: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
) -> TokenLoss:
    """DPO (arXiv 2305.18290): logistic loss of β × the difference of log-ratios.

    Options:
        beta: How strongly the policy is held to the reference.
        label_smoothing: Share of the labels that are expected to be wrong.
    """
    log_ratio_N = trajectory_sum(distance(logp_T, batch, "k1"), batch)
    pairs = _compare(beta * log_ratio_N, batch)
    loss_P = -(1 - label_smoothing) * logsigmoid(pairs.gap) - label_smoothing * logsigmoid(-pairs.gap)
    return _outcome(loss_P, pairs, batch, logp_T)


@register.preference_loss("ipo", needs=("pairs", "ref_logp"))
def ipo(logp_T: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, per_token: bool = False) -> TokenLoss:
    """IPO (arXiv 2310.12036): squared distance of the difference of log-ratios from 1 / 2β.

    Options:
        beta: How strongly the policy is held to the reference.
        per_token: Take each reply's mean log-ratio per token, and not the sum.
    """
    log_ratio_T = distance(logp_T, batch, "k1")
    pairs = _compare(trajectory_mean(log_ratio_T, batch) if per_token else trajectory_sum(log_ratio_T, batch), batch)
    return _outcome((pairs.gap - 1 / (2 * beta)) ** 2, pairs, batch, logp_T)


@register.preference_loss("simpo", needs=("pairs",))
def simpo(logp_T: Tensor, batch: Batch, *, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0) -> TokenLoss:
    """SimPO (arXiv 2405.14734): logistic loss of β × the difference of mean log-probabilities, which is to exceed `gamma`; no reference.

    Options:
        beta: Factor of the difference.
        gamma: Margin by which the chosen reply is to be ahead, after `beta`.
    """
    pairs = _compare(beta * trajectory_mean(logp_T, batch), batch)
    return _outcome(-logsigmoid(pairs.gap - gamma), pairs, batch, logp_T)


@register.preference_loss("kto", needs=("ref_logp", "reference_point"))
def kto(
    logp_T: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    desirable_weight: NonNegativeFloat = 1.0,
    undesirable_weight: NonNegativeFloat = 1.0,
) -> TokenLoss:
    """KTO (arXiv 2402.01306): single replies, wanted or not, each compared with a reference point, the KL of replies to other prompts.

    Options:
        beta: How strongly the policy is held to the reference.
        desirable_weight: Weight of the replies that are wanted.
        undesirable_weight: Weight of the others.
    """
    if batch.baseline is None:
        raise ValueError("loss 'kto' needs `batch.baseline`, the reference point; the batch has none")
    sign_N = batch.rewards.sign()
    score_N = beta * (trajectory_sum(distance(logp_T, batch, "k1"), batch) - batch.baseline)
    weight_N = torch.where(sign_N > 0, desirable_weight, undesirable_weight)
    loss_N = weight_N * (1 - (sign_N * score_N).sigmoid())
    at_N = last_tokens(batch)
    score_N = score_N.detach()
    reported = {
        "accuracy": _share_above(sign_N * score_N),
        "margin": sign_N * score_N,
        "score": score_N,
        "reference_point": batch.baseline,
    }
    return TokenLoss(_stand(loss_N, at_N, batch), weighted={name: _stand(value, at_N, batch) for name, value in reported.items()})


@register.preference_loss("reward_model", needs=("pairs", "scores"))
def reward_model(score_T: Tensor, batch: Batch, *, centre_coef: NonNegativeFloat = 0.0) -> TokenLoss:
    """Bradley-Terry: logistic loss of the difference of scores.

    Options:
        centre_coef: Weight of the squared sum of both scores, which keeps their mean near 0.
    """
    pairs = _compare(score_T.masked_fill(~batch.loss_mask, 0.0)[last_tokens(batch)], batch)
    loss_P = -logsigmoid(pairs.gap) + centre_coef * (pairs.chosen_score + pairs.rejected_score) ** 2
    return _outcome(loss_P, pairs, batch)


@dataclass(frozen=True)
class Preference:
    """The `preference` section of a config as functions. A process that needs it builds it from the section."""

    loss: Loss
    needs: frozenset[str]


def build_preference(cfg: PreferenceConfig) -> Preference:
    """Resolve the section's `kind` and fill in its options."""
    entry = REGISTRY.lookup("preference_loss", cfg.kind)
    options = cfg.model_dump(exclude=set(PreferenceConfig.model_fields))
    return Preference(bind(entry, options), frozenset(entry.needs))


def preference_weights(batch: Batch) -> Tensor:
    """[T] of one whole update: all pairs, or replies where there are no pairs, count the same, on the token that their loss stands on."""
    at = last_tokens(batch)
    if batch.keeps_groups:
        at = at[batch.rewards > 0]
    return torch.zeros(batch.num_tokens).index_fill(0, at, 1 / max(1, len(at)))


def last_tokens(batch: Batch) -> Tensor:
    """[N] where the last token of each trajectory's loss mask lies in the batch."""
    place_T = torch.arange(batch.num_tokens, device=batch.offsets.device) * batch.loss_mask
    return place_T.new_zeros(batch.num_trajectories).scatter_reduce(0, trajectory_of(batch), place_T, "amax")


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a batch and their scores, with gradient."""

    chosen: Tensor
    """[P] int64: number of the chosen trajectory."""
    rejected: Tensor
    """[P] int64"""
    chosen_score: Tensor
    """[P]"""
    rejected_score: Tensor
    """[P]"""
    gap: Tensor
    """[P] by how much the chosen one is ahead, less the baseline."""


def _compare(score_N: Tensor, batch: Batch) -> _Pairs:
    chosen, rejected = ((batch.rewards * sign > 0).nonzero().squeeze(1) for sign in (1, -1))
    chosen, rejected = (side[batch.group_index[side].argsort()] for side in (chosen, rejected))
    if not torch.equal(batch.group_index[chosen], batch.group_index[rejected]) or len(chosen) + len(rejected) < batch.num_trajectories:
        raise ValueError("a loss of pairs needs one chosen (reward 1) and one rejected (reward -1) trajectory in each group")
    level_N = score_N if batch.baseline is None else score_N - batch.baseline
    return _Pairs(chosen, rejected, score_N[chosen], score_N[rejected], level_N[chosen] - level_N[rejected])


def _outcome(loss_P: Tensor, pairs: _Pairs, batch: Batch, logp_T: Tensor | None = None) -> TokenLoss:
    """The pairs' losses where they stand, and what to report of each pair."""
    chosen_P, rejected_P = pairs.chosen_score.detach(), pairs.rejected_score.detach()
    reported = {
        "accuracy": _share_above(chosen_P - rejected_P),
        "margin": chosen_P - rejected_P,
        "chosen_score": chosen_P,
        "rejected_score": rejected_P,
    }
    if logp_T is not None:
        logp_N = trajectory_sum(logp_T.detach().masked_fill(~batch.loss_mask, 0.0), batch)
        reported |= {"chosen_logp": logp_N[pairs.chosen], "rejected_logp": logp_N[pairs.rejected]}
    at_P = last_tokens(batch)[pairs.chosen]
    return TokenLoss(_stand(loss_P, at_P, batch), weighted={name: _stand(value, at_P, batch) for name, value in reported.items()})


def _stand(value: Tensor, at: Tensor, batch: Batch) -> Tensor:
    """[T] the values at their tokens, 0 elsewhere."""
    return value.new_zeros(batch.num_tokens).index_copy(0, at, value)


def _share_above(gap: Tensor) -> Tensor:
    """1 where it is positive, 0 where it is negative; equal is a coin's toss."""
    return (gap > _ROUNDING).float() + 0.5 * (gap.abs() <= _ROUNDING).float()
