"""The assembler: what each rank trains on makes up the same update however many ranks there are."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drumroll.types import Batch, RankInfo, Sampling, Task, Trajectory
from drumroll.workers.assembler import Assembler
from drumroll.workers.demonstrations import Demonstrations

RANK = RankInfo("assembler", 0, 1, "cpu")


def trajectory(number: int, reward: float | None, **changes: Any) -> Trajectory:
    """Of a length of its own, with tokens that say whose they are."""
    prompt, new = 2 + number % 3, 1 + (number * 7) % 5
    size = prompt + new
    values: dict[str, Any] = {
        "sample_id": f"s{number:03d}",
        "group_id": f"g{number // 4}",
        "task": Task(f"t{number // 4}"),
        "turns": (),
        "token_ids": np.full(size, number, np.int32),
        "loss_mask": np.arange(size) >= prompt,
        "logp": np.where(np.arange(size) >= prompt, -0.1 * (number + 1), 0.0).astype(np.float32),
        "token_version": np.where(np.arange(size) >= prompt, 0, -1).astype(np.int32),
        "sampling": Sampling(),
        "seed": number,
        "reward": reward,
        "stop_reason": "stop",
    }
    return Trajectory(**{**values, **changes})


STEP = [trajectory(number, float(number % 3)) for number in range(24)]


def assembler(num_shards: int, **algo: Any) -> Assembler:
    return Assembler(RANK, num_shards=num_shards, seed=3, algo=algo, constant_length=8)


def finished(worker: Assembler, *blocks: list[Trajectory], scores: bool = False) -> tuple[dict[str, float], list[list[Batch]]]:
    """The report, and each rank's shard of every update."""
    worker.pack([(t.sample_id, t.attempt) for block in blocks for t in block if t.reward is not None], 0, 0, *blocks)
    parts: list[Tensor] | None = None
    if scores:  # a token's score says whose it is
        parts = [shard.token_ids.float() / 10 for shard in worker.shards(2)]
    report, *ranks = worker.finish(7, parts, parts)
    return report, ranks


def by_sample(ranks: list[list[Batch]], update: int, field: str) -> dict[str, list[float]]:
    """One field of one update by sample, wherever the sample landed."""
    found: dict[str, list[float]] = {}
    for shard in (rank[update] for rank in ranks):
        bounds = shard.offsets.tolist()
        for place, name in enumerate(shard.sample_ids):
            assert name not in found, "a trajectory trains on one rank only"
            found[name] = getattr(shard, field)[bounds[place] : bounds[place + 1]].tolist()
    return found


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_update_does_not_depend_on_the_number_of_ranks(aggregation: str, updates: int) -> None:
    options = {"aggregation": aggregation, "updates_per_step": updates, "epochs_per_step": 2}
    (report, one), (other_report, three) = (finished(assembler(ranks, **options), STEP, scores=True) for ranks in (1, 3))
    assert report == other_report
    assert len(one) == 1
    assert len(three) == 3
    assert {len(rank) for rank in (*one, *three)} == {updates * 2}
    for update in range(updates * 2):
        for field in ("weight", "advantages", "old_logp", "ref_logp", "behaviour_logp", "token_ids", "loss_mask"):
            assert by_sample(one, update, field) == by_sample(three, update, field)
        tokens = [rank[update].num_tokens for rank in three]
        assert max(tokens) - min(tokens) <= 10, "shards carry about the same load"
        total = sum(float(rank[update].weight.sum()) for rank in three)
        if aggregation != "constant_length":
            assert total == pytest.approx(1.0)
    for epoch in range(2):
        trained = [name for update in range(updates) for name in by_sample(three, epoch * updates + update, "weight")]
        assert sorted(trained) == [t.sample_id for t in STEP], "each epoch sees every trajectory once"


