"""Learners that are lost without a copy of their state in memory: the run goes back to its newest checkpoint, or to its beginning, and ends
as if nothing had happened. A recorder that is lost is no reason to go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sabotage import Outcome
from safetensors.torch import load_file

from drumroll.cluster import supervision
from drumroll.config.load import check_config, merge
from drumroll.errors import DeviceLost, StateLost
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.start import start
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import Recorder
from drumroll.workers.preference import PreferenceTrainer
from drumroll.workers.trainer import TrainWorker

from local_cluster import local_cluster  # isort: skip
from tiny import tiny_tree, write_rows  # isort: skip


def rl(folder: Path, **changes: Any) -> dict[str, Any]:
    """Four steps after a warm-up, a checkpoint after each, nothing in memory."""
    own = {
        "deterministic": True,
        "model": {"dtype": "float32"},
        "warmup": {"compare": False, "steps": 6},
        "data": {"heldout": None},
        "max_steps": 4,
        "checkpoint": {"in_memory": False, "every": 1},
        "record": {"tensorboard": False},
        "run_dir": str(folder / "run"),
    }
    return tiny_tree(folder, **merge(own, changes))


def sft(folder: Path) -> dict[str, Any]:
    tree = rl(folder)
    section = {key: value for key, value in tree["warmup"].items() if key != "compare"}
    kept = {key: tree[key] for key in ("name", "seed", "model", "checkpoint", "run_dir", "record")}
    return {"pipeline": "sft", **kept, "sft": {**section, "steps": 30}, "devices": {"actor_train": 0}}


def preference(folder: Path) -> dict[str, Any]:
    tree = sft(folder)
    del tree["sft"]
    rows = Path(write_rows(folder / "pairs.jsonl", 40, 5, demonstrations=True))
    rows.write_text(rows.read_text().replace('"completion"', '"chosen"').replace("}", ', "rejected": "0"}'))
    section = {"data": {"path": str(rows)}, "steps": 30, "batch_size": 8, "kind": "dpo"}
    return {**tree, "pipeline": "preference", "preference": section, "devices": {"actor_train": 0, "reference": 0}}


@contextmanager
def the_device_falls_off(worker: type, method: str, number: int) -> Iterator[None]:
    """At the call of this number."""
    function, calls = getattr(worker, method), []

    def falling(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            raise DeviceLost(f"{self.rank.role} rank 0 on node {self.rank.node[:8]}: its device fell off in {method}()")
        return function(self, *args, **kwargs)

    with patch.object(worker, method, falling):
        yield
    assert len(calls) >= number, "it did not come to that"


def run(tree: dict[str, Any]) -> Outcome:
    with local_cluster():
        return Outcome(start(check_config(tree)), [], 0.0)


def kinds(outcome: Outcome) -> list[str]:
    return [line["kind"] for line in outcome.incidents]


def final_weights(folder: RunFolder) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder.final_model / "model.safetensors").items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(rl(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize(("method", "number"), [("imitate", 1), ("begin", 2), ("train", 1), ("train", 3), ("snapshot", 4), ("export", 1)])
def test_the_run_ends_as_if_nothing_had_happened(method: str, number: int, plain: Outcome, tmp_path: Path) -> None:
    """Wherever it goes back to: a checkpoint that is being written is lost with those who write it."""
    with the_device_falls_off(TrainWorker, method, number):
        outcome = run(rl(tmp_path))
    assert kinds(outcome).count("went back") == 1
    assert outcome.weights == plain.weights
    assert final_weights(outcome.run) == final_weights(plain.run)
    outcome.check_samples(6, 4)


@pytest.mark.parametrize(("tree", "worker", "method"), [(sft, TrainWorker, "imitate"), (preference, PreferenceTrainer, "train")])
@pytest.mark.parametrize("number", [1, 4])
def test_other_pipelines_go_back_too(
    tree: Callable[[Path], dict[str, Any]], worker: type, method: str, number: int, tmp_path: Path
) -> None:
    expected = run(tree(tmp_path / "plain"))
    with the_device_falls_off(worker, method, number):
        outcome = run(tree(tmp_path / "faulty"))
    assert kinds(outcome).count("went back") == 1
    assert final_weights(outcome.run) == final_weights(expected.run)


def test_a_run_without_checkpoints_begins_again(plain: Outcome, tmp_path: Path) -> None:
    with the_device_falls_off(TrainWorker, "train", 3):
        outcome = run(rl(tmp_path, warmup=None, checkpoint={"to_disk": False, "every": 0}))
    assert [line["to"] for line in outcome.incidents if line["kind"] == "went back"] == ["the beginning"]
    assert len(outcome.weights) == 4
    outcome.check_samples(6, 4)


def test_a_run_that_goes_back_again_and_again_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "LONGEST_PAUSE_S", 0.0)

    def falling(self: TrainWorker, *args: Any) -> Any:
        raise DeviceLost(f"actor_train rank 0 on node {self.rank.node[:8]}: its device fell off")

    with patch.object(TrainWorker, "train", falling), pytest.raises(StateLost, match="gone back to 'step-000000' 5 times"):
        run(rl(tmp_path))


@pytest.mark.parametrize("step", [2, 4])
def test_a_recorder_that_dies_costs_nothing(step: int, plain: Outcome, tmp_path: Path) -> None:
    """In between, and when nothing but its last rows is left to do."""
    fleets: list[Fleet] = []
    start_rl, log_step = Fleet.start_rl, Recorder.log_step

    def noticed(fleet: Fleet, *args: Any) -> None:
        start_rl(fleet, *args)
        fleets.append(fleet)

    def struck(rec: Recorder, number: int, *args: Any, **kwargs: Any) -> None:
        log_step(rec, number, *args, **kwargs)
        if number == step:
            fleets[0].recorder.kill()

    with patch.object(Fleet, "start_rl", noticed), patch.object(Recorder, "log_step", struck):
        outcome = run(rl(tmp_path))
    assert "role lost" in kinds(outcome)
    assert outcome.weights == plain.weights
    outcome.check_samples(6, 4)
