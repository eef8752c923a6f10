"""Packing trajectories, and splitting a batch over ranks and passes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.text.packing import micro_batches, pack, pack_demonstrations, select, split_balanced, token_indices
from drumroll.types import Sampling, Task, Trajectory

lengths_lists = st.lists(st.integers(1, 50), max_size=40)


def trajectory(sample: int, group: str, num_prompt: int, num_new: int, reward: float | None = 1.0) -> Trajectory:
    size = num_prompt + num_new
    mask = np.arange(size) >= num_prompt
    return Trajectory(
        sample_id=f"train/0/{group}/{sample}",
        group_id=group,
        task=Task(id=group),
        turns=(),
        token_ids=(np.arange(size) + 100 * sample).astype(np.int32),
        loss_mask=mask,
        logp=np.where(mask, -0.5 * sample, 0.0).astype(np.float32),
        token_version=np.where(mask, 7, -1).astype(np.int32),
        sampling=Sampling(temperature=0.5 + sample, top_p=0.9, top_k=sample),
        seed=0,
        reward=reward,
        stop_reason="stop",
    )


def test_pack_orders_by_sample_id_and_keeps_every_field() -> None:
    a, b, c = trajectory(1, "a", 2, 2), trajectory(2, "a", 1, 1, reward=0.0), trajectory(1, "b", 0, 3)
    batch = pack([c, b, a])
    assert batch.sample_ids == ("train/0/a/1", "train/0/a/2", "train/0/b/1")
    assert batch.token_ids.tolist() == [100, 101, 102, 103, 200, 201, 100, 101, 102]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.offsets.tolist() == [0, 4, 6, 9]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, False, True, True], "a first token is never predicted"
    assert batch.behaviour_logp.tolist() == [0, 0, -0.5, -0.5, 0, -1, -0.5, -0.5, -0.5]
    assert batch.token_version.tolist() == [-1, -1, 7, 7, -1, 7, 7, 7, 7]
    assert batch.rewards.tolist() == [1.0, 0.0, 1.0]
    assert batch.group_index.tolist() == [0, 0, 1]
    assert batch.temperature.tolist() == [1.5, 2.5, 1.5]
    assert batch.top_p.tolist() == pytest.approx([0.9] * 3)
    assert batch.top_k.tolist() == [1, 2, 1]
    assert not batch.weight.any()
    assert batch.lengths == [4, 2, 3]


def test_a_trajectory_without_a_verdict_is_never_packed() -> None:
    with pytest.raises(AssertionError, match="no verdict"):
        pack([trajectory(1, "a", 2, 2, reward=None)])


def test_nothing_packs_to_an_empty_batch_of_the_same_types() -> None:
    empty, one = pack([]), pack([trajectory(1, "a", 2, 2)])
    assert (empty.num_trajectories, empty.num_tokens, empty.lengths) == (0, 0, [])
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        if isinstance(value, torch.Tensor):
            assert getattr(empty, field.name).dtype == value.dtype, field.name
    assert select(one, []).num_tokens == 0


def test_demonstrations_are_imitated_where_the_completion_is() -> None:
    batch = pack_demonstrations([([5, 6], [7]), ([8], [9, 2])], ids=["x", "y"])
    assert batch.sample_ids == ("x", "y")
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 2]
    assert batch.loss_mask.tolist() == [False, False, True, False, True, True]
    assert batch.group_index.tolist() == [0, 1]
    assert batch.temperature.tolist() == [1.0, 1.0]


@given(lengths_lists.filter(bool), st.randoms(use_true_random=False))
def test_select_takes_exactly_the_tokens_of_the_chosen(lengths: list[int], random: object) -> None:
    batch = pack_demonstrations([([1], [2] * (length - 1)) for length in lengths])
    batch = batch.with_fields(weight=torch.rand(batch.num_tokens), advantages=torch.arange(float(batch.num_tokens)))
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    order = order[: len(order) // 2 + 1]
    part = select(batch, order)
    bounds = batch.offsets.tolist()
    expected = [token for index in order for token in range(bounds[index], bounds[index + 1])]
    assert token_indices(batch, order).tolist() == expected
    assert part.advantages is not None
    assert part.advantages.tolist() == expected
    assert torch.equal(part.weight, batch.weight[expected])
    assert part.lengths == [lengths[index] for index in order]
    assert part.position_ids.tolist() == [place for index in order for place in range(lengths[index])]
    assert part.ref_logp is None


@given(lengths_lists, st.integers(1, 8))
def test_shards_hold_everything_once_in_about_equal_parts(lengths: list[int], parts: int) -> None:
    shards = split_balanced(lengths, parts)
    assert len(shards) == parts
    assert sorted(index for shard in shards for index in shard) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert shards == split_balanced(lengths, parts)


@given(lengths_lists, st.integers(1, 120))
def test_passes_keep_to_the_budget_and_are_few(lengths: list[int], budget: int) -> None:
    passes = micro_batches(lengths, budget)
    assert sorted(index for indices in passes for index in indices) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in indices) for indices in passes]
    for indices, load in zip(passes, loads, strict=True):
        assert load <= budget or len(indices) == 1
    assert sum(load <= budget / 2 for load in loads) <= 1, "two half-empty passes could have been one"
