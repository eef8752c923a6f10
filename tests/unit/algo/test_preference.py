"""Preference losses: against slow implementations of their papers' formulas, and what must hold for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drumroll.algo.preference import build_preference, last_tokens, preference_weights
from drumroll.config.models import PreferenceConfig
from drumroll.errors import ConfigError
from drumroll.registry import REGISTRY
from drumroll.text.packing import micro_batches, pack_demonstrations, select, split_balanced
from drumroll.types import Batch, TokenLoss

KINDS = REGISTRY.built_in("preference_loss")
PAIRWISE = [kind for kind in KINDS if "pairs" in REGISTRY.lookup("preference_loss", kind).needs]
OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.4},
    "kto": {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
    "simpo": {"beta": 1.5, "gamma": 0.6},
    "reward_model": {"centre_coef": 0.05},
}
VOCABULARY = 7


def section(kind: str, **options: Any) -> PreferenceConfig:
    schema = REGISTRY.lookup("preference_loss", kind).schema(PreferenceConfig)
    return schema.model_validate({"kind": kind, "data": {"path": "none.jsonl"}, **options})


def loss_of(kind: str, **options: Any) -> Any:
    return build_preference(section(kind, **(options or OPTIONS[kind]))).loss


def make_batch(kind: str, num_pairs: int = 6, seed: int = 0, margin: bool = True) -> Batch:
    """Pairs (or twice as many single replies) of uneven lengths, with a hole in the mask of the longer ones."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    batch = pack_demonstrations([(draw(1 + n % 3), draw(2 + (5 * n) % 4)) for n in range(2 * num_pairs)])
    paired = kind in PAIRWISE
    batch = batch.with_fields(
        loss_mask=batch.loss_mask & (batch.position_ids != 3),
        rewards=torch.tensor([1.0, -1.0] * num_pairs),
        group_index=torch.arange(num_pairs).repeat_interleave(2) if paired else torch.arange(2 * num_pairs),
        keeps_groups=paired,
        ref_logp=-3 * torch.rand(batch.num_tokens, generator=generator),
    )
    assert all(mask.any() for mask in batch.loss_mask.split(batch.lengths))
    if not paired:
        batch = batch.with_fields(baseline=torch.full((2 * num_pairs,), 0.4))
    elif margin:
        batch = batch.with_fields(baseline=torch.tensor([[0.1 * n, 0.0] for n in range(num_pairs)]).flatten())
    return batch.with_fields(weight=preference_weights(batch))


def make_logp(batch: Batch, seed: int = 1) -> Tensor:
    return (-3 * torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed))).requires_grad_()


def total(outcome: TokenLoss, batch: Batch) -> Tensor:
    """As a trainer makes it."""
    return (outcome.loss * batch.weight).masked_fill(~batch.loss_mask, 0.0).sum()


# Slow implementations: loops over pairs and tokens, in Python's own numbers.


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def replies(logp: Tensor, batch: Batch) -> list[dict[str, Any]]:
    """Of every reply: log-probabilities of policy and reference at its tokens in the mask, and whether it was chosen."""
    bounds = batch.offsets.tolist()
    found = []
    for n in range(batch.num_trajectories):
        inside = [t for t in range(bounds[n], bounds[n + 1]) if batch.loss_mask[t]]
        found.append(
            {
                "policy": [float(logp[t].detach()) for t in inside],
                "reference": [float(batch.ref_logp[t]) for t in inside],  # type: ignore[index]
                "chosen": float(batch.rewards[n]) > 0,
                "group": int(batch.group_index[n]),
                "baseline": float(batch.baseline[n]) if batch.baseline is not None else 0.0,
            }
        )
    return found


