"""What an algorithm keeps from step to step (KL coefficient, statistics of rewards) survives a stop, and its steps replay."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from local_cluster import local_cluster
from test_resume import CutOffError, failing_at
from tiny import run_tiny

from drumroll.pipelines import rl
from drumroll.pipelines.replay import replay
from drumroll.pipelines.start import resume
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("workers_in_this_process")]

CHANGES: dict[str, Any] = {
    "max_steps": 4,
    "algo": {
        "advantage": "reinforce_pp",
        "loss": {"kind": "ppo_clip", "clip_high": 0.28, "dual_clip": 3.0},
        "aggregation": "group_mean",
        "kl": {"coef": 0.05, "estimator": "k1", "applied_to": "reward", "adaptive": {"target": 1e-3, "horizon": 100}},
        "entropy_coef": 0.01,
        "correction": {"kind": "masked_is", "level": "sequence", "bounds": [0.5, 2.0]},
        "reward_scaling": {"normalise": "running", "clip": [-3, 3]},
        "masks": {"cut_off": True, "sequence_ratio": [0.5, 2.0]},
        "updates_per_step": 2,
    },
    "warmup": {"compare": False},
    "checkpoint": {"every": 1, "keep_last": 4},
    "record": {"tensorboard": False},
    "data": {"heldout": None},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run to the end. Nobody writes into it."""
    with local_cluster():
        return run_tiny(tmp_path_factory.mktemp("carried"), **CHANGES)


def learnt(folder: RunFolder) -> list[dict[str, Any]]:
    """What each step says of the algorithm, without what depends on the clock."""
    return [
        {name: value for name, value in line.items() if name.startswith(("algo/", "update/", "batch/")) or name == "weights"}
        for line in read_lines(folder.metrics_file)
        if "weights" in line
    ]


def test_every_step_goes_on_from_the_one_before(whole: RunFolder) -> None:
    steps = learnt(whole)
    assert [line["algo/reward_count"] for line in steps] == [24.0, 48.0, 72.0, 96.0]
    coefs = [0.05, *(line["algo/kl_coef"] for line in steps)]
    assert all(before != after for before, after in pairwise(coefs))
    assert all({"update/rejected", "update/correction_weight", "batch/kl_mean"} <= line.keys() for line in steps)


def test_a_run_that_was_cut_off_ends_as_if_nothing_had_happened(whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(2))
        with pytest.raises(CutOffError):
            run_tiny(tmp_path, **CHANGES)
    resume(tmp_path / "run")
    assert learnt(RunFolder.open(tmp_path / "run")) == learnt(whole)


def test_steps_replay(whole: RunFolder) -> None:
    """From the metrics of the step before and the weights of the checkpoint."""
    again = replay(whole.root, 4)
    assert [(step.step, step.same_weights, step.differences()) for step in again] == [(4, True, {})]


def test_remax_compares_with_a_greedy_attempt_that_is_not_trained_on(tmp_path: Path) -> None:
    changes = {**CHANGES, "max_steps": 2, "algo": {"advantage": "remax"}}
    folder = run_tiny(tmp_path, **changes)
    with Reader(folder.store) as reader:
        samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train"))]
    for group in {sample.group_id for sample in samples}:
        temperatures = sorted((s.sample_id, s.sampling.temperature) for s in samples if s.group_id == group)
        assert [temperature for _, temperature in temperatures] == [0.0, 1.0, 1.0, 1.0]
    steps = learnt(folder)
    trained = sum(line["update/num_loss_tokens"] for line in steps)
    assert trained == sum(s.num_new_tokens for s in samples if s.sampling.temperature > 0)
    assert any(line["update/grad_norm"] > 0 for line in steps)


def test_a_comparison_learns_also_where_the_warm_up_ended_at_rate_zero(tmp_path: Path) -> None:
    changes = {**CHANGES, "max_steps": 2, "data": {}, "algo": {}, "warmup": {"compare": True, "schedule": "linear", "min_lr_ratio": 0.0}}
    folder = run_tiny(tmp_path, **changes)
    lines = [line for line in read_lines(folder.metrics_file) if "sft/lr" in line]
    rates = [line["sft/lr"] for line in lines]
    assert rates[-1] == 0.0
    assert sum(rate > 0 for rate in rates) >= len(rates) - 2
