"""Losses and KL estimators against loops written from their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from drumroll.algo.kl import ESTIMATORS, with_kl
from drumroll.algo.loss import cross_entropy, policy_gradient, ppo_clip
from drumroll.text.packing import pack_demonstrations
from drumroll.types import Batch


@pytest.fixture
def scored() -> tuple[torch.Tensor, Batch]:
    generator = torch.Generator().manual_seed(3)
    batch = pack_demonstrations([([1, 2], [3, 4, 5]), ([1], [2, 3]), ([1, 2, 3], [4])])
    size = batch.num_tokens

    def logp() -> torch.Tensor:
        return -torch.rand(size, generator=generator) * 3 * batch.loss_mask

    batch = batch.with_fields(advantages=torch.randn(size, generator=generator) * batch.loss_mask, old_logp=logp(), ref_logp=logp())
    return logp().requires_grad_(), batch


def test_ppo_clip(scored: tuple[torch.Tensor, Batch]) -> None:
    logp, batch = scored
    outcome = ppo_clip(logp, batch, clip_low=0.1, clip_high=0.3)
    assert batch.advantages is not None
    assert batch.old_logp is not None
    values, losses = logp.tolist(), outcome.loss.tolist()
    for t in range(batch.num_tokens):
        if not batch.loss_mask[t]:
            assert losses[t] == 0
            continue
        ratio = math.exp(values[t] - float(batch.old_logp[t]))
        advantage = float(batch.advantages[t])
        clipped = min(max(ratio, 0.9), 1.3)
        assert losses[t] == pytest.approx(-min(ratio * advantage, clipped * advantage), rel=1e-5)
        assert bool(outcome.metrics["clip_fraction"][t]) == (clipped * advantage < ratio * advantage)
        assert float(outcome.metrics["ratio"][t]) == pytest.approx(ratio, rel=1e-5)
        assert float(outcome.metrics["approx_kl"][t]) == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)
    (gradient,) = torch.autograd.grad(outcome.loss.sum(), logp)
    clipped_tokens = outcome.metrics["clip_fraction"].bool()
    assert clipped_tokens.any()
    assert gradient[clipped_tokens].abs().max() == 0


def test_policy_gradient_and_cross_entropy(scored: tuple[torch.Tensor, Batch]) -> None:
    logp, batch = scored
    assert batch.advantages is not None
    torch.testing.assert_close(policy_gradient(logp, batch).loss, -batch.advantages * logp * batch.loss_mask)
    torch.testing.assert_close(cross_entropy(logp, batch).loss, -logp * batch.loss_mask)


def test_kl_estimators_average_to_the_kl() -> None:
    """Over all tokens of a vocabulary, weighted by the policy, k1 and k3 are the KL, and k2 is near it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator)
    logp = logits.log_softmax(-1)
    ref_logp = (logits + 0.1 * torch.randn(50, generator=generator)).log_softmax(-1)
    kl = float((logp.exp() * (logp - ref_logp)).sum())
    means = {name: float((logp.exp() * estimate(logp, ref_logp)).sum()) for name, estimate in ESTIMATORS.items()}
    assert means["k1"] == pytest.approx(kl, rel=1e-4)
    assert means["k3"] == pytest.approx(kl, rel=1e-4)
    assert means["k2"] == pytest.approx(kl, rel=0.2)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_with_kl_adds_to_any_loss_and_reports(scored: tuple[torch.Tensor, Batch], estimator: str) -> None:
    logp, batch = scored
    plain = ppo_clip(logp, batch)
    outcome = with_kl(ppo_clip, 0.5, estimator)(logp, batch)  # type: ignore[arg-type]
    assert batch.ref_logp is not None
    kl = torch.where(batch.loss_mask, ESTIMATORS[estimator](logp, batch.ref_logp), 0.0)  # type: ignore[index]
    torch.testing.assert_close(outcome.loss, plain.loss + 0.5 * kl)
    assert set(outcome.metrics) == {*plain.metrics, "kl"}
    assert not outcome.metrics["kl"].requires_grad
    with pytest.raises(ValueError, match="ref_logp"):
        with_kl(ppo_clip, 0.5)(logp, batch.with_fields(ref_logp=None))


def test_a_loss_without_advantages_says_so(scored: tuple[torch.Tensor, Batch]) -> None:
    logp, batch = scored
    with pytest.raises(ValueError, match="cross_entropy"):
        ppo_clip(logp, batch.with_fields(advantages=None))
