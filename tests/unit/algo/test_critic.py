"""GAE, returns and the loss of values against loops written from the formulas of arXiv 1506.02438 and PPO (arXiv 1707.06347)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll.algo.critic import critic_report, gae, lambda_returns, returns_of, value_loss
from drumroll.config.models import AdvantageConfig, AlgoConfig
from drumroll.registry import REGISTRY
from drumroll.text.packing import pack, select
from drumroll.types import Batch, RankInfo, Sampling, Task, Trajectory, Turn
from drumroll.workers.assembler import Assembler

Play = tuple[list[tuple[int, float]], float, int]
"""Turns as (tokens, reward); what reward functions gave at the end; how many tokens of the first turns are masked, for their age."""

plays = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0, -0.25])), min_size=1, max_size=4),
        st.sampled_from([0.0, 1.0, -2.0]),
        st.sampled_from([0, 0, 1, 4]),
    ),
    min_size=1,
    max_size=6,
)
shares = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def trajectory(number: int, play: Play) -> Trajectory:
    """Two tokens of an observation before every turn."""
    turns, last, masked = play
    parts: list[Turn] = []
    mask: list[bool] = []
    for tokens, reward in turns:
        parts.append(Turn("environment", len(mask), len(mask) + 2, "?"))
        mask += [False, False]
        parts.append(Turn("policy", len(mask), len(mask) + tokens, "x", reward))
        mask += [True] * tokens
    size = len(mask)
    for place in [place for place, sampled in enumerate(mask) if sampled][:masked]:
        mask[place] = False
    return Trajectory(
        sample_id=f"s{number:03d}",
        group_id="g",
        task=Task("t"),
        turns=tuple(parts),
        token_ids=np.ones(size, np.int32),
        loss_mask=np.array(mask),
        logp=np.zeros(size, np.float32),
        token_version=np.zeros(size, np.int32),
        sampling=Sampling(),
        seed=0,
        reward=sum(reward for _, reward in turns) + last,
        stop_reason="done",
    )


def make_batch(played: list[Play], seed: int = 0) -> Batch:
    """Random values and token rewards; outside the loss mask stand numbers that nobody may read."""
    batch = pack([trajectory(number, play) for number, play in enumerate(played)])
    generator = torch.Generator().manual_seed(seed)
    fields = {name: torch.randn(batch.num_tokens, generator=generator) for name in ("values", "token_rewards")}
    return batch.with_fields(**{name: value.masked_fill(~batch.loss_mask, 1e6) for name, value in fields.items()})


def slow(batch: Batch, played: list[Play], gamma: float, lam: float, by_turn: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, each as the sum over all that follows of (gamma lam)^l δ."""
    assert batch.values is not None
    assert batch.token_rewards is not None
    advantages, returns = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    bounds = batch.offsets.tolist()
    for number, (turns, last, _) in enumerate(played):
        decisions: list[dict[str, Any]] = []
        place = bounds[number]
        for tokens, reward in turns:
            place += 2
            begun = False
            for token in range(place, place + tokens):
                if not batch.loss_mask[token]:
                    continue
                if by_turn and begun:
                    decisions[-1]["tokens"].append(token)
                    decisions[-1]["reward"] += float(batch.token_rewards[token])
                else:
                    decisions.append({"tokens": [token], "reward": float(batch.token_rewards[token]), "value": float(batch.values[token])})
                begun = True
            place += tokens
            if decisions:
                decisions[-1]["reward"] += reward
        if decisions:
            decisions[-1]["reward"] += last
        for first, decision in enumerate(decisions):
            total = 0.0
            for later in range(first, len(decisions)):
                after = decisions[later + 1]["value"] if later + 1 < len(decisions) else 0.0
                total += (gamma * lam) ** (later - first) * (decisions[later]["reward"] + gamma * after - decisions[later]["value"])
            advantages[decision["tokens"]] = total
            returns[decision["tokens"]] = total + decision["value"]
    return advantages, returns


@given(plays, shares, shares, st.booleans())
def test_advantages_and_returns_are_those_of_the_formula(played: list[Play], gamma: float, lam: float, by_turn: bool) -> None:
    batch = make_batch(played)
    advantages, returns = slow(batch, played, gamma, lam, by_turn)
    got = gae(batch, gamma=gamma, lam=lam, by_turn=by_turn, whiten=False)
    torch.testing.assert_close(got, advantages, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lambda_returns(batch, gamma=gamma, lam=lam, by_turn=by_turn), returns, rtol=1e-4, atol=1e-4)
    assert got.dtype == torch.float32
    assert not got[~batch.loss_mask].any()


