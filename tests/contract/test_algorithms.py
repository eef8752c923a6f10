"""What every registered advantage, loss and off-policy correction must do, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import random_batches
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import Play
from torch import Tensor

from drumroll.algo.algorithm import Algorithm, build_algorithm
from drumroll.algo.loss import needs_of
from drumroll.algo.segments import spread
from drumroll.config.models import AlgoConfig
from drumroll.registry import REGISTRY
from drumroll.text.packing import pack_demonstrations, select
from drumroll.types import Batch, Turns


def without_teacher(family: str) -> list[str]:
    """Those that learn from a teacher have their own suite, `tests/unit/algo/test_distill.py`."""
    return [name for name in REGISTRY.names(family) if not any("teacher" in need for need in REGISTRY.lookup(family, name).needs)]


ADVANTAGES = without_teacher("advantage")
LOSSES = without_teacher("loss")
CORRECTIONS = REGISTRY.names("correction")
AGGREGATIONS = ["token_mean", "sequence_mean", "group_mean", "constant_length"]
COMBINATIONS = [
    (loss, correction) for loss in LOSSES for correction in (None, *CORRECTIONS) if loss != "topr" or correction in (None, "none")
]
"""Every loss with every correction that it goes with."""

GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3])
REWARDS = torch.tensor([1.0, 0, 0, 1, 0.5, 0.25, 1, 0, 0.1, 0.1, 0.1, 1.0])


def make_batch() -> Batch:
    """Twelve trajectories in four groups (one of a single trajectory, one without variance), observations between the replies.

    Their tokens were sampled by other weights than those that the update starts from."""
    generator = torch.Generator().manual_seed(1)
    batch = pack_demonstrations([([1, 2, 3], [4] * (2 + number % 4)) for number in range(12)])
    mask = batch.loss_mask & (batch.position_ids != 4)
    size, starts = batch.num_tokens, batch.offsets[:-1] + 3
    return batch.with_fields(
        loss_mask=mask,
        group_index=GROUPS,
        rewards=REWARDS,
        behaviour_logp=-3 * torch.rand(size, generator=generator) * mask,
        advantages=torch.randn(size, generator=generator) * mask,
        values=torch.rand(size, generator=generator) * mask,
        temperature=torch.tensor([0.0, 1, 1, 1] * 3),
        old_logp=-torch.rand(size, generator=generator) * mask,
        ref_logp=-torch.rand(size, generator=generator) * mask,
    ).with_fields(turns=Turns(starts, batch.offsets[1:], torch.arange(12), REWARDS, GROUPS))


def section(loss: str, correction: str | None = None, **more: Any) -> AlgoConfig:
    return AlgoConfig.model_validate({"loss": loss, "correction": correction, **more})


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
    assert batch.turns is not None
    same = torch.full((12,), 0.1)
    flat = batch.with_fields(rewards=same, turns=replace(batch.turns, rewards=same), values=torch.full((batch.num_tokens,), 0.1))
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
@pytest.mark.parametrize(("kind", "correction"), COMBINATIONS)
def test_masked_tokens_have_exactly_zero_gradient(kind: str, kl: str | None, correction: str | None) -> None:
    """Whatever stands in the fields there."""
    loss = build_algorithm(section(kind, correction, **({"kl": {"coef": 0.1, "estimator": kl}} if kl else {}))).loss
    batch = make_batch()
    fields = {"advantages": 1e4, "old_logp": 1e4, "ref_logp": 1e4, "behaviour_logp": -1e4}
    wild = {name: getattr(batch, name).masked_fill(~batch.loss_mask, value) for name, value in fields.items()}
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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("kind", "correction"), COMBINATIONS)
def test_splitting_and_permuting_an_update_changes_nothing(kind: str, aggregation: str, correction: str | None) -> None:
    algo = build_algorithm(section(kind, correction, aggregation=aggregation, kl={"coef": 0.1}))
    batch = make_batch()
    batch = batch.with_fields(weight=algo.weights(batch, 8), token_version=torch.arange(batch.num_tokens))
    logp = make_logp(batch)
    whole = torch.autograd.grad((algo.loss(logp, batch).loss * batch.weight).sum(), logp)[0]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5)).tolist()
    pieced = torch.zeros_like(whole)
    for indices in (order[:5], order[5:6], [], order[6:]):
        part = select(batch, indices)
        part_logp = logp.detach()[part.token_version].requires_grad_()
        loss = (algo.loss(part_logp, part).loss * part.weight).sum()
        pieced[part.token_version] = torch.autograd.grad(loss, part_logp)[0]
    assert torch.equal(pieced, whole)


@pytest.mark.parametrize(("kind", "correction"), [(kind, correction) for kind, correction in COMBINATIONS if correction])
def test_a_correction_changes_nothing_where_the_tokens_are_of_the_weights_being_trained(kind: str, correction: str) -> None:
    batch = make_batch()
    batch = batch.with_fields(behaviour_logp=batch.old_logp)
    plain, corrected = (build_algorithm(section(kind, name)).loss(make_logp(batch), batch) for name in (None, correction))
    assert torch.equal(corrected.loss, plain.loss)
    assert torch.equal(corrected.metrics["correction_weight"], torch.ones(batch.num_tokens))
    assert not corrected.metrics["correction_truncated"].any()


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_multiplies_the_surrogate_by_constants_and_leaves_the_kl_alone(correction: str) -> None:
    batch = make_batch()
    logp = make_logp(batch)
    kl = {"coef": 0.1}
    plain, corrected, plain_kl, corrected_kl = (
        build_algorithm(section("ppo_clip", name, kl=term)).loss(logp, batch) for term in (None, kl) for name in (None, correction)
    )
    factor = corrected.metrics["correction_weight"]
    assert factor.isfinite().all()
    assert (factor >= 0).all()
    assert torch.equal(factor[~batch.loss_mask], torch.ones(int((~batch.loss_mask).sum())))
    torch.testing.assert_close(corrected.loss, factor * plain.loss)
    torch.testing.assert_close(corrected_kl.loss - corrected.loss, plain_kl.loss - plain.loss)
    gradient, expected = (torch.autograd.grad(value.sum(), logp, retain_graph=True)[0] for value in (corrected.loss, factor * plain.loss))
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("distance", [1e3, -1e3])
def test_a_correction_stays_finite_however_far_the_weights_have_moved(correction: str, distance: float) -> None:
    batch = make_batch()
    assert batch.old_logp is not None
    far = batch.with_fields(behaviour_logp=batch.old_logp - distance)
    logp = make_logp(batch)
    outcome = build_algorithm(section("ppo_clip", correction)).loss(logp, far)
    assert outcome.loss.isfinite().all()
    assert outcome.metrics["correction_weight"].isfinite().all()
    assert torch.autograd.grad(outcome.loss.sum(), logp)[0].isfinite().all()


def test_an_algorithm_is_rebuilt_from_its_dumped_section() -> None:
    cfg = AlgoConfig.model_validate(
        {
            "advantage": {"kind": "grpo", "scale_by_std": False},
            "loss": {"kind": "ppo_clip", "clip_high": 0.28},
            "kl": {"coef": 0.01},
            "correction": {"kind": "truncated_is", "cap": 1.5},
        }
    )
    assert AlgoConfig.model_validate(cfg.model_dump()).model_dump() == cfg.model_dump()
    here, there = build_algorithm(cfg), build_algorithm(AlgoConfig.model_validate(cfg.model_dump()))
    batch = make_batch()
    logp = make_logp(batch)
    assert torch.equal(here.advantage(batch), there.advantage(batch))
    assert torch.equal(here.loss(logp, batch).loss, there.loss(logp, batch).loss)
    assert here.needs == there.needs == {"groups", "ref_logp"}
    assert float(there.loss(logp, batch).metrics["correction_weight"].max()) == 1.5
    assert build_algorithm(AlgoConfig()).needs == {"groups"}
    clipped = build_algorithm(AlgoConfig.model_validate({"loss": {"kind": "ppo_clip", "clip_high": 0.01}})).loss
    assert not torch.equal(clipped(logp, batch).loss, build_algorithm(AlgoConfig()).loss(logp, batch).loss)


def everything(advantage: str, loss: str, correction: str | None, aggregation: str = "token_mean") -> Algorithm:
    """With all that can be added to a loss."""
    extra = {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "masks": {"sequence_ratio": [0.5, 2.0]}, "aggregation": aggregation}
    return build_algorithm(section(loss, correction, advantage=advantage, **extra))


def update(algo: Algorithm, batch: Batch) -> tuple[Tensor, Batch]:
    """Log-probabilities and the batch of a whole update."""
    logp, batch = random_batches.take_logp(batch)
    batch = batch.with_fields(advantages=algo.advantage(batch))
    return logp, batch.with_fields(weight=algo.weights(batch, 8), token_version=torch.arange(batch.num_tokens))


def gradient(algo: Algorithm, logp: Tensor, batch: Batch) -> Tensor:
    total = (algo.loss(logp, batch).loss * batch.weight).sum()
    assert total.isfinite()
    return torch.autograd.grad(total, logp)[0]


def by_play(value: Tensor, batch: Batch, order: list[int]) -> list[list[float]]:
    """Values of tokens by the number of their play, in the order of the numbers."""
    bounds = batch.offsets.tolist()
    places = sorted(range(len(order)), key=order.__getitem__)
    return [value[bounds[place] : bounds[place + 1]].tolist() for place in places]


assert_near = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@given(random_batches.plays, st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_an_advantage_of_any_batch(advantage: str, played: list[Play], rng: Any) -> None:
    """Finite, 0 outside the mask, the same however the batch is packed, and 0 where nothing was better than expected."""
    algo = build_algorithm(section("ppo_clip", advantage=advantage))
    batch = random_batches.make(played, 1)
    got = algo.advantage(batch)
    assert got.isfinite().all()
    assert not got[~batch.loss_mask].any()
    order = rng.sample(range(len(played)), len(played))
    repacked = random_batches.make(played, 1, order)
    for one, other in zip(by_play(got, batch, list(range(len(played)))), by_play(algo.advantage(repacked), repacked, order), strict=True):
        assert_near(torch.tensor(one), torch.tensor(other))
    assert batch.turns is not None
    dull = batch.with_fields(
        rewards=torch.full_like(batch.rewards, 0.3),
        turns=replace(batch.turns, rewards=torch.zeros_like(batch.turns.rewards)),
        values=torch.full_like(batch.behaviour_logp, 0.3),
    )
    if advantage not in ("gigpo", "step_level"):  # which compare turns: those of a batch without rewards of turns
        assert not algo.advantage(dull).any()
    assert not algo.advantage(dull.with_fields(rewards=torch.zeros_like(batch.rewards), values=torch.zeros(batch.num_tokens))).any()


@pytest.mark.parametrize(("loss", "correction"), COMBINATIONS)
@given(random_batches.plays, st.sampled_from(ADVANTAGES), st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_an_update_of_any_batch(loss: str, correction: str | None, played: list[Play], advantage: str, aggregation: str, rng: Any) -> None:
    """Packing it differently and splitting it into passes of whole trajectories changes nothing; masked tokens learn nothing."""
    algo = everything(advantage, loss, correction, aggregation)
    logp, batch = update(algo, random_batches.make(played, 2))
    whole = gradient(algo, logp, batch)
    assert whole.isfinite().all()
    assert not whole[~batch.loss_mask].any()
    order = rng.sample(range(len(played)), len(played))
    other_logp, repacked = update(algo, random_batches.make(played, 2, order))
    again = gradient(algo, other_logp, repacked)
    for one, other in zip(by_play(whole, batch, list(range(len(played)))), by_play(again, repacked, order), strict=True):
        assert_near(torch.tensor(one), torch.tensor(other))
    cut = rng.randint(0, len(played))
    pieced = torch.zeros_like(whole)
    for indices in (order[:cut], order[cut:]):
        part = select(batch, indices)
        pieced[part.token_version] = gradient(algo, logp.detach()[part.token_version].requires_grad_(), part)
    torch.testing.assert_close(pieced, whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_with_every_loss_and_correction(advantage: str) -> None:
    """On a batch with log-ratios far beyond use, and on one of which nothing is in the loss mask."""
    played: list[Play] = [(number % 3, [1 + number % 3] * (1 + number % 2), float(number % 4) / 2, number < 3) for number in range(9)]
    far = random_batches.make(played, 3, reach=1e4)
    nothing = far.with_fields(loss_mask=torch.zeros_like(far.loss_mask))
    for loss, correction in COMBINATIONS:
        algo = everything(advantage, loss, correction)
        for batch in (far, nothing, select(far, [])):
            logp, batch = update(algo, batch)
            learnt = gradient(algo, logp, batch)
            assert learnt.isfinite().all(), (loss, correction)
            assert not learnt[~batch.loss_mask].any(), (loss, correction)
            for name, value in algo.loss(logp, batch).metrics.items():
                assert value.isfinite().all(), name


def test_an_entropy_bonus_is_asked_of_the_trainer_and_masked() -> None:
    plain, with_bonus = (build_algorithm(section("ppo_clip", **extra)) for extra in ({}, {"entropy_coef": 0.5}))
    assert not needs_of(plain.loss)
    assert set(needs_of(with_bonus.loss)) == {"entropy"}
    batch = make_batch()
    entropy = torch.rand(batch.num_tokens, requires_grad=True)
    logp = make_logp(batch)
    outcome = with_bonus.loss(logp, batch.with_fields(entropy=entropy))
    torch.testing.assert_close(outcome.loss, plain.loss(logp, batch).loss - 0.5 * entropy * batch.loss_mask)
    (learnt,) = torch.autograd.grad(outcome.loss.sum(), entropy)
    assert torch.equal(learnt, -0.5 * batch.loss_mask)
    with pytest.raises(ValueError, match="entropy"):
        with_bonus.loss(logp, batch)


def test_trajectories_out_of_bounds_are_rejected_with_their_kl() -> None:
    batch = make_batch()
    algo = everything("grpo", "ppo_clip", "truncated_is")
    assert batch.old_logp is not None
    near = torch.tensor([0.0, 0.0, 2.0] * 4)  # log-ratio of every token of each trajectory
    behaviour = batch.old_logp - spread(near, batch)
    outcome = algo.loss(make_logp(batch), batch.with_fields(behaviour_logp=behaviour, entropy=torch.rand(batch.num_tokens)))
    rejected = spread(near > 1, batch) & batch.loss_mask
    assert torch.equal(outcome.metrics["rejected"].bool(), rejected)
    assert not outcome.loss[rejected].any()
    assert outcome.loss[batch.loss_mask & ~rejected].all()
