"""What every registered advantage and loss must do, whoever wrote it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drumroll.algo.algorithm import build_algorithm
from drumroll.config.models import AlgoConfig
from drumroll.registry import REGISTRY
from drumroll.text.packing import pack_demonstrations, select
from drumroll.types import Batch

ADVANTAGES = REGISTRY.names("advantage")
LOSSES = REGISTRY.names("loss")


def make_batch() -> Batch:
    """Twelve trajectories in four groups (one of a single trajectory, one without variance), observations between the replies."""
    generator = torch.Generator().manual_seed(1)
    batch = pack_demonstrations([([1, 2, 3], [4] * (2 + number % 4)) for number in range(12)])
    mask = batch.loss_mask & (batch.position_ids != 4)
    size = batch.num_tokens
    return batch.with_fields(
        loss_mask=mask,
        group_index=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]),
        rewards=torch.tensor([1.0, 0, 0, 1, 0.5, 0.25, 1, 0, 0.1, 0.1, 0.1, 1.0]),
        advantages=torch.randn(size, generator=generator) * mask,
        old_logp=-torch.rand(size, generator=generator) * mask,
        ref_logp=-torch.rand(size, generator=generator) * mask,
    )


def make_logp(batch: Batch) -> Tensor:
    return -torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_an_advantage_is_finite_masked_and_zero_where_there_is_nothing_to_compare(kind: str) -> None:
    batch = make_batch()
    advantage = build_algorithm(AlgoConfig.model_validate({"advantage": kind})).advantage(batch)
    assert advantage.shape == (batch.num_tokens,)
    assert advantage.isfinite().all()
    assert not advantage[~batch.loss_mask].any()
    assert advantage.any()
    flat = batch.with_fields(rewards=torch.full((12,), 0.1))
    assert not build_algorithm(AlgoConfig.model_validate({"advantage": kind})).advantage(flat).any()


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_an_advantage_does_not_depend_on_the_order_of_trajectories(kind: str) -> None:
    batch = make_batch()
    advantage = build_algorithm(AlgoConfig.model_validate({"advantage": kind})).advantage
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5)).tolist()
    permuted = select(batch, order)
    moved = select(batch.with_fields(advantages=advantage(batch)), order).advantages
    torch.testing.assert_close(advantage(permuted), moved)


@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("kind", LOSSES)
def test_masked_tokens_have_exactly_zero_gradient(kind: str, kl: str | None) -> None:
    """Whatever stands in the fields there."""
    section = {"loss": kind, **({"kl": {"coef": 0.1, "estimator": kl}} if kl else {})}
    loss = build_algorithm(AlgoConfig.model_validate(section)).loss
    batch = make_batch()
    wild = {name: getattr(batch, name).masked_fill(~batch.loss_mask, 1e4) for name in ("advantages", "old_logp", "ref_logp")}
    logp = make_logp(batch)
    outcome = loss(logp, batch.with_fields(**wild))
    assert outcome.loss.shape == (batch.num_tokens,)
    (gradient,) = torch.autograd.grad(outcome.loss.sum(), logp)
    assert not gradient[~batch.loss_mask].any()
    assert gradient[batch.loss_mask].any()
    assert gradient.isfinite().all()
    for name, value in outcome.metrics.items():
        assert value.shape == (batch.num_tokens,), name
        assert not value.requires_grad, name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("kind", LOSSES)
def test_splitting_and_permuting_an_update_changes_nothing(kind: str, aggregation: str) -> None:
    algo = build_algorithm(AlgoConfig.model_validate({"loss": kind, "aggregation": aggregation, "kl": {"coef": 0.1}}))
    batch = make_batch()
    batch = batch.with_fields(weight=algo.weights(batch, 8))
    logp = make_logp(batch)
    whole = torch.autograd.grad((algo.loss(logp, batch).loss * batch.weight).sum(), logp)[0]
    carried = batch.with_fields(behaviour_logp=logp.detach(), token_version=torch.arange(batch.num_tokens))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5)).tolist()
    pieced = torch.zeros_like(whole)
    for indices in (order[:5], order[5:6], [], order[6:]):
        part = select(carried, indices)
        part_logp = part.behaviour_logp.clone().requires_grad_()
        loss = (algo.loss(part_logp, part).loss * part.weight).sum()
        pieced[part.token_version] = torch.autograd.grad(loss, part_logp)[0]
    assert torch.equal(pieced, whole)


def test_an_algorithm_is_rebuilt_from_its_dumped_section() -> None:
    cfg = AlgoConfig.model_validate(
        {"advantage": {"kind": "grpo", "scale_by_std": False}, "loss": {"kind": "ppo_clip", "clip_high": 0.28}, "kl": {"coef": 0.01}}
    )
    assert AlgoConfig.model_validate(cfg.model_dump()).model_dump() == cfg.model_dump()
    here, there = build_algorithm(cfg), build_algorithm(AlgoConfig.model_validate(cfg.model_dump()))
    batch = make_batch()
    logp = make_logp(batch)
    assert torch.equal(here.advantage(batch), there.advantage(batch))
    assert torch.equal(here.loss(logp, batch).loss, there.loss(logp, batch).loss)
    assert here.needs == there.needs == {"ref_logp"}
    assert build_algorithm(AlgoConfig()).needs == frozenset()
    clipped = build_algorithm(AlgoConfig.model_validate({"loss": {"kind": "ppo_clip", "clip_high": 0.01}})).loss
    assert not torch.equal(clipped(logp, batch).loss, build_algorithm(AlgoConfig()).loss(logp, batch).loss)