def slow(kind: str, logp: Tensor, batch: Batch, options: dict[str, Any]) -> tuple[float, float, float]:
    """Mean loss, accuracy and margin."""
    every = replies(logp, batch)
    losses, right, margins = [], [], []
    if kind == "kto":
        for reply in every:
            reward = sum(reply["policy"]) - sum(reply["reference"])
            if reply["chosen"]:
                value = options["desirable_weight"] * sigmoid(options["beta"] * (reward - reply["baseline"]))
                losses.append(options["desirable_weight"] - value)
            else:
                value = options["undesirable_weight"] * sigmoid(options["beta"] * (reply["baseline"] - reward))
                losses.append(options["undesirable_weight"] - value)
            ahead = (reward - reply["baseline"]) * (1 if reply["chosen"] else -1)
            right.append(float(ahead > 0))
            margins.append(options["beta"] * ahead)
        return sum(losses) / len(losses), sum(right) / len(right), sum(margins) / len(margins)
    for group in sorted({reply["group"] for reply in every}):
        (winner,) = [reply for reply in every if reply["group"] == group and reply["chosen"]]
        (loser,) = [reply for reply in every if reply["group"] == group and not reply["chosen"]]
        wanted = winner["baseline"] - loser["baseline"]
        if kind in ("dpo", "ipo"):
            scores = [sum(reply["policy"]) - sum(reply["reference"]) for reply in (winner, loser)]
        elif kind == "simpo":
            scores = [options["beta"] * sum(reply["policy"]) / len(reply["policy"]) for reply in (winner, loser)]
        else:
            scores = [reply["policy"][-1] for reply in (winner, loser)]
        if kind == "dpo":
            scores = [options["beta"] * score for score in scores]
            smoothing = options["label_smoothing"]
            gap = scores[0] - scores[1] - wanted
            losses.append(-(1 - smoothing) * math.log(sigmoid(gap)) - smoothing * math.log(sigmoid(-gap)))
        elif kind == "ipo":
            losses.append((scores[0] - scores[1] - wanted - 1 / (2 * options["beta"])) ** 2)
        elif kind == "simpo":
            losses.append(-math.log(sigmoid(scores[0] - scores[1] - wanted - options["gamma"])))
        else:
            centring = options["centre_coef"] * (scores[0] + scores[1]) ** 2
            losses.append(-math.log(sigmoid(scores[0] - scores[1] - wanted)) + centring)
        right.append(float(scores[0] > scores[1]))
        margins.append(scores[0] - scores[1])
    return sum(losses) / len(losses), sum(right) / len(right), sum(margins) / len(margins)


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000))
def test_a_loss_is_its_papers_formula(kind: str, margin: bool, seed: int) -> None:
    batch = make_batch(kind, seed=seed, margin=margin)
    logp = make_logp(batch, seed)
    outcome = loss_of(kind)(logp, batch)
    loss, accuracy, ahead = slow(kind, logp, batch, OPTIONS[kind])
    assert float(total(outcome, batch).detach()) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert float((outcome.weighted["accuracy"] * batch.weight).sum()) == pytest.approx(accuracy)
    assert float((outcome.weighted["margin"] * batch.weight).sum()) == pytest.approx(ahead, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_formula(kind: str) -> None:
    """By finite differences of the slow one."""
    batch = make_batch(kind, num_pairs=2)
    logp = make_logp(batch)
    (gradient,) = torch.autograd.grad(total(loss_of(kind)(logp, batch), batch), logp)
    base, step = logp.detach().double(), 1e-5
    for t in range(batch.num_tokens):
        up, down = base.clone(), base.clone()
        up[t] += step
        down[t] -= step
        slope = (slow(kind, up, batch, OPTIONS[kind])[0] - slow(kind, down, batch, OPTIONS[kind])[0]) / (2 * step)
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_ipo_per_token_takes_means() -> None:
    batch = make_batch("ipo", margin=False)
    logp = make_logp(batch)
    every = replies(logp, batch)
    means = [(sum(reply["policy"]) - sum(reply["reference"])) / len(reply["policy"]) for reply in every]
    expected = [(means[n] - means[n + 1] - 1 / (2 * 0.4)) ** 2 for n in range(0, len(means), 2)]
    got = total(loss_of("ipo", beta=0.4, per_token=True)(logp, batch), batch)
    assert float(got.detach()) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


# What holds for all of them.


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_have_exactly_zero_gradient(kind: str) -> None:
    batch = make_batch(kind)
    batch = batch.with_fields(ref_logp=batch.ref_logp.masked_fill(~batch.loss_mask, 1e4))  # type: ignore[union-attr]
    logp = make_logp(batch)
    outcome = loss_of(kind)(logp, batch)
    assert outcome.loss.shape == (batch.num_tokens,)
    (gradient,) = torch.autograd.grad(total(outcome, batch), logp)
    assert not gradient[~batch.loss_mask].any()
    assert gradient.isfinite().all()
    reached = gradient != 0
    expected = batch.loss_mask if kind != "reward_model" else torch.zeros_like(reached).index_fill(0, last_tokens(batch), True)
    assert torch.equal(reached, expected)
    for name, value in outcome.weighted.items():
        assert value.shape == (batch.num_tokens,), name
        assert not value.requires_grad, name


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), ranks=st.integers(1, 4), budget=st.integers(1, 40))
def test_permuting_and_splitting_an_update_changes_nothing(kind: str, seed: int, ranks: int, budget: int) -> None:
    """Over ranks, then over micro-batches, as training does it."""
    batch = make_batch(kind, seed=seed)
    order = torch.randperm(batch.num_trajectories, generator=torch.Generator().manual_seed(seed)).tolist()
    batch = batch.with_fields(token_version=torch.arange(batch.num_tokens))
    logp = make_logp(batch, seed)
    loss = loss_of(kind)
    whole = loss(logp, batch)
    (gradient,) = torch.autograd.grad(total(whole, batch), logp)
    expected = {name: float((value * batch.weight).sum()) for name, value in whole.weighted.items()}
    pieced, sums = torch.zeros_like(gradient), dict.fromkeys(expected, 0.0)
    permuted = select(batch, order)
    assert float(permuted.weight.sum()) == pytest.approx(1.0)
    for shard in split_balanced(permuted.lengths, ranks, permuted.units):
        own = select(permuted, shard)
        for indices in micro_batches(own.lengths, budget, own.units):
            part = select(own, indices)
            part_logp = logp.detach()[part.token_version].requires_grad_()
            outcome = loss(part_logp, part)
            pieced[part.token_version] = torch.autograd.grad(total(outcome, part), part_logp)[0]
            for name, value in outcome.weighted.items():
                sums[name] += float((value * part.weight).sum())
    torch.testing.assert_close(pieced, gradient)
    assert sums == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", PAIRWISE)
