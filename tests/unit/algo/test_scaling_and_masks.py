"""Scaled rewards and advantages, the KL in the rewards and its coefficient, and what does not count: against their definitions."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.algo.algorithm import Algorithm, build_algorithm
from drumroll.algo.kl import ESTIMATORS, adapted
from drumroll.algo.masks import counting
from drumroll.algo.scaling import Running, replace_rewards
from drumroll.config.models import AlgoConfig, MasksConfig
from drumroll.text.packing import pack_demonstrations
from drumroll.types import Batch, Turns

values = st.lists(st.floats(-100, 100, width=32), max_size=20)


def algorithm(**section: Any) -> Algorithm:
    return build_algorithm(AlgoConfig.model_validate(section))


def batch_of(rewards: list[float], groups: list[int] | None = None) -> Batch:
    batch = pack_demonstrations([([1], [2] * (1 + number % 2)) for number in range(len(rewards))])
    return batch.with_fields(rewards=torch.tensor(rewards), group_index=torch.tensor(groups or [0] * len(rewards)))


@given(st.lists(values, max_size=5))
@settings(max_examples=60, deadline=None)
def test_running_is_the_mean_and_spread_of_everything_so_far(steps: list[list[float]]) -> None:
    running = Running()
    for step in steps:
        running = Running.of(json.loads(json.dumps(running.entries("x"))), "x").add(torch.tensor(step))
    everything = [value for step in steps for value in step]
    assert running.count == len(everything)
    if everything:
        assert running.mean == pytest.approx(statistics.fmean(everything), abs=1e-6)
        assert running.std == pytest.approx(statistics.pstdev(everything), abs=1e-4)


def test_rewards_by_batch_and_by_group() -> None:
    batch = batch_of([1.0, 3.0, 10.0, 10.0, 6.0], [0, 0, 1, 1, 2])
    by_group, _, _ = algorithm(reward_scaling={"normalise": "group"}).scaled_rewards(batch, {})
    torch.testing.assert_close(by_group, torch.tensor([-1.0, 1, 0, 0, 0]), rtol=1e-4, atol=1e-5)
    by_batch, factor, carried = algorithm(reward_scaling={"normalise": "batch", "clip": [-1, 0.5]}).scaled_rewards(batch, {})
    std = statistics.pstdev([1, 3, 10, 10, 6])
    torch.testing.assert_close(by_batch, ((batch.rewards - 6) / std).clamp(-1, 0.5), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(factor, torch.full((5,), 1 / std), rtol=1e-4, atol=1e-5)
    assert carried == {}
    uncentred, _, _ = algorithm(reward_scaling={"normalise": "batch", "subtract_mean": False}).scaled_rewards(batch, {})
    torch.testing.assert_close(uncentred, batch.rewards / std, rtol=1e-4, atol=1e-5)
    plain, ones, _ = algorithm().scaled_rewards(batch, {})
    assert torch.equal(plain, batch.rewards)
    assert torch.equal(ones, torch.ones(5))


def test_running_rewards_go_on_where_they_were() -> None:
    algo = algorithm(reward_scaling={"normalise": "running"})
    first, second = [1.0, 3.0], [5.0, 7.0, 2.0]
    _, _, carried = algo.scaled_rewards(batch_of(first), {})
    assert carried == {"algo/reward_count": 2.0, "algo/reward_mean": 2.0, "algo/reward_squares": 2.0}
    got, _, carried = algo.scaled_rewards(batch_of(second), json.loads(json.dumps(carried)))
    mean, std = statistics.fmean(first + second), statistics.pstdev(first + second)
    torch.testing.assert_close(got, (torch.tensor(second) - mean) / std, rtol=1e-4, atol=1e-5)
    assert carried["algo/reward_count"] == 5.0
    flat, _, _ = algo.scaled_rewards(batch_of([2.0, 2.0]), {})
    assert flat.tolist() == [0.0, 0.0]


def test_witnesses_are_scaled_and_not_counted_again() -> None:
    batch = batch_of([1.0, 3.0])
    witness = batch.with_fields(
        offsets=torch.cat([batch.offsets, batch.offsets[-1:]]),
        rewards=torch.tensor([1.0, 3.0, 9.0]),
        group_index=torch.zeros(3, dtype=torch.int64),
        sample_ids=(*batch.sample_ids, "witness"),
    )
    got, _, carried = algorithm(reward_scaling={"normalise": "running"}).scaled_rewards(witness, {})
    assert carried["algo/reward_count"] == 2.0
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0, 7.0]), rtol=1e-4, atol=1e-5)


def test_rewards_of_turns_follow_their_trajectorys() -> None:
    """What is left of a trajectory's reward belongs to its last turn."""
    batch = pack_demonstrations([([1], [2, 3, 4]), ([1], [2])])
    turns = Turns(
        torch.tensor([1, 3, 5]), torch.tensor([2, 4, 6]), torch.tensor([0, 0, 1]), torch.tensor([1.0, 2, 4]), torch.tensor([0, 1, 2])
    )
    scaled = replace_rewards(batch.with_fields(turns=turns), torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.25]))
    assert scaled.rewards.tolist() == [2.0, -1.0]
    assert scaled.turns is not None
    assert scaled.turns.rewards.tolist() == [0.5, 1.5, -1.0]