def test_blocks_in_any_order_give_the_same_shards() -> None:
    _, ranks = finished(assembler(2), STEP[:9], STEP[9:])
    _, shuffled = finished(assembler(2), STEP[15:], [], STEP[:15][::-1])
    for rank, other in zip(ranks, shuffled, strict=True):
        assert rank[0].sample_ids == other[0].sample_ids
        assert torch.equal(rank[0].token_ids, other[0].token_ids)
        assert torch.equal(rank[0].advantages, other[0].advantages)  # type: ignore[arg-type]


def test_scores_of_parts_return_to_their_tokens() -> None:
    _, (rank,) = finished(assembler(1), STEP, scores=True)
    batch = rank[0]
    assert batch.ref_logp is not None
    torch.testing.assert_close(batch.ref_logp, batch.token_ids.float() / 10)


def test_advantages_are_over_whole_groups_though_these_are_split_over_ranks() -> None:
    _, ranks = finished(assembler(3, advantage={"kind": "grpo", "scale_by_std": False}), STEP)
    found = by_sample(ranks, 0, "advantages")
    for t in STEP:
        group = [float(other.reward or 0) for other in STEP if other.group_id == t.group_id]
        expected = np.where(t.loss_mask, float(t.reward or 0) - sum(group) / len(group), 0.0)
        np.testing.assert_allclose(found[t.sample_id], expected, atol=1e-6)


def test_stragglers_are_compared_with_members_that_were_trained_on_before() -> None:
    """The advantage of a late member is what it would have been beside the others."""
    group = [replace(trajectory(number, float(number == 1)), group_id="g") for number in range(4)]
    whole, late = assembler(1), assembler(1)
    _, ranks = finished(whole, group)
    late.pack([(group[1].sample_id, 0)], 0, 0, group, witnesses={"g": [0.0, 0.0, 0.0], "gone": [1.0]})
    _, *alone = late.finish(1, None, None)
    name = group[1].sample_id
    assert by_sample(alone, 0, "advantages") == {name: by_sample(ranks, 0, "advantages")[name]}
    assert alone[0][0].num_trajectories == 1


def test_only_accepted_attempts_with_a_verdict_train() -> None:
    """A sample that was tried again is there twice; the attempt that was given up, and whatever has no verdict, stays out."""
    given_up = trajectory(2, 1.0, token_ids=np.full(8, 99, np.int32), loss_mask=np.ones(8, np.bool_),
                          logp=np.zeros(8, np.float32), token_version=np.zeros(8, np.int32))  # fmt: skip
    again = trajectory(2, 1.0, attempt=1)
    silent = trajectory(5, None)
    empty = trajectory(6, 1.0, loss_mask=np.zeros(5, np.bool_), token_ids=np.full(5, 6, np.int32),
                       logp=np.zeros(5, np.float32), token_version=np.full(5, -1, np.int32))  # fmt: skip
    worker = assembler(2)
    others = [t for t in STEP if t.sample_id not in ("s002", "s005", "s006")]
    accepted = [(t.sample_id, t.attempt) for t in (again, silent, empty, *others) if t.sample_id != "s009"]
    worker.pack(accepted, 0, 0, [given_up, silent, empty], [again, *others])
    report, *ranks = worker.finish(1, None, None)
    found = by_sample(ranks, 0, "token_ids")
    assert set(found) == {t.sample_id for t in STEP} - {"s005", "s006", "s009"}
    assert set(found["s002"]) == {2}
    assert report["batch/num_trajectories"] == 21.0


