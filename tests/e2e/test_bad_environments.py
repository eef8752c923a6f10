"""Environments that raise, hang, return nonsense, never end or leak: the run goes on, says why, and trains on nothing of it."""

from pathlib import Path

import pytest

from drumroll.config.load import check_config
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.store import Filter, Reader

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("workers_in_this_process")]

CONFIG = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_run_with_bad_environments_goes_on_and_trains_on_the_others(tmp_path: Path) -> None:
    seeds = {"train": {"seeds": "0-11"}}
    tree = {
        "pipeline": "rl",
        "name": "bad",
        "max_steps": 3,
        "seed": 3,
        "run_dir": str(tmp_path / "run"),
        "plugins": [str(Path(__file__).with_name("bad_rooms.py"))],
        "model": {"scratch": {"characters": "0123456789=", "config": CONFIG}},
        "domains": {
            "bad": {"share": 0.5, "data": seeds, "env": {"kind": "bad_room"}},
            "leaking": {"share": 0.5, "data": seeds, "env": {"kind": "leaking_room"}},
        },
        "rollout": {
            "groups_per_step": 8, "group_size": 2, "max_turns": 4, "sampling": {"max_new_tokens": 3},
            "env_deadline_s": 2.0, "max_attempts": 1,
        },
        "devices": {"actor_train": 0, "actor_infer": 0},
        "record": {"tensorboard": False},
    }  # fmt: skip
    run = start(check_config(tree))
    with Reader(run.store) as reader:
        rows = list(reader.query(Filter(phase="train")))
        samples = [reader.load(row.sample_id) for row in rows]
    trained = [s for row, s in zip(rows, samples, strict=True) if row.state == "consumed"]
    assert len(trained) == 3 * 8 * 2
    assert [(sample.reward, sample.error) for sample in trained if sample.reward is None or sample.error] == []
    failed = {(s.task.domain, s.task.data["seed"]): s.error for s in samples if s.stop_reason in ("failed", "deadline")}
    assert not {(s.task.domain, s.task.data["seed"]) for s in trained} & {("bad", 1), ("bad", 2), ("bad", 3), ("leaking", 5)}
    assert "the door is stuck" in failed["bad", 1]
    assert "took longer than 2 s" in failed["bad", 2]
    assert "str" in failed["bad", 3]
    assert "memory was full" in failed["leaking", 5]
    assert {s.stop_reason for s in trained if (s.task.domain, s.task.data["seed"]) == ("bad", 4)} == {"turns"}
    assert sum(line["rollout/num_failed_environment"] for line in read_lines(run.metrics_file) if "weights" in line) > 0