def test_swapping_chosen_and_rejected_turns_the_margin_around(kind: str) -> None:
    batch = make_batch(kind, margin=False)
    swapped = batch.with_fields(rewards=-batch.rewards)
    swapped = swapped.with_fields(weight=preference_weights(swapped))
    logp = make_logp(batch)
    one, two = (loss_of(kind)(logp, each).weighted for each in (batch, swapped))

    def mean(reported: dict[str, Tensor], name: str, of: Batch) -> float:
        return float((reported[name] * of.weight).sum())

    assert mean(one, "margin", batch) == pytest.approx(-mean(two, "margin", swapped))
    assert mean(one, "accuracy", batch) == pytest.approx(1 - mean(two, "accuracy", swapped))
    assert mean(one, "chosen_score", batch) == pytest.approx(mean(two, "rejected_score", swapped))


@pytest.mark.parametrize("kind", PAIRWISE)
def test_equal_replies_teach_nothing(kind: str) -> None:
    """The gradient reaches a model's weights, here a table of log-probabilities, from both replies and cancels out."""
    batch = pack_demonstrations([([1, 2], [3, 4, 5]), ([1, 2], [3, 4, 5]), ([0], [6]), ([0], [6])]).with_fields(
        rewards=torch.tensor([1.0, -1.0, 1.0, -1.0]), group_index=torch.tensor([0, 0, 1, 1]), keeps_groups=True, ref_logp=torch.zeros(14)
    )
    batch = batch.with_fields(weight=preference_weights(batch))
    table = torch.linspace(-2, -1, VOCABULARY).requires_grad_()
    outcome = loss_of(kind, **(OPTIONS[kind] if kind != "reward_model" else {"centre_coef": 0.0}))(table[batch.token_ids], batch)
    (gradient,) = torch.autograd.grad(total(outcome, batch), table)
    torch.testing.assert_close(gradient, torch.zeros_like(table), atol=1e-7, rtol=0)
    assert float((outcome.weighted["accuracy"] * batch.weight).sum()) == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_log_probabilities_stay_finite(kind: str) -> None:
    batch = make_batch(kind)
    for sign in (1, -1):
        logp = (1e4 * sign * batch.rewards.repeat_interleave(batch.offsets.diff())).requires_grad_()
        value = total(loss_of(kind)(logp, batch), batch)
        (gradient,) = torch.autograd.grad(value, logp)
        assert value.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_without_pairs_is_nothing(kind: str) -> None:
    empty = select(make_batch(kind), [])
    assert loss_of(kind)(torch.zeros(0, requires_grad=True), empty).loss.shape == (0,)


