"""Asynchronous training, dynamic sampling, redundancy, tail batching and the timeline, through the whole loop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from local_cluster import local_cluster
from tiny import run_tiny, tiny_tree

from drumroll.config.load import check_config
from drumroll.errors import ConfigError, RolloutError
from drumroll.life import FINAL, unpack_life
from drumroll.pipelines.job import prepare
from drumroll.pipelines.replay import replay
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader, SampleRow
from drumroll.record.trace import write_trace

pytestmark = pytest.mark.usefixtures("workers_in_this_process")

ALONE: dict[str, Any] = {"warmup": None, "record": {"tensorboard": False}, "data": {"heldout": None}}
APART: dict[str, Any] = {"devices": {"actor_train": 0, "actor_infer": 1}, "ray": {"cpu_slots": 2}}
ASYNCHRONOUS: dict[str, Any] = {**ALONE, **APART, "max_steps": 6, "algo": {"correction": "truncated_is"}, "rollout": {"max_staleness": 2}}


def steps_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder.metrics_file) if "weights" in line]


def rows_of(folder: RunFolder, **where: Any) -> list[SampleRow]:
    with Reader(folder.store) as reader:
        return reader.query(Filter(phase="train", **where))


def groups_by_step(folder: RunFolder) -> dict[int, int]:
    """How many groups each step was the first to train on; stragglers of a group may follow in later steps."""
    first: dict[str, int] = {}
    for row in rows_of(folder, state="consumed"):
        first[row.group_id] = min(row.step, first.get(row.group_id, row.step))
    return dict(sorted(Counter(first.values()).items()))


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with local_cluster():
        return run_tiny(tmp_path_factory.mktemp("asynchronous"), **ASYNCHRONOUS, checkpoint={"every": 2, "keep_last": 4})


def test_asynchronous_training_keeps_the_staleness_bound(asynchronous: RunFolder) -> None:
    with Reader(asynchronous.store) as reader:
        rows = reader.query(Filter(phase="train", state="consumed"))
        for row in rows:
            trajectory = reader.load(row.sample_id)
            assert row.step - 1 - trajectory.token_version[trajectory.loss_mask].max() <= 2  # older tokens beside it are masked
    steps = steps_of(asynchronous)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert max(line["batch/staleness_max"] for line in steps) in (1.0, 2.0)  # of the tokens that were trained on
    assert all(line["update/correction_weight"] > 0 for line in steps)


def test_every_sample_of_a_run_is_in_the_store_with_its_whole_life(asynchronous: RunFolder) -> None:
    rows = rows_of(asynchronous)
    assert {row.state for row in rows} <= FINAL
    assert groups_by_step(asynchronous) == dict.fromkeys(range(1, 7), 6)
    for row in rows:
        life = unpack_life(row.life)
        assert life[0].state == "admitted"
        assert life[-1].state == row.state
        if row.state == "consumed":
            assert [stamp.state for stamp in life][1:-1] == [
                "leased", "environment", "waiting", "generating", "environment", "reward", "done",
            ]  # fmt: skip
            (generating,) = (stamp for stamp in life if stamp.state == "generating")
            assert 0 <= generating.slot < 16
            assert generating.version == row.oldest_version
            assert life[-1].version == row.step - 1


def test_an_asynchronous_schedule_is_replayed_bit_for_bit(asynchronous: RunFolder) -> None:
    results = replay(asynchronous.root, 6)
    assert [result.step for result in results] == [5, 6]
    assert all(result.same_weights for result in results)


def test_the_timeline_shows_slots_workers_and_trainer(asynchronous: RunFolder, tmp_path: Path) -> None:
    count = write_trace(asynchronous, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert count == len([event for event in events if event["ph"] == "X"])
    assert {"slot 0", "actor_train"} <= names
    assert any("environment" in name for name in names)
    assert {"generating", "reward", "update", "sync"} <= {event["name"] for event in events}


def test_utilisation_of_every_role_is_a_metric_of_every_step(asynchronous: RunFolder) -> None:
    for line in steps_of(asynchronous):
        assert all(line[f"utilisation/{role}"] > 0 for role in ("actor_infer", "actor_train", "environment"))


def test_groups_that_teach_nothing_are_replaced(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, **ALONE, rollout={"filters": ["all_equal"]})
    assert sum(line["rollout/num_rejected_all_equal"] for line in steps_of(run) if line["rollout/num_rejected"]) > 0
    assert all(line["rollout/num_samples"] == 24 for line in steps_of(run))
    by_group: dict[str, set[float | None]] = {}
    for row in rows_of(run, state="consumed"):
        by_group.setdefault(row.group_id, set()).add(row.reward)
    assert all(len(rewards) > 1 for rewards in by_group.values())
    assert {row.reason for row in rows_of(run, state="filtered")} == {"all_equal"}


def test_a_filter_that_rejects_everything_ends_in_an_error_with_counts(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text("def never(group):\n    return 'I never like it'\n")
    filters = [{"kind": f"{tmp_path}/never.py"}]
    with pytest.raises(RolloutError, match=r"21 groups were rejected in one step, while 0 of the 6 .*21 × never.*rollout\.max_rejected"):
        run_tiny(tmp_path, **ALONE, rollout={"filters": filters, "max_rejected": 20})
    assert {row.reason for row in rows_of(RunFolder.open(tmp_path / "run"), state="filtered")} == {"never: I never like it"}


def test_samples_of_a_rollout_that_fails_are_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def broken(trajectory):\n    raise OSError('no disk')\n")
    with pytest.raises(RolloutError, match=r"failed 2 times \(`rollout.max_attempts`\).*no disk"):
        run_tiny(tmp_path, **ALONE, rewards=[{"kind": f"{tmp_path}/broken.py"}])
    failed = rows_of(RunFolder.open(tmp_path / "run"), state="failed")
    assert failed
    assert all("no disk" in row.reason and row.attempt == 1 for row in failed)


def test_redundancy_takes_the_first_and_says_what_that_does_to_lengths(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, **ALONE, rollout={"extra_groups": 3, "extra_samples": 1})
    assert all(line["rollout/num_samples"] == 24 for line in steps_of(run))
    assert all(0.0 < line["rollout/kept_length_ratio"] <= 1.5 for line in steps_of(run))
    rows = rows_of(run)
    assert len(rows) == 3 * 9 * 5
    assert len([row for row in rows if row.state == "consumed"]) == 3 * 24


def test_tail_batching_puts_long_groups_off_and_brings_them_back(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, **ALONE, max_steps=6, rollout={"groups_per_step": 4, "extra_groups": 2, "tail_batching": True})
    consumed = rows_of(run, state="consumed")
    assert len(consumed) == 6 * 4 * 4
    assert any("+1" in row.group_id for row in consumed)
    assert all(line["rollout/num_samples"] == 16 for line in steps_of(run))


def test_on_shared_devices_staleness_means_carry_over(tmp_path: Path) -> None:
    changes = ASYNCHRONOUS | {"devices": {"actor_train": 0, "actor_infer": 0}, "max_steps": 4}
    run = run_tiny(tmp_path, **changes)
    assert len(steps_of(run)) == 4
    (note,) = prepare(check_config(tiny_tree(tmp_path, **changes))).notes
    assert "unfinished samples alone" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"max_staleness": -1}}, "rollout.max_staleness"),
        ({"rollout": {"max_staleness": 1}}, "algo.correction"),
        ({"rollout": {"max_in_flight": 3}}, "max_in_flight.*too few for one group of 4"),
        ({"rollout": {"min_group_size": 5}}, "min_group_size.*more than the 4 members"),
        ({"rollout": {"tail_batching": True}}, "extra_groups"),
        ({"rollout": {"extra_groups": 1}, "deterministic": True, "model": {"dtype": "float32"}}, "rollout.extra_groups"),
        ({"rollout": {"filters": ["all_rihgt"]}}, "Did you mean 'all_right'"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(tiny_tree(tmp_path, **changes))


def test_no_group_is_trained_on_twice_when_an_asynchronous_run_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "tests/e2e/killpoints.py", str(tmp_path), "--kills", "6", "--seed", "3", "--staleness", "2"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout)
    assert told["different"] == []
    assert sum(told["kills"].values()) == 6


@pytest.mark.real_ray
def test_asynchronous_training_through_ray(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, **{**ASYNCHRONOUS, "max_steps": 3, "rollout": {"max_staleness": 1, "num_env_workers": 2}})
    steps = steps_of(run)
    assert len(steps) == 3
    assert all(line["batch/staleness_max"] <= 1 for line in steps)
    assert groups_by_step(run) == {1: 6, 2: 6, 3: 6}
