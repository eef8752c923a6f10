"""Advantages against loops written from their formulas."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.algo.advantage import broadcast, group_mean, grpo, reinforce, rloo
from drumroll.text.packing import pack_demonstrations, select
from drumroll.types import Batch

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
    for advantage in (grpo, rloo):
        assert torch.equal(advantage(batch), torch.zeros(8))
    assert torch.equal(reinforce(batch_of([(0, 0.1)] * 7)), torch.zeros(7))


def test_grpo_without_scaling_is_only_centred() -> None:
    batch = batch_of([(0, 1.0), (0, 0.0), (0, 0.0), (0, 1.0)])
    torch.testing.assert_close(grpo(batch, scale_by_std=False), torch.tensor([0.5, -0.5, -0.5, 0.5]))


def test_broadcast_reaches_the_tokens_of_the_mask_only() -> None:
    batch = batch_of([(0, 1.0), (0, 0.0)])
    assert broadcast(torch.tensor([2.0, -3.0]), batch).tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, -3.0, -3.0]
    per_token = torch.arange(7.0)
    assert broadcast(per_token, batch).tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 5.0, 6.0]
    with pytest.raises(ValueError, match=r"\[2\] or per token \[7\]; got shape \[3\]"):
        broadcast(torch.zeros(3), batch)


def test_an_empty_batch_has_empty_advantages() -> None:
    empty = select(batch_of([(0, 1.0)]), [])
    for advantage in (grpo, rloo, reinforce):
        assert broadcast(advantage(empty), empty).shape == (0,)
