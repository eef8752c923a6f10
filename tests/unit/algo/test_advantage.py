"""Advantages against loops written from their formulas."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.algo.advantage import (
    broadcast,
    dr_grpo,
    group_mean,
    grpo,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from drumroll.algo.segments import rewards_by_token, to_go, trajectory_rewards, turn_rewards
from drumroll.text.packing import pack_demonstrations, select
from drumroll.types import Batch, Turns

grouped_rewards = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0])), min_size=1, max_size=20)


def batch_of(grouped: list[tuple[int, float]]) -> Batch:
    batch = pack_demonstrations([([1, 2], [3] * (1 + number % 3)) for number in range(len(grouped))])
    groups, rewards = zip(*grouped, strict=True)
    return batch.with_fields(group_index=torch.tensor(groups), rewards=torch.tensor(rewards))


def peers(grouped: list[tuple[int, float]], index: int) -> list[float]:
    return [reward for group, reward in grouped if group == grouped[index][0]]


@given(grouped_rewards)
@settings(max_examples=60, deadline=None)
def test_grpo_is_the_standardised_reward_of_the_group(grouped: list[tuple[int, float]]) -> None:
    expected = []
    for index, (_, reward) in enumerate(grouped):
        group = peers(grouped, index)
        varies = len(set(group)) > 1
        expected.append((reward - statistics.fmean(group)) / (statistics.pstdev(group) + 1e-6) if varies else 0.0)
    torch.testing.assert_close(grpo(batch_of(grouped)), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@given(grouped_rewards)
@settings(max_examples=60, deadline=None)
def test_rloo_compares_with_the_others_of_the_group(grouped: list[tuple[int, float]]) -> None:
    expected = []
    for index, (_, reward) in enumerate(grouped):
        others = peers(grouped, index)
        others.remove(reward)
        expected.append(reward - statistics.fmean(others) if others else 0.0)
    torch.testing.assert_close(rloo(batch_of(grouped)), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@given(grouped_rewards)
@settings(max_examples=30, deadline=None)
def test_reinforce_subtracts_the_batch_mean_only_when_asked(grouped: list[tuple[int, float]]) -> None:
    batch = batch_of(grouped)
    mean = statistics.fmean(reward for _, reward in grouped)
    torch.testing.assert_close(reinforce(batch), batch.rewards - mean, rtol=1e-4, atol=1e-5)
    assert torch.equal(reinforce(batch, subtract_mean=False), batch.rewards)


def test_equal_rewards_give_exactly_zero_although_their_mean_is_rounded() -> None:
    batch = batch_of([(0, 0.1)] * 7 + [(1, 0.7)])
    assert (batch.rewards - group_mean(batch.rewards, batch.group_index)).any(), "0.1 no longer shows the rounding that this is about"
    for advantage in (grpo, dr_grpo, rloo, reinforce_pp_baseline):
        assert torch.equal(advantage(batch), torch.zeros(8))
    assert torch.equal(reinforce(batch_of([(0, 0.1)] * 7)), torch.zeros(7))
    assert not reinforce_pp(batch_of([(0, 0.1)] * 7)).any()


def test_dr_grpo_is_grpo_without_scaling() -> None:
    batch = batch_of([(0, 1.0), (0, 0.0), (0, 0.0), (0, 1.0), (1, 3.0)])
    torch.testing.assert_close(dr_grpo(batch), torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0]))
    assert torch.equal(dr_grpo(batch), grpo(batch, scale_by_std=False))


def slow_to_go(batch: Batch, rewards: list[float]) -> list[list[float]]:
    """For every trajectory the rewards from each of its tokens to its end; `rewards` are of tokens."""
    bounds = batch.offsets.tolist()
    return [[sum(rewards[t:end]) for t in range(start, end)] for start, end in pairwise(bounds)]


@given(grouped_rewards, st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_reinforce_pp_is_the_standardised_reward_to_go(grouped: list[tuple[int, float]], has_penalty: bool, seed: int) -> None:
    """The reward at the last token, minus the KL of every token from here on; normalised over all tokens of the batch."""
    batch = batch_of(grouped)
    penalty = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) * batch.loss_mask * has_penalty
    rewards = penalty.tolist()
    for (_, reward), end in zip(grouped, batch.offsets.tolist()[1:], strict=True):
        rewards[end - 1] += reward
    flat = [value for values in slow_to_go(batch, rewards) for value in values]
    inside = [value for value, is_inside in zip(flat, batch.loss_mask.tolist(), strict=True) if is_inside]
    mean, std = statistics.fmean(inside), statistics.pstdev(inside)
    expected = [(value - mean) / (std + 1e-6) if max(inside) - min(inside) > 1e-6 else 0.0 for value in flat]
    got = reinforce_pp(batch.with_fields(token_rewards=penalty if has_penalty else None))
    torch.testing.assert_close(got, torch.tensor(expected) * batch.loss_mask, rtol=1e-3, atol=1e-3)


def test_a_turns_reward_is_at_its_last_token() -> None:
    """A trajectory of two turns with rewards of 1 and 2, and one without turns with a reward of 4."""
    batch = pack_demonstrations([([1], [2, 3, 4]), ([1], [2])])
    turns = Turns(torch.tensor([1, 3]), torch.tensor([2, 4]), torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    batch = batch.with_fields(rewards=torch.tensor([3.0, 4.0]), turns=turns)
    assert rewards_by_token(batch).tolist() == [0, 1, 0, 2, 0, 4]
    assert to_go(rewards_by_token(batch), batch).tolist() == [3, 3, 2, 2, 4, 4]
    with_penalty = batch.with_fields(token_rewards=torch.tensor([0.0, -0.5, 0, -0.25, 0, -1]))
    assert rewards_by_token(with_penalty).tolist() == [0, 0.5, 0, 1.75, 0, 3]
    assert trajectory_rewards(with_penalty).tolist() == [2.25, 3]
    assert turn_rewards(with_penalty, turns).tolist() == [0.5, 1.75]


@given(grouped_rewards)
@settings(max_examples=60, deadline=None)
def test_reinforce_pp_baseline_scales_the_distance_from_the_group_over_the_batch(grouped: list[tuple[int, float]]) -> None:
    centred = [reward - statistics.fmean(peers(grouped, index)) for index, (_, reward) in enumerate(grouped)]
    std = statistics.pstdev(centred)  # their mean is 0
    expected = [value / (std + 1e-6) if len(set(peers(grouped, index))) > 1 else 0.0 for index, value in enumerate(centred)]
    torch.testing.assert_close(reinforce_pp_baseline(batch_of(grouped)), torch.tensor(expected), rtol=1e-3, atol=1e-3)


@given(grouped_rewards, st.lists(st.booleans(), min_size=20, max_size=20))
@settings(max_examples=60, deadline=None)
def test_remax_compares_with_the_greedy_member(grouped: list[tuple[int, float]], greedy: list[bool]) -> None:
    greedy = greedy[: len(grouped)]
    batch = batch_of(grouped).with_fields(temperature=torch.tensor([0.0 if is_greedy else 0.7 for is_greedy in greedy]))
    expected = []
    for (group, reward), is_greedy in zip(grouped, greedy, strict=True):
        baselines = [r for (g, r), is_baseline in zip(grouped, greedy, strict=True) if g == group and is_baseline]
        expected.append(0.0 if is_greedy or not baselines else reward - statistics.fmean(baselines))
    torch.testing.assert_close(remax(batch), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo, reinforce, reinforce_pp_baseline, remax])
def test_rewards_of_single_tokens_are_part_of_the_trajectorys(advantage: Callable[[Batch], torch.Tensor]) -> None:
    batch = batch_of([(0, 1.0), (0, 0.0), (0, 0.5), (1, 0.0), (1, 1.0)]).with_fields(temperature=torch.tensor([0.0, 1, 1, 0, 1]))
    penalty = torch.arange(batch.num_tokens) * -0.125 * batch.loss_mask
    bounds = batch.offsets.tolist()
    sums = torch.tensor([float(penalty[start:end].sum()) for start, end in pairwise(bounds)])
    torch.testing.assert_close(
        advantage(batch.with_fields(token_rewards=penalty)), advantage(batch.with_fields(rewards=batch.rewards + sums))
    )


def test_broadcast_reaches_the_tokens_of_the_mask_only() -> None:
    batch = batch_of([(0, 1.0), (0, 0.0)])
    assert broadcast(torch.tensor([2.0, -3.0]), batch).tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, -3.0, -3.0]
    per_token = torch.arange(7.0)
    assert broadcast(per_token, batch).tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 5.0, 6.0]
    with pytest.raises(ValueError, match=r"\[2\] or per token \[7\]; got shape \[3\]"):
        broadcast(torch.zeros(3), batch)


def test_an_empty_batch_has_empty_advantages() -> None:
    empty = select(batch_of([(0, 1.0)]), [])
    for advantage in (grpo, dr_grpo, rloo, reinforce, reinforce_pp, reinforce_pp_baseline, remax):
        assert broadcast(advantage(empty), empty).shape == (0,)