@given(plays)
def test_lambda_one_is_what_followed_minus_the_value_and_lambda_zero_the_next_surprise(played: list[Play]) -> None:
    batch = make_batch(played).with_fields(token_rewards=None)
    assert batch.values is not None
    bounds = batch.offsets.tolist()
    followed, surprise = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    for number, (turns, last, _) in enumerate(played):
        ends = {}
        place = bounds[number]
        for tokens, reward in turns:
            place += 2 + tokens
            ends[place - 1] = reward
        ends[place - 1] += last
        decisions = [token for token in range(bounds[number], place) if batch.loss_mask[token]]
        for token, after in zip(decisions, [*decisions[1:], None], strict=False):
            followed[token] = sum(reward for end, reward in ends.items() if end >= token)
            here = sum(reward for end, reward in ends.items() if token <= end < (after or place))
            surprise[token] = here + (float(batch.values[after]) if after is not None else 0.0) - float(batch.values[token])
    values = batch.values.masked_fill(~batch.loss_mask, 0.0)
    torch.testing.assert_close(gae(batch, gamma=1.0, lam=1.0, whiten=False), followed - values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gae(batch, gamma=1.0, lam=0.0, whiten=False), surprise, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lambda_returns(batch, gamma=1.0, lam=1.0), followed, rtol=1e-4, atol=1e-4)


@given(plays, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_order_and_company_change_nothing(played: list[Play], by_turn: bool, whiten: bool, rng: random.Random) -> None:
    batch = make_batch(played)
    whole = batch.with_fields(advantages=gae(batch, by_turn=by_turn, whiten=whiten), returns=lambda_returns(batch, by_turn=by_turn))
    order = rng.sample(range(len(played)), len(played))
    moved = select(whole, order)
    assert moved.advantages is not None
    assert moved.returns is not None
    torch.testing.assert_close(gae(moved, by_turn=by_turn, whiten=whiten), moved.advantages, rtol=1e-5, atol=1e-5)
    alone = torch.cat([lambda_returns(select(whole, [number]), by_turn=by_turn) for number in order])
    torch.testing.assert_close(alone, moved.returns, rtol=1e-5, atol=1e-5)


@given(plays, st.booleans())
def test_whitened_advantages_have_mean_zero_and_deviation_one(played: list[Play], by_turn: bool) -> None:
    batch = make_batch(played)
    whitened = gae(batch, by_turn=by_turn)
    assert whitened.isfinite().all()
    assert not whitened[~batch.loss_mask].any()
    plain = gae(batch, by_turn=by_turn, whiten=False)[batch.loss_mask].double()
    if len(plain) < 2 or plain.std() < 1e-3:
        return
    inside = whitened[batch.loss_mask].double()
    assert float(inside.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(inside.std(correction=0)) == pytest.approx(1.0, abs=1e-2)
    assert torch.equal(whitened[batch.loss_mask][plain.argsort(stable=True)], whitened[batch.loss_mask].sort().values)


def test_a_batch_without_anything_to_learn_from_gives_nothing() -> None:
    batch = make_batch([([(2, 1.0)], 0.0, 4), ([(1, 0.5)], 1.0, 1)])
    assert not batch.loss_mask.any()
    assert not gae(batch).any()
    assert not lambda_returns(batch).any()
    assert critic_report(batch.with_fields(returns=lambda_returns(batch))) == {}
    empty = select(batch, [])
    assert gae(empty).shape == (0,)


def test_rewards_that_were_changed_after_the_turns_count_as_they_are_now() -> None:
    """A normalised reward of the trajectory: what is not in the turns belongs to the last token."""
    batch = make_batch([([(1, 0.5), (2, 1.0)], 2.0, 0)]).with_fields(token_rewards=None, values=torch.zeros(7))
    assert lambda_returns(batch, lam=1.0)[batch.loss_mask].tolist() == [3.5, 3.0, 3.0]
    shaped = batch.with_fields(rewards=torch.tensor([-1.0]))
    assert lambda_returns(shaped, lam=1.0)[batch.loss_mask].tolist() == [-1.0, -1.5, -1.5]
    bare = batch.with_fields(turns=None)
    assert lambda_returns(bare, lam=1.0)[batch.loss_mask].tolist() == [3.5, 3.5, 3.5]


def test_witnesses_without_tokens_change_nothing() -> None:
    batch = make_batch([([(2, 1.0)], 0.0, 0), ([(3, 0.0)], 1.0, 0)])
    seen = batch.with_fields(
        sample_ids=(*batch.sample_ids, "witness"),
        offsets=torch.cat([batch.offsets, batch.offsets[-1:]]),
        rewards=torch.cat([batch.rewards, torch.tensor([5.0])]),
        group_index=torch.cat([batch.group_index, batch.group_index[-1:]]),
    )
    assert torch.equal(gae(seen), gae(batch))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_loss_of_values_is_that_of_ppo(clip: float | None) -> None:
    batch = make_batch([([(3, 1.0), (2, 0.0)], 1.0, 1), ([(4, 0.5)], 0.0, 0)])
    batch = batch.with_fields(returns=lambda_returns(batch))
    assert batch.values is not None
    assert batch.returns is not None
    values = (batch.values + torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3)) * 0.3).requires_grad_()
    outcome = value_loss(values, batch, clip=clip)
    outcome.loss.sum().backward()
    assert values.grad is not None
    assert not values.grad[~batch.loss_mask].any()
    held = 0
    for token in batch.loss_mask.nonzero().squeeze(1).tolist():
        value, old, target = float(values[token].detach()), float(batch.values[token]), float(batch.returns[token])
        near = old + max(-0.2, min(0.2, value - old))
        squares = [0.5 * (value - target) ** 2] + ([0.5 * (near - target) ** 2] if clip else [])
        assert float(outcome.loss[token].detach()) == pytest.approx(max(squares), rel=1e-4)
        is_held = clip is not None and squares[-1] > squares[0] * (1 + 1e-6)
        held += is_held
        assert float(values.grad[token]) == pytest.approx(0.0 if is_held else value - target, abs=1e-4)
        if clip is not None:
            assert bool(outcome.metrics["clip_fraction"][token]) == is_held
    assert held or clip is None, "nothing was clipped"