@pytest.mark.parametrize("kind", PAIRWISE)
def test_half_a_pair_is_refused(kind: str) -> None:
    batch = make_batch(kind)
    with pytest.raises(ValueError, match="one chosen"):
        loss_of(kind)(make_logp(batch)[: batch.offsets[3]], select(batch, [0, 1, 2]))


@pytest.mark.parametrize(("kind", "field"), [("dpo", "ref_logp"), ("ipo", "ref_logp"), ("kto", "ref_logp"), ("kto", "baseline")])
def test_what_a_loss_needs_must_be_there(kind: str, field: str) -> None:
    batch = make_batch(kind)
    with pytest.raises(ValueError, match=field):
        loss_of(kind)(make_logp(batch), batch.with_fields(**{field: None}))


def test_weights_stand_on_one_token_of_each_pair() -> None:
    batch = make_batch("dpo", num_pairs=3)
    places = batch.weight.nonzero().squeeze(1).tolist()
    assert places == last_tokens(batch)[[0, 2, 4]].tolist()
    assert batch.weight[places].tolist() == pytest.approx([1 / 3] * 3)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=20),
    seed=st.integers(0, 99),
    parts=st.integers(1, 5),
    budget=st.integers(1, 60),
)
def test_units_stay_together(lengths: list[int], seed: int, parts: int, budget: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    units = torch.randint(0, len(lengths), (len(lengths),), generator=generator).tolist()
    for split in (split_balanced(lengths, parts, units), micro_batches(lengths, budget, units)):
        assert sorted(index for part in split for index in part) == list(range(len(lengths)))
        assert all(part == sorted(part) for part in split)
        for unit in set(units):
            assert len([part for part in split if any(units[index] == unit for index in part)]) == 1
    for part in micro_batches(lengths, budget, units):
        assert sum(lengths[index] for index in part) <= budget or len({units[index] for index in part}) == 1


# The config.


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "dpo", "beta": 0}, "preference.beta"),
        ({"kind": "dpo", "label_smoothing": 0.5}, "preference.label_smoothing"),
        ({"kind": "dpo", "gamma": 1}, "unknown key"),
        ({"kind": "kto", "batch_size": 1}, "`batch_size` is 1"),
        ({"kind": "kto", "margin_field": "margin"}, "`margin_field`"),
        ({"kind": "simpo", "eval_every": 5}, "`eval_every`"),
        ({"kind": "dpoo"}, "Did you mean 'dpo'"),
    ],
)
def test_bad_options_are_refused_when_the_config_is_read(section: dict[str, Any], message: str) -> None:
    from drumroll.config.load import check_config

    tree = {"pipeline": "preference", "model": {"path": "somewhere"}, "preference": {"data": {"path": "pairs.jsonl"}, **section}}
    with pytest.raises(ConfigError) as error:
        check_config(tree)
    assert message in str(error.value)
