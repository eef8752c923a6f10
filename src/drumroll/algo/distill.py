"""Learning from a teacher: its opinion of the student's tokens as an advantage, and the distance between both distributions as a loss.

The opinion of a token is log p_teacher - log p_student, where p_student is what the token was sampled at, or the weights before the step's
first update where somebody asked those. Its mean over the student's own tokens is minus KL(student ‖ teacher), so that a policy gradient
on it takes that KL down (on-policy distillation).

A distance is between whole distributions. Of the teacher's there are only the K likeliest tokens; what is left of the probability, of
either model, counts as one further token. Distances are then at most those of the whole vocabulary, and equal to them where K is its
size. Shape suffixes: N trajectories, T tokens, P tokens in the loss mask of the batch, K tokens that the teacher names. Gradients outside
the loss mask are exactly 0. docs/distillation.md has the formulas.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from drumroll.algo.algorithm import ComposedLoss
from drumroll.algo.critic import gae
from drumroll.algo.loss import Loss, cross_entropy
from drumroll.algo.segments import spread
from drumroll.config.models import Divergence, Fraction, JsdWeight, SoftTargetsConfig
from drumroll.registry import register
from drumroll.types import Batch, TokenLoss

LEAST_LOGP = -100.0
"""Log-probabilities count as no smaller than this: a token that a model rules out costs much, and not infinitely much."""

LEAST_REST = 1e-6
"""Probability that is left beside the named tokens counts as no smaller than this: below, float32 rounds it to anything."""


@register.advantage("distill", needs=("teacher_logp",))
def distill(batch: Batch, *, discount: Fraction = 0.0) -> Tensor:
    """On-policy distillation: how much likelier the teacher finds each token than the student did, [T]; rewards play no part.

    Options:
        discount: With it, its opinion of the tokens that follow counts too, less and less. 0 takes down the KL of every single token; 1 the
            KL of whole replies, of which a token is to blame for all that follows.
    """
    opinion_T = opinion(batch)
    if discount == 0.0:
        return opinion_T
    nothing = {"rewards": torch.zeros_like(batch.rewards), "turns": None, "values": torch.zeros_like(opinion_T)}
    return gae(batch.with_fields(token_rewards=opinion_T, **nothing), gamma=discount, lam=1.0, whiten=False)


@register.loss("gkd", needs=("teacher_top_logp", "top_logp"))
def gkd(logp_T: Tensor, batch: Batch, *, divergence: Divergence = "reverse", beta: JsdWeight = 0.5) -> TokenLoss:
    """Generalised knowledge distillation (arXiv 2306.13649): distance to the teacher's distribution in each token's place.

    Advantages play no part.

    Options:
        divergence: reverse: KL(student ‖ teacher); forward: KL(teacher ‖ student); jsd: `beta` KL(teacher ‖ m) + (1 - `beta`)
            KL(student ‖ m), where m = `beta` teacher + (1 - `beta`) student.
        beta: For jsd: near 0 it is like forward, near 1 like reverse.
    """
    if batch.top_logp is None or batch.teacher_top_logp is None:
        raise ValueError(
            "loss 'gkd' needs `batch.teacher_top_logp`, which a teacher fills in, and `batch.top_logp`, which a trainer does; the batch "
            "has not both"
        )
    place_P = batch.loss_mask.nonzero().squeeze(1)
    teacher_PK = batch.teacher_top_logp[place_P]
    distance_P = distance(batch.top_logp[place_P], teacher_PK, divergence, beta)
    distance_T = torch.zeros_like(logp_T).index_copy(0, place_P, distance_P)
    mass_T = torch.zeros_like(logp_T).index_copy(0, place_P, teacher_PK.exp().sum(-1))
    return TokenLoss(distance_T, {"teacher_divergence": distance_T.detach(), "teacher_top_mass": mass_T.detach()})


def soft_targets(
    logp_T: Tensor, batch: Batch, *, weight: float = 0.5, divergence: Divergence = "forward", beta: JsdWeight = 0.5
) -> TokenLoss:
    """(1 - `weight`) × cross-entropy of the tokens + `weight` × squared temperature × distance to the teacher (arXiv 1503.02531)."""
    hard, soft = cross_entropy(logp_T, batch), gkd(logp_T, batch, divergence=divergence, beta=beta)
    scale_T = 1.0 if batch.teacher_temperature is None else spread(batch.teacher_temperature**2, batch)
    loss_T = (1 - weight) * hard.loss + weight * scale_T * soft.loss
    return TokenLoss(loss_T, {**hard.metrics, "cross_entropy": hard.loss.detach(), **soft.metrics})


def build_imitation(cfg: SoftTargetsConfig | None) -> Loss:
    """What supervised fine-tuning minimises: the cross-entropy, or with a teacher `soft_targets`."""
    if cfg is None:
        return cross_entropy
    loss = partial(soft_targets, weight=cfg.weight, divergence=cfg.divergence, beta=cfg.beta)
    return ComposedLoss(loss, frozenset({"teacher_top_logp", "top_logp"}))


def opinion(batch: Batch) -> Tensor:
    """[T] log p_teacher - log p_student of each token, 0 outside the mask."""
    if batch.teacher_logp is None:
        raise ValueError("distillation needs `batch.teacher_logp`, the teacher's log-probabilities; the batch has none")
    student_T = batch.behaviour_logp if batch.old_logp is None else batch.old_logp
    return (batch.teacher_logp.clamp(min=LEAST_LOGP) - student_T).masked_fill(~batch.loss_mask, 0.0)


def distance(student_PK: Tensor, teacher_PK: Tensor, divergence: Divergence, beta: float = 0.5) -> Tensor:
    """[P] between two distributions by the log-probabilities of K tokens, and of whatever is left."""
    student, teacher = _with_rest(student_PK), _with_rest(teacher_PK)
    if divergence == "forward":
        return _kl(teacher, student)
    if divergence == "reverse":
        return _kl(student, teacher)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _kl(logp: Tensor, other_logp: Tensor) -> Tensor:
    return (logp.exp() * (logp - other_logp)).sum(-1)


def _with_rest(logp_PK: Tensor) -> Tensor:
    """[P, K + 1]"""
    rest_P = -torch.expm1(logp_PK.logsumexp(-1))
    return torch.cat([logp_PK.clamp(min=LEAST_LOGP), rest_P.clamp(min=LEAST_REST).log()[:, None]], dim=-1)
