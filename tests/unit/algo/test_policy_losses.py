"""Losses with ratios of whole trajectories, and those with constant factors, against loops written from their papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.algo.aggregate import token_weights
from drumroll.algo.loss import cispo, gspo, gspo_token, kimi, policy_gradient, ppo_clip, topr
from drumroll.text.packing import pack_demonstrations
from drumroll.types import Batch, TokenLoss

Token = tuple[float, float, float, float, bool]
"""logp, old_logp, behaviour_logp, advantage, in the mask."""

logps = st.floats(-3.0, 0.0, width=32)
rows = st.lists(
    st.lists(st.tuples(logps, logps, logps, st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0]), st.booleans()), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)
"""The tokens of each trajectory, behind a prompt of one."""


def batch_of(trajectories: list[list[Token]]) -> tuple[torch.Tensor, Batch]:
    batch = pack_demonstrations([([1], [2] * len(tokens)) for tokens in trajectories])
    padded = [token for tokens in trajectories for token in ((0.0, 0.0, 0.0, 0.0, False), *tokens)]
    logp, old, behaviour, advantage, inside = (torch.tensor([float(value) for value in column]) for column in zip(*padded, strict=True))
    fields = {"old_logp": old, "behaviour_logp": behaviour, "advantages": advantage}
    return logp.requires_grad_(), batch.with_fields(loss_mask=inside.bool(), **fields)


def inside(tokens: list[Token]) -> list[Token]:
    return [token for token in tokens if token[4]]


def expected_losses(trajectories: list[list[Token]], loss: Callable[[Token, list[Token]], float]) -> torch.Tensor:
    """[T]: `loss(token, the trajectory's tokens in the mask)` where the token is in the mask, 0 elsewhere."""

    def values() -> Iterator[float]:
        for tokens in trajectories:
            yield 0.0
            yield from (loss(token, inside(tokens)) if token[4] else 0.0 for token in tokens)

    return torch.tensor(list(values()))


def check(outcome: TokenLoss, expected: torch.Tensor) -> None:
    torch.testing.assert_close(outcome.loss.detach(), expected, rtol=1e-3, atol=1e-5)


@given(rows)
@settings(max_examples=40, deadline=None)
def test_dual_clip_bounds_what_a_bad_token_may_cost(trajectories: list[list[Token]]) -> None:
    def slow(token: Token, _: list[Token]) -> float:
        logp, old, _, advantage, _ = token
        ratio = math.exp(logp - old)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        return -max(surrogate, 1.5 * advantage) if advantage < 0 else -surrogate

    logp, batch = batch_of(trajectories)
    outcome = ppo_clip(logp, batch, clip_high=0.3, dual_clip=1.5)
    check(outcome, expected_losses(trajectories, slow))
    (learnt,) = torch.autograd.grad(outcome.loss.sum(), logp)
    assert not learnt[outcome.metrics["clip_fraction"].bool()].any()


def mean_ratio(tokens: list[Token]) -> float:
    return math.exp(sum(token[0] - token[1] for token in tokens) / len(tokens))


@given(rows)
@settings(max_examples=40, deadline=None)
def test_gspo_clips_one_ratio_per_trajectory(trajectories: list[list[Token]]) -> None:
    def slow(token: Token, tokens: list[Token]) -> float:
        ratio = mean_ratio(tokens)
        return -min(ratio * token[3], min(max(ratio, 0.9), 1.2) * token[3])

    logp, batch = batch_of(trajectories)
    for loss in (gspo, gspo_token):
        check(loss(logp, batch, clip_low=0.1, clip_high=0.2), expected_losses(trajectories, slow))


def test_gradients_of_gspo_and_gspo_token() -> None:
    """With one advantage per trajectory and sequence_mean they are the same: ratio × advantage / tokens, unless clipped."""
    generator = torch.Generator().manual_seed(0)
    drawn = [(-torch.rand(3, generator=generator)).tolist() for _ in range(7)]
    trajectories: list[list[Token]] = [
        [(*drawn[0], 1.0, True), (*drawn[1], 1.0, False), (*drawn[2], 1.0, True)],
        [(*drawn[3], -2.0, True), (*drawn[4], -2.0, True)],
        [(0.0, -3.0, 0.0, 1.0, True)],
    ]
    logp, batch = batch_of(trajectories)
    weight = token_weights(batch, "sequence_mean")
    one, other = (
        torch.autograd.grad((loss(logp, batch, clip_low=0.9, clip_high=9.0).loss * weight).sum(), logp)[0] for loss in (gspo, gspo_token)
    )
    expected = expected_losses(trajectories, lambda token, tokens: -mean_ratio(tokens) * token[3] / len(tokens) / 3)
    expected[-1] = 0.0  # e³ is beyond the bound
    torch.testing.assert_close(one, expected)
    torch.testing.assert_close(other, expected)
    differing = batch.with_fields(advantages=torch.arange(1.0, batch.num_tokens + 1))
    (by_token,) = torch.autograd.grad(gspo_token(logp, differing, clip_low=0.9, clip_high=99.0).loss.sum(), logp)
    ratios = expected_losses(trajectories, lambda _, tokens: mean_ratio(tokens))
    torch.testing.assert_close(by_token, -ratios * torch.arange(1.0, batch.num_tokens + 1))


@given(rows)
@settings(max_examples=40, deadline=None)
def test_cispo_weighs_by_a_constant(trajectories: list[list[Token]]) -> None:
    def factor(token: Token, _: list[Token]) -> float:
        return min(max(math.exp(token[0] - token[1]), 0.5), 2.0) * token[3]

    logp, batch = batch_of(trajectories)
    outcome = cispo(logp, batch, floor=0.5, cap=2.0)
    check(outcome, expected_losses(trajectories, lambda token, tokens: -factor(token, tokens) * token[0]))
    (learnt,) = torch.autograd.grad(outcome.loss.sum(), logp)
    torch.testing.assert_close(learnt, -expected_losses(trajectories, factor), rtol=1e-4, atol=1e-6)


@given(rows)
@settings(max_examples=40, deadline=None)
def test_topr_tapers_what_was_bad(trajectories: list[list[Token]]) -> None:
    def factor(token: Token, tokens: list[Token]) -> float:
        ratio = math.exp(sum(logp - behaviour for logp, _, behaviour, _, _ in tokens))
        return token[3] if token[3] >= 0 else min(ratio, 1.0) * token[3]

    logp, batch = batch_of(trajectories)
    outcome = topr(logp, batch)
    check(outcome, expected_losses(trajectories, lambda token, tokens: -factor(token, tokens) * token[0]))
    (learnt,) = torch.autograd.grad(outcome.loss.sum(), logp)
    torch.testing.assert_close(learnt, -expected_losses(trajectories, factor), rtol=1e-3, atol=1e-6)


@given(rows, st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=40, deadline=None)
def test_kimi_is_the_squared_distance_from_the_regularised_optimum(trajectories: list[list[Token]], tau: float) -> None:
    """Summed over a trajectory with one advantage A it is (A - tau × log-ratio)² / 2 tau."""
    trajectories = [[(*token[:3], tokens[0][3], token[4]) for token in tokens] for tokens in trajectories]
    logp, batch = batch_of(trajectories)
    loss = kimi(logp, batch, tau=tau).loss
    assert not loss[~batch.loss_mask].any()
    bounds = batch.offsets.tolist()
    expected_gradient = torch.zeros_like(logp)
    for (start, end), tokens in zip(pairwise(bounds), map(inside, trajectories), strict=True):
        if tokens:
            advantage, log_ratio = tokens[0][3], sum(token[0] - token[1] for token in tokens)
            distance = advantage - tau * log_ratio
            assert float(loss[start:end].detach().sum()) == pytest.approx(distance**2 / (2 * tau), rel=1e-3, abs=1e-4)
            expected_gradient[start:end] = -distance
    (learnt,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(learnt, expected_gradient * batch.loss_mask, rtol=1e-3, atol=1e-4)


@given(rows)
@settings(max_examples=30, deadline=None)
def test_on_the_weights_that_sampled_all_have_the_gradient_of_reinforce(trajectories: list[list[Token]]) -> None:
    """Where p, p_old and p_behaviour are the same, and every trajectory has one advantage."""
    trajectories = [[(token[0], token[0], token[0], tokens[0][3], token[4]) for token in tokens] for tokens in trajectories]
    logp, batch = batch_of(trajectories)
    weight = token_weights(batch, "sequence_mean")
    losses = (policy_gradient, ppo_clip, gspo, gspo_token, cispo, topr, kimi)
    first, *others = (torch.autograd.grad((loss(logp, batch).loss * weight).sum(), logp)[0] for loss in losses)
    for learnt in others:
        torch.testing.assert_close(learnt, first, rtol=1e-5, atol=1e-6)