def test_explained_variance_is_one_for_who_knows_and_zero_for_who_says_always_the_same() -> None:
    batch = make_batch([([(3, 1.0), (2, 0.0)], 1.0, 0), ([(4, 0.5)], 0.0, 0)])
    returns = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3))
    for values, explained in ((returns, 1.0), (torch.full_like(returns, 7.0), 0.0), (-returns, -3.0)):
        report = critic_report(batch.with_fields(values=values, returns=returns))
        assert report["critic/explained_variance"] == pytest.approx(explained, abs=1e-5)
    report = critic_report(batch.with_fields(values=returns, returns=torch.ones_like(returns)))
    assert report["critic/explained_variance"] == 0.0
    assert report["critic/return_mean"] == 1.0


def test_returns_have_the_options_of_the_advantage_that_has_such() -> None:
    batch = make_batch([([(3, 1.0), (2, 0.0)], 1.0, 0)])
    options = {"kind": "gae", "gamma": 0.9, "lam": 0.5, "by_turn": True}
    section = AlgoConfig.model_validate({"advantage": options}).advantage
    assert torch.equal(returns_of(section)(batch), lambda_returns(batch, gamma=0.9, lam=0.5, by_turn=True))
    assert torch.equal(returns_of(section, 1.0)(batch), lambda_returns(batch, gamma=0.9, lam=1.0, by_turn=True))
    other: Any = SimpleNamespace()
    assert torch.equal(returns_of(other)(batch), lambda_returns(batch))


@pytest.mark.parametrize("critic_lam", [None, 1.0])
def test_the_assembler_deals_the_same_updates_to_policy_and_critic(critic_lam: float | None) -> None:
    played: list[Play] = [([(1 + number % 3, 0.5), (2, 0.0)], float(number % 2), 0) for number in range(8)]
    trajectories = [trajectory(number, play) for number, play in enumerate(played)]
    algo = {"advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.5}, "aggregation": "sequence_mean", "updates_per_step": 2}
    rank = RankInfo("assembler", 0, 1, "cpu")
    assembler = Assembler(rank, num_shards=1, num_critic_shards=3, seed=0, algo=algo, critic_lam=critic_lam)
    assembler.pack([(each.sample_id, 0) for each in trajectories], 0, 0, trajectories)
    parts = assembler.shards(2)
    values = [torch.arange(part.num_tokens).float() * part.loss_mask for part in parts]
    report, policy, *critic = assembler.finish(1, None, None, values)
    assert {"critic/value_mean", "critic/return_mean", "critic/explained_variance"} <= report.keys()
    assert len(critic) == 3
    for number, update in enumerate(policy):
        dealt = [shards[number] for shards in critic]
        assert sorted(name for shard in dealt for name in shard.sample_ids) == sorted(update.sample_ids)
        assert float(sum(shard.weight.sum() for shard in dealt)) == pytest.approx(1.0)
        assert len({float(weight) for shard in dealt for weight in shard.weight[shard.loss_mask]}) == 1, "every token counts the same"
        expected = lambda_returns(update, gamma=0.9, lam=0.5 if critic_lam is None else critic_lam)
        torch.testing.assert_close(update.returns, expected)


def test_gae_says_what_it_needs_and_refuses_what_is_no_share() -> None:
    entry = REGISTRY.lookup("advantage", "gae")
    assert entry.needs == ("values",)
    for wrong in ({"gamma": 1.1}, {"lam": -0.1}):
        with pytest.raises(ValidationError, match=r"1\.1|-0\.1"):
            entry.schema(AdvantageConfig).model_validate({"kind": "gae", **wrong})


def test_a_turn_that_is_masked_pays_to_the_decision_before() -> None:
    played: list[Play] = [([(1, 0.25), (1, 0.5), (1, 1.0)], 0.0, 0)]
    batch = make_batch(played).with_fields(token_rewards=None, values=torch.zeros(9))
    mask = batch.loss_mask.clone()
    mask[5] = False  # the second turn's only token
    assert lambda_returns(batch.with_fields(loss_mask=mask), gamma=0.5, lam=1.0)[mask].tolist() == [0.75 + 0.5 * 1.0, 1.0]
