"""The assembler's share of an algorithm: what counts, what is compared, and what is carried from step to step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_assembler import RANK, assembler, by_sample, finished, trajectory
from torch import Tensor

from drumroll.types import Batch, Sampling, Trajectory
from drumroll.workers.assembler import Assembler

CENTRED = {"kind": "dr_grpo"}


def of_group(rewards: list[float], **changes: Any) -> list[Trajectory]:
    return [replace(trajectory(number, reward), group_id="g", **changes) for number, reward in enumerate(rewards)]


def step(
    worker: Assembler, block: list[Trajectory], ref_logp: float | None = None, carried: dict[str, float] | None = None, **pack: Any
) -> tuple[dict[str, float], list[list[Batch]]]:
    """One step on this block; the reference finds every token this likely."""
    worker.pack([(t.sample_id, t.attempt) for t in block], 0, 0, block, **pack)
    parts: list[Tensor] | None = None
    if ref_logp is not None:
        parts = [torch.full((shard.num_tokens,), ref_logp) for shard in worker.shards(2)]
    report, *ranks = worker.finish(1, parts, None, None, carried)
    return report, ranks


def advantage_of(ranks: list[list[Batch]]) -> dict[str, float]:
    """The one advantage that all counted tokens of a sample have."""
    found = by_sample(ranks, 0, "advantages")
    masks = by_sample(ranks, 0, "loss_mask")
    values = {name: {round(value, 5) for value, inside in zip(found[name], masks[name], strict=True) if inside} for name in found}
    assert all(len(each) == 1 for each in values.values())
    return {name: each.pop() for name, each in values.items()}


def test_what_was_cut_off_is_compared_with_and_not_trained_on() -> None:
    block = of_group([1.0, 0.0, 0.0, 1.0])
    block[1] = replace(block[1], stop_reason="length")
    report, ranks = finished(assembler(2, advantage=CENTRED, masks={"cut_off": True}), block)
    assert advantage_of(ranks) == {"s000": 0.5, "s002": -0.5, "s003": 0.5}
    tokens = {t.sample_id: t.num_new_tokens for t in block}
    assert report["batch/uncounted_token_ratio"] == pytest.approx(tokens["s001"] / sum(tokens.values()))
    assert report["batch/num_new_tokens"] == sum(tokens.values()) - tokens["s001"]
    assert sum(float(rank[0].weight.sum()) for rank in ranks) == pytest.approx(1.0)


def test_groups_that_are_too_easy_or_too_hard_do_not_count() -> None:
    """By what is stated of success; where nothing is, by the mean reward."""
    easy = of_group([1.0, 0.5], success=True)
    mixed = [replace(t, group_id="h", sample_id=f"t{n}", success=n == 0) for n, t in enumerate(of_group([1.0, 0.0]))]
    unstated = [replace(t, group_id="i", sample_id=f"u{n}") for n, t in enumerate(of_group([0.2, 0.1]))]
    _, ranks = finished(assembler(1, masks={"success_rate": [0.25, 0.75]}), [*easy, *mixed, *unstated])
    assert set(by_sample(ranks, 0, "weight")) == {"t0", "t1"}


def test_a_step_of_which_nothing_counts_is_an_empty_update() -> None:
    report, ranks = finished(assembler(2, masks={"cut_off": True}), of_group([1.0, 0.0], stop_reason="length"))
    assert (report["batch/num_new_tokens"], report["batch/uncounted_token_ratio"]) == (0.0, 1.0)
    assert [rank[0].num_tokens for rank in ranks] == [0, 0]


def test_remax_is_not_trained_on_its_greedy_sample() -> None:
    block = of_group([0.25, 1.0, 0.0])
    block[0] = replace(block[0], sampling=Sampling(temperature=0.0))
    _, ranks = finished(assembler(1, advantage="remax"), block)
    assert advantage_of(ranks) == {"s001": 0.75, "s002": -0.25}


def test_a_kl_in_the_rewards_is_part_of_what_is_compared() -> None:
    """Every token of sample n has a log-probability of -0.1 (n + 1) and one of -0.5 by the reference."""
    block = of_group([1.0, 0.0, 0.5, 0.0])
    kl = {"coef": 0.5, "estimator": "k1", "applied_to": "reward"}
    report, ranks = step(assembler(1, advantage=CENTRED, kl=kl), block, ref_logp=-0.5)
    earned = [float(t.reward or 0) - 0.5 * t.num_new_tokens * (-0.1 * (n + 1) + 0.5) for n, t in enumerate(block)]
    mean = sum(earned) / 4
    assert advantage_of(ranks) == {t.sample_id: pytest.approx(value - mean, abs=1e-4) for t, value in zip(block, earned, strict=True)}
    tokens = [t.num_new_tokens for t in block]
    mean_kl = sum(count * (0.5 - 0.1 * (n + 1)) for n, count in enumerate(tokens)) / sum(tokens)
    assert report["batch/kl_mean"] == pytest.approx(mean_kl, rel=1e-4)
    assert ranks[0][0].token_rewards is None, "nobody needs them any more"


def test_what_a_branch_spends_is_its_episodes() -> None:
    """A branch of one token 0.4 above the reference costs its episode 0.2, and its own tokens have the episode's advantage."""
    block = of_group([1.0, 1.0])
    branch = trajectory(0, 1.0, sample_id="s000.1", group_id="g", token_ids=np.ones(2, np.int32), loss_mask=np.array([False, True]),
                        logp=np.array([0.0, -0.1], np.float32), token_version=np.array([-1, 0], np.int32))  # fmt: skip
    block[0] = replace(block[0], logp=np.where(block[0].loss_mask, -0.5, 0.0).astype(np.float32), branches=(branch,))
    block[1] = replace(block[1], logp=np.where(block[1].loss_mask, -0.5, 0.0).astype(np.float32))
    kl = {"coef": 0.5, "estimator": "k1", "applied_to": "reward"}
    _, ranks = step(assembler(1, advantage=CENTRED, kl=kl), block, ref_logp=-0.5)
    assert advantage_of(ranks) == pytest.approx({"s000": -0.1, "s000.1": -0.1, "s001": 0.1}, abs=1e-4)