def test_advantages_are_scaled_over_the_tokens_of_the_mask() -> None:
    batch = batch_of([0.0] * 3, [0, 0, 1])
    advantage = torch.tensor([9.0, 1.0, 9.0, 3.0, 5.0, 9.0, 7.0])
    assert batch.loss_mask.tolist() == [False, True, False, True, True, False, True]
    inside = [1.0, 3.0, 5.0, 7.0]
    got, carried = algorithm(advantage_scaling={"normalise": "batch", "clip": [-1.2, 1.2]}).scaled_advantages(advantage, batch, {})
    expected = [min(max((value - 4) / statistics.pstdev(inside), -1.2), 1.2) for value in inside]
    torch.testing.assert_close(got[batch.loss_mask], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert not got[~batch.loss_mask].any()
    assert carried == {}
    by_group, _ = algorithm(advantage_scaling={"normalise": "group"}).scaled_advantages(advantage, batch, {})
    std = statistics.pstdev(inside[:3])
    torch.testing.assert_close(by_group[batch.loss_mask], torch.tensor([-2 / std, 0, 2 / std, 0]), rtol=1e-4, atol=1e-5)
    running, carried = algorithm(advantage_scaling={"normalise": "running"}).scaled_advantages(advantage, batch, {})
    torch.testing.assert_close(running[batch.loss_mask], torch.tensor([(value - 4) / 5**0.5 for value in inside]), rtol=1e-4, atol=1e-5)
    assert carried["algo/advantage_count"] == 4.0
    plain, _ = algorithm().scaled_advantages(advantage, batch, {})
    assert torch.equal(plain, advantage * batch.loss_mask)


def with_reference(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(1)
    logp, ref_logp = (-torch.rand(batch.num_tokens, generator=generator) for _ in range(2))
    return batch.with_fields(behaviour_logp=logp, ref_logp=ref_logp)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_rewards_is_taken_off_every_token(estimator: Any) -> None:
    batch = with_reference(batch_of([1.0, 0.0, 0.5]))
    algo = algorithm(kl={"coef": 0.5, "estimator": estimator, "applied_to": "reward"})
    assert "ref_logp" in algo.needs
    penalised, carried = algo.penalised(batch, {})
    assert batch.ref_logp is not None
    kl = ESTIMATORS[estimator](batch.behaviour_logp, batch.ref_logp)
    torch.testing.assert_close(penalised.token_rewards, -0.5 * kl * batch.loss_mask)
    assert carried == {}
    old = batch.with_fields(old_logp=batch.behaviour_logp - 1)
    torch.testing.assert_close(
        algo.penalised(old, {})[0].token_rewards, -0.5 * ESTIMATORS[estimator](batch.behaviour_logp - 1, batch.ref_logp) * batch.loss_mask
    )
    logp = torch.full((batch.num_tokens,), -1.0)
    trained = penalised.with_fields(advantages=algo.advantage(penalised), old_logp=logp)
    assert "kl" not in algo.loss(logp, trained).metrics, "what is in the rewards is not in the loss again"


def test_an_adaptive_coefficient_goes_towards_its_target() -> None:
    assert adapted(0.1, kl=1.0, target=0.5, num_trajectories=10, horizon=100) == pytest.approx(0.1 * (1 + 0.2 * 0.1)), "held at a fifth"
    assert adapted(0.1, kl=0.0, target=0.5, num_trajectories=10, horizon=100) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert adapted(0.1, kl=0.55, target=0.5, num_trajectories=10, horizon=100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted(0.1, kl=0.0, target=0.5, num_trajectories=10_000, horizon=1) == pytest.approx(0.08), "never negative"


@pytest.mark.parametrize("applied_to", ["loss", "reward"])
def test_the_adapted_coefficient_holds_from_the_next_step_on(applied_to: str) -> None:
    batch = with_reference(batch_of([1.0, 0.0, 0.5]))
    kl = {"coef": 0.5, "applied_to": applied_to, "adaptive": {"target": 1e-4, "horizon": 10}}
    algo = algorithm(kl=kl)
    first, carried = algo.penalised(batch, {})
    assert carried["algo/kl_coef"] == pytest.approx(0.5 * 1.06)
    second, _ = algo.penalised(batch, json.loads(json.dumps(carried)))
    if applied_to == "reward":
        assert first.token_rewards is not None
        torch.testing.assert_close(second.token_rewards, first.token_rewards * 1.06)
        return
    assert first.kl_coef is not None
    assert second.kl_coef is not None
    assert (float(first.kl_coef[1]), float(second.kl_coef[1])) == (pytest.approx(0.5), pytest.approx(0.53))
    logp = torch.full((batch.num_tokens,), -1.0)
    losses = [algo.loss(logp, part.with_fields(advantages=torch.zeros_like(logp), old_logp=logp)).loss for part in (first, second)]
    torch.testing.assert_close(losses[1], losses[0] * 1.06)
    empty = batch.with_fields(loss_mask=torch.zeros_like(batch.loss_mask))
    assert algo.penalised(empty, {})[1]["algo/kl_coef"] == 0.5, "nothing was learnt of the distance"


def counted(batch: Batch, version: int = 7, **masks: Any) -> list[bool]:
    more = {name: masks.pop(name) for name in ("rate_G", "trains_on_greedy", "is_cut_off_N") if name in masks}
    cut_off = more.pop("is_cut_off_N", torch.zeros(batch.num_trajectories, dtype=torch.bool))
    return counting(batch, MasksConfig.model_validate(masks), version, is_cut_off_N=cut_off, **more)[batch.loss_mask].tolist()


def test_masks_by_length_difficulty_age_and_sampling() -> None:
    """Three trajectories of one, two and three tokens, the first two of one group."""
    batch = pack_demonstrations([([1], [2]), ([1], [2, 3]), ([1], [2, 3, 4])]).with_fields(
        group_index=torch.tensor([0, 0, 1]),
        temperature=torch.tensor([0.0, 1.0, 1.0]),
        token_version=torch.tensor([-1, 7, -1, 7, 6, -1, 7, 5, 4]),
    )
    assert counted(batch) == [True] * 6
    assert counted(batch, trains_on_greedy=False) == [False] + [True] * 5
    assert counted(batch, longer_than=2) == [True] * 3 + [False] * 3
    assert counted(batch, is_cut_off_N=torch.tensor([False, True, False])) == [True] * 6, "not unless asked for"
    assert counted(batch, cut_off=True, is_cut_off_N=torch.tensor([False, True, False])) == [True, False, False, True, True, True]
    assert counted(batch, success_rate=[0.2, 0.8], rate_G=torch.tensor([0.5, 1.0])) == [True] * 3 + [False] * 3
    assert counted(batch, success_rate=[0.5, 1.0], rate_G=torch.tensor([0.4, float("nan")])) == [False] * 3 + [True] * 3
    assert counted(batch, token_staleness=1) == [True, True, True, True, False, False]
    assert counted(batch, trajectory_staleness=1) == [True, True, True, False, False, False]
    assert counted(batch, trajectory_staleness=0) == [True, False, False, False, False, False]