@pytest.mark.parametrize(
    ("accepted", "blocks", "message"),
    [
        ([("s001", 0), ("s003", 0)], [[STEP[1]], [STEP[2]]], r"in no block: s003 \(attempt 0\)"),
        ([("s001", 1)], [[STEP[1]]], r"in no block: s001 \(attempt 1\)"),
        ([("s001", 0)], [[STEP[1], STEP[2]], [STEP[1]]], r"more than once: s001 \(attempt 0\)"),
        ([("s001", 0), ("s001", 1)], [[STEP[1], trajectory(1, 1.0, attempt=1)]], "several attempts are accepted of: s001"),
        ([(f"x{n}", 0) for n in range(7)], [], r"x4 \(attempt 0\) and 2 more"),
    ],
)
def test_what_is_accepted_must_be_there_exactly_once(accepted: list[tuple[str, int]], blocks: list[list[Trajectory]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assembler(1).pack(accepted, 0, 0, *blocks)


def aged(number: int, versions: list[int], reward: float) -> Trajectory:
    """Two tokens of the prompt, then one token of each of the versions."""
    size = 2 + len(versions)
    mask = np.arange(size) >= 2
    return trajectory(number, reward, token_ids=np.full(size, number, np.int32), loss_mask=mask,
                      logp=np.where(mask, -0.5, 0.0).astype(np.float32),
                      token_version=np.array([-1, -1, *versions], np.int32))  # fmt: skip


def packed(max_staleness: int, trajectories: list[Trajectory], version: int) -> tuple[dict[str, float], list[list[Batch]]]:
    worker = assembler(1, advantage={"kind": "grpo", "scale_by_std": False})
    worker.pack([(t.sample_id, t.attempt) for t in trajectories], version, max_staleness, trajectories)
    report, *ranks = worker.finish(1, None, None)
    return report, ranks


def test_tokens_that_are_too_old_leave_the_loss_and_what_has_none_left_leaves_the_batch() -> None:
    """At version 7 with a staleness of 2: one trajectory is young, one began too early, one is too old all over."""
    report, ranks = packed(2, [aged(0, [7, 7], 1.0), aged(1, [3, 4, 5, 6], 0.0), aged(2, [3, 4], 8.0)], 7)
    assert by_sample(ranks, 0, "loss_mask") == {"s000": [False, False, True, True], "s001": [False] * 4 + [True, True]}
    assert by_sample(ranks, 0, "weight")["s001"] == [0, 0, 0, 0, 0.25, 0.25]
    assert by_sample(ranks, 0, "advantages") == {"s000": [0, 0, 0.5, 0.5], "s001": [0, 0, 0, 0, -0.5, -0.5]}, "s002 is not compared with"
    assert {name: report[f"batch/{name}"] for name in ("masked_token_ratio", "staleness_mean", "staleness_max", "num_new_tokens")} == {
        "masked_token_ratio": 0.5,
        "staleness_mean": 0.75,
        "staleness_max": 2.0,
        "num_new_tokens": 4.0,
    }


version_lists = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=8)


@given(version_lists, st.integers(0, 10))
def test_exactly_the_tokens_within_the_bound_are_trained_on(versions: list[list[int]], max_staleness: int) -> None:
    report, ranks = packed(max_staleness, [aged(number, each, float(number)) for number, each in enumerate(versions)], 9)
    expected = {f"s{number:03d}": [9 - v <= max_staleness for v in each] for number, each in enumerate(versions)}
    assert {name: mask[2:] for name, mask in by_sample(ranks, 0, "loss_mask").items()} == {n: m for n, m in expected.items() if any(m)}
    trained = [9 - v for each in versions for v in each if 9 - v <= max_staleness]
    assert report["batch/staleness_max"] == max(trained, default=0)
    assert report["batch/staleness_mean"] == pytest.approx(sum(trained) / max(1, len(trained)))
    assert report["batch/masked_token_ratio"] == pytest.approx(1 - len(trained) / sum(map(len, versions)))


def test_a_synchronous_step_reports_that_nothing_is_stale() -> None:
    report, _ = finished(assembler(1), STEP)
    assert [report[f"batch/{name}"] for name in ("masked_token_ratio", "staleness_mean", "staleness_max")] == [0.0, 0.0, 0.0]


def test_tokens_of_weights_that_do_not_exist_yet_are_refused() -> None:
    with pytest.raises(AssertionError, match="version 8 cannot exist while the trainers are at 7"):
        packed(2, [aged(0, [7, 8], 1.0)], 7)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_step_without_any_verdict_is_an_empty_update(num_shards: int) -> None:
    report, ranks = finished(assembler(num_shards), [trajectory(number, None) for number in range(4)])
    assert (report["batch/num_trajectories"], report["batch/informative_token_ratio"]) == (0.0, 0.0)
    assert [rank[0].num_tokens for rank in ranks] == [0] * num_shards


def test_equal_rewards_leave_nothing_to_learn_from() -> None:
    report, _ = finished(assembler(1), [trajectory(number, 1.0) for number in range(8)])
    assert report["batch/informative_token_ratio"] == 0.0


class TestDemonstrations:
    @pytest.fixture
    def arguments(self, tmp_path: Path, model_folder: Path) -> dict[str, Any]:
        path = tmp_path / "demos.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{n}=", "completion": str(n) * (1 + n % 3)}) + "\n" for n in range(10)))
        return {
            "model_folder": str(model_folder),
            "source": {"path": str(path)},
            "completion_field": "completion",
            "batch_size": 4,
            "seed": 5,
        }

    @staticmethod
    def shown(demonstrations: Demonstrations, number: int) -> list[tuple[int, ...]]:
        batch = demonstrations.update(number)
        bounds = batch.offsets.tolist()
        return [tuple(batch.token_ids[start:end].tolist()) for start, end in pairwise(bounds)]

    def test_every_epoch_shows_each_once_and_no_end_is_cut_short(self, arguments: dict[str, Any]) -> None:
        demonstrations = Demonstrations(**arguments)
        order = [shown for number in range(15) for shown in self.shown(demonstrations, number)]
        epochs = [order[start : start + 10] for start in range(0, 60, 10)]
        assert {len(set(epoch)) for epoch in epochs} == {10}
        assert len({tuple(epoch) for epoch in epochs}) == 6, "shuffled anew"

    def test_an_update_is_a_function_of_seed_and_number(self, arguments: dict[str, Any]) -> None:
        forwards, backwards = Demonstrations(**arguments), Demonstrations(**arguments)
        there = {number: self.shown(forwards, number) for number in range(8)}
        assert there == {number: self.shown(backwards, number) for number in reversed(range(8))}
        assert there != {number: self.shown(Demonstrations(**{**arguments, "seed": 6}), number) for number in range(8)}

    def test_the_loss_is_on_the_completion_and_its_end(self, arguments: dict[str, Any]) -> None:
        batch = Demonstrations(**arguments).update(0)
        assert float(batch.weight.sum()) == pytest.approx(1.0)
        bounds = batch.offsets.tolist()
        for start, end in pairwise(bounds):
            assert batch.loss_mask[start:end].tolist() == [False] * 3 + [True] * (end - start - 3)  # <bos>, digit, =
            assert int(batch.token_ids[end - 1]) == 2  # <eos>

    def test_fewer_demonstrations_than_a_batch_are_shown_once_each(self, arguments: dict[str, Any]) -> None:
        demonstrations = Demonstrations(**{**arguments, "batch_size": 64})
        assert Counter(self.shown(demonstrations, 3)).most_common(1)[0][1] == 1
        assert len(self.shown(demonstrations, 3)) == 10

    @pytest.mark.parametrize("num_shards", [1, 3])
    def test_ranks_share_each_update(self, arguments: dict[str, Any], num_shards: int) -> None:
        seed = arguments.pop("seed")
        worker = Assembler(RANK, num_shards=num_shards, seed=seed, demonstrations={**arguments, "heldout": arguments["source"]})
        ranks = worker.imitation(2, 3)
        assert [len(rank) for rank in ranks] == [3] * num_shards
        whole = Demonstrations(**arguments, seed=seed)
        for update in range(3):
            assert sum(rank[update].num_tokens for rank in ranks) == whole.update(2 + update).num_tokens
            assert sum(float(rank[update].weight.sum()) for rank in ranks) == pytest.approx(1.0)
        assert sum(shard.num_trajectories for shard in worker.heldout()) == 10