def test_an_episode_counts_once_in_the_running_rewards_and_its_branches_have_its_scale() -> None:
    block = of_group([0.0, 4.0])
    branch = replace(trajectory(1, 4.0), sample_id="s001.1", group_id="g")
    block[1] = replace(block[1], branches=(branch,))
    worker = assembler(1, advantage=CENTRED, reward_scaling={"normalise": "running"})
    report, ranks = step(worker, block, witnesses={"g": [2.0, 2.0]})
    assert (report["algo/reward_count"], report["algo/reward_mean"], report["algo/reward_squares"]) == (2.0, 2.0, 8.0)
    assert advantage_of(ranks) == pytest.approx({"s000": -1.0, "s001": 1.0, "s001.1": 1.0}, abs=1e-4)
    again, _ = step(worker, of_group([8.0]), carried=json.loads(json.dumps({k: v for k, v in report.items() if k.startswith("algo/")})))
    assert (again["algo/reward_count"], again["algo/reward_mean"]) == (3.0, 4.0)


def test_what_is_carried_decides_together_with_the_step_and_nothing_else() -> None:
    """Two workers that are told the same give the same, whatever one of them did before: a step can be repeated."""
    options: dict[str, Any] = {
        "kl": {"coef": 0.5, "adaptive": {"target": 0.01, "horizon": 50}},
        "advantage_scaling": {"normalise": "running", "clip": [-2, 2]},
    }
    first, second = of_group([1.0, 0.0, 0.5]), of_group([0.0, 0.0, 2.0])
    used, fresh = assembler(1, **options), assembler(1, **options)
    before, _ = step(used, first, -0.7)
    carried = {name: value for name, value in before.items() if name.startswith("algo/")}
    assert carried.keys() == {"algo/kl_coef", "algo/advantage_count", "algo/advantage_mean", "algo/advantage_squares"}
    (report, ranks), (other_report, other_ranks) = (step(worker, second, -0.7, carried) for worker in (used, fresh))
    assert report == other_report
    assert report["algo/kl_coef"] > carried["algo/kl_coef"] > 0.5
    for field in ("advantages", "kl_coef"):
        assert by_sample(ranks, 0, field) == by_sample(other_ranks, 0, field)
    coefs = [value for values in by_sample(ranks, 0, "kl_coef").values() for value in values]
    assert coefs == [pytest.approx(carried["algo/kl_coef"])] * len(coefs)


def test_an_advantage_over_whole_groups_needs_no_state() -> None:
    report, _ = finished(Assembler(RANK, num_shards=1, seed=3, algo={}, constant_length=8), of_group([1.0, 0.0]))
    assert not [name for name in report if name.startswith("algo/")]
