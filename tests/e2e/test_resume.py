"""A run that was cut off, damaged or led astray goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_cluster import local_cluster
from tiny import run_tiny, tiny_tree

import drumroll
from drumroll.config.load import check_config
from drumroll.errors import CheckpointError, ConfigError, DivergedError, RunFolderError
from drumroll.pipelines import rl
from drumroll.pipelines.replay import replay
from drumroll.pipelines.start import resume, start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader

pytestmark = pytest.mark.usefixtures("workers_in_this_process")

SMALL: dict[str, Any] = {
    "max_steps": 4,
    "checkpoint": {"every": 1, "keep_last": 3},
    "warmup": None,
    "record": {"tensorboard": False},
    "data": {"heldout": None},
}


class CutOffError(Exception):
    """Ends a run from inside."""


def failing_at(step: int) -> Callable[..., None]:
    """`take_step` of a run that ends by an error after that step."""
    take_step = rl.take_step

    def take_step_or_fail(job: Any, fleet: Any, rec: Any, keeper: Any) -> None:
        if keeper.progress.step == step:
            raise CutOffError
        take_step(job, fleet, rec, keeper)

    return take_step_or_fail


@pytest.fixture
def cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A small run that ended by an error in its third step."""
    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(2))
        with pytest.raises(CutOffError):
            run_tiny(tmp_path, **SMALL)
    return RunFolder.open(tmp_path / "run")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with local_cluster():
        return run_tiny(tmp_path_factory.mktemp("uninterrupted"), **SMALL)


def weights(folder: RunFolder) -> list[str]:
    """Digest of the weights after each step."""
    return [line["weights"] for line in read_lines(folder.metrics_file) if "weights" in line]


def test_killed_at_twenty_random_points_and_resumed_it_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    command = [sys.executable, "tests/e2e/killpoints.py", str(tmp_path), "--kills", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["different"] == []
    assert sum(report["kills"].values()) == 20
    assert len(report["kills"]) >= 5, report  # phases of the run in which it was killed


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": {"actor_infer": "0-2"}, "ray": {"cpu_slots": 4}},
        {"rollout": {"num_env_workers": 3}},
        {"engine": {"num_slots": 5}},
        {"engine": {"num_slots": 64}, "rollout": {"num_env_workers": 2}, "devices": {"actor_infer": "0-1"}, "ray": {"cpu_slots": 2}},
    ],
    ids=["engines", "environment workers", "slots", "all"],
)
def test_other_numbers_of_workers_and_slots_give_the_same_weights(
    uninterrupted: RunFolder, tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert weights(run_tiny(tmp_path, **{**SMALL, **changes})) == weights(uninterrupted)


def test_going_on_gives_what_the_uninterrupted_run_gives(uninterrupted: RunFolder, cut_off: RunFolder) -> None:
    resume(cut_off.root)
    assert weights(cut_off) == weights(uninterrupted)
    assert [line["resumed_from"] for line in read_lines(cut_off.incarnations_file)] == ["", "step-000002"]
    with Reader(cut_off.store) as mine, Reader(uninterrupted.store) as other:
        assert {row.sample_id: row.reply for row in mine.query()} == {row.sample_id: row.reply for row in other.query()}


def test_a_finished_run_stays_as_it_is(uninterrupted: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = result_of(uninterrupted)
    resume(uninterrupted.root)
    assert "is finished" in capsys.readouterr().err
    assert result_of(uninterrupted) == before


def result_of(folder: RunFolder) -> dict[str, Any]:
    return {"metrics": folder.metrics_file.read_bytes(), "incarnations": folder.incarnations_file.read_bytes()}


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    uninterrupted: RunFolder, cut_off: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = next((cut_off.root / "checkpoints" / "step-000002" / "trainer").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    resume(cut_off.root)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "skipped step-000002" in said
    assert f"trainer/{shard.name}" in said
    assert "going on from step-000001" in said
    assert weights(cut_off) == weights(uninterrupted)
    assert len(read_lines(cut_off.root / "metrics.superseded.jsonl")) == 1


def test_a_run_without_a_good_checkpoint_never_begins_anew_unasked(cut_off: RunFolder) -> None:
    for manifest in cut_off.root.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    before = cut_off.metrics_file.read_bytes()
    with pytest.raises(CheckpointError, match="holds no checkpoint that can be used"):
        resume(cut_off.root)
    assert cut_off.metrics_file.read_bytes() == before


def test_a_run_that_died_before_its_first_checkpoint_begins_again_and_says_so(
    uninterrupted: RunFolder, cut_off: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(cut_off.root / "checkpoints")
    resume(cut_off.root)
    assert "before its first checkpoint" in capsys.readouterr().err
    assert weights(cut_off) == weights(uninterrupted)


def test_a_changed_config_is_refused_with_the_difference_unless_named(cut_off: RunFolder) -> None:
    config = cut_off.config()
    config["trainer"]["lr"] = 5e-4
    cut_off.save_config(config)
    with pytest.raises(ConfigError, match=r"trainer\.lr: 0\.001 → 0\.0005") as refusal:
        resume(cut_off.root)
    assert "drumroll resume RUN trainer.lr=0.0005" in str(refusal.value)
    resume(cut_off.root, ["trainer.lr=0.0005"])
    lines = [line for line in read_lines(cut_off.metrics_file) if "weights" in line]
    assert [line["update/lr"] for line in lines] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert cut_off.config()["trainer"]["lr"] == 5e-4


def test_a_changed_plugin_file_is_refused_unless_named(cut_off: RunFolder, tmp_path: Path) -> None:
    index = cut_off.plugins / "index.json"
    known = json.loads(index.read_text())
    (path,) = known
    known[path]["sha256"] = "0" * 64
    index.write_text(json.dumps(known))
    with pytest.raises(ConfigError, match=f"accept the change by name: --changed {re.escape(path)}"):
        resume(cut_off.root)
    resume(cut_off.root, changed_files=[path])
    assert len(weights(cut_off)) == 4


def test_two_processes_cannot_work_on_one_run(cut_off: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumroll.record.folder.take_lock", lambda handle: False)
    with pytest.raises(RunFolderError, match="another process"):
        resume(cut_off.root)


def test_a_replayed_step_gives_the_same_weights(uninterrupted: RunFolder) -> None:
    results = replay(uninterrupted.root, 4)
    assert [each.step for each in results][-1] == 4
    assert all(each.same_weights and not each.differences() for each in results)


def test_a_replay_notices_other_trajectories(uninterrupted: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(uninterrupted.root, copy.root)
    lines = copy.metrics_file.read_text().splitlines()
    last = json.loads(lines[-1])
    last["weights"], last["update/loss"] = "0" * 32, 7.0
    copy.metrics_file.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    final = replay(copy.root, 4)[-1]
    assert not final.same_weights
    assert set(final.differences()) == {"update/loss"}


LOSS = """
import drumroll
from pathlib import Path

BUDGET = Path("FOLDER/budget")


def broken(logp, batch):
    "Not finite in the steps that a file names, once each."
    step = int(batch.token_version.max()) + 1
    left = BUDGET.read_text().split()
    if str(step) in left:
        left.remove(str(step))
        BUDGET.write_text(" ".join(left))
        return drumroll.TokenLoss(logp * float("nan"))
    return drumroll.TokenLoss(-logp * batch.advantages)
"""


def run_with_nan(folder: Path, steps: str, **changes: Any) -> RunFolder:
    """The small run with a loss that is not finite in these steps."""
    (folder / "loss.py").write_text(LOSS.replace("FOLDER", str(folder)))
    (folder / "budget").write_text(steps)
    return run_tiny(folder, **{**SMALL, "max_steps": 6, "algo": {"loss": {"kind": f"{folder}/loss.py:broken"}}, **changes})


def test_a_nan_gradient_skips_the_update_and_names_the_batch(tmp_path: Path) -> None:
    run = run_with_nan(tmp_path, "3")
    digests = weights(run)
    assert digests[1] == digests[2] != digests[3]
    (incident,) = read_lines(run.incidents_file)
    assert incident["kind"] == "nonfinite"
    assert incident["where"] == "step 3"
    assert len(incident["samples"]) == 24
    assert len(read_lines(run.incarnations_file)) == 1


def test_three_nan_gradients_in_a_row_roll_back_and_go_on_with_other_samples(tmp_path: Path) -> None:
    run = run_with_nan(tmp_path, "3 4 5")
    assert [line["kind"] for line in read_lines(run.incidents_file)] == ["nonfinite"] * 3 + ["rollback"]
    assert [line["resumed_from"] for line in read_lines(run.incarnations_file)] == ["", "step-000002"]
    digests = weights(run)
    assert len(digests) == 6 == len(set(digests))
    with Reader(run.store) as reader:
        rows = reader.query(Filter(phase="train"))
        assert len(rows) == len({row.sample_id for row in rows}) == 6 * 24
    first_try = {line["step"]: line for line in read_lines(run.root / "metrics.superseded.jsonl")}
    again = {line["step"]: line for line in read_lines(run.metrics_file)}
    assert set(first_try) == {3, 4, 5}
    assert first_try[3]["rollout/reward_mean"] != again[3]["rollout/reward_mean"] or first_try[4] != again[4]


def test_a_run_that_keeps_diverging_stops(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"again after going back to 'step-000000' 3 times"):
        run_with_nan(tmp_path, " ".join(["1", "2", "3"] * 4))


Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_nearly_full_stops_checkpoints_and_not_the_run(
    uninterrupted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drumroll.record.checkpoint.shutil.disk_usage", lambda path: Usage(1, 1, 2**20))
    run = run_tiny(tmp_path, **SMALL)
    assert weights(run) == weights(uninterrupted)
    assert "nearly full" in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert {line["kind"] for line in read_lines(run.incidents_file)} == {"checkpoint"}


def test_a_run_can_do_without_checkpoints(
    uninterrupted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = {**SMALL, "checkpoint": {"to_disk": False}}
    run = run_tiny(tmp_path, **without)
    assert weights(run) == weights(uninterrupted)
    monkeypatch.setattr(rl, "take_step", failing_at(2))
    with pytest.raises(CutOffError):
        run_tiny(tmp_path / "cut off", **without)
    assert "drumroll resume" not in capsys.readouterr().out
    assert not [*tmp_path.glob("**/checkpoints/*")]
    with pytest.raises(ConfigError, match=r"checkpoint\.to_disk"):
        check_config(tiny_tree(tmp_path, checkpoint={"to_disk": False, "every": 2}))


def test_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    changes = {**SMALL, "data": {}, "eval": {"every": 1, "num_tasks": 4}, "checkpoint": {"keep_last": 1, "keep_best": 1}}
    run = run_tiny(tmp_path, **changes)
    scores = {line["step"]: line["sampled"] for line in read_lines(run.eval_file)}
    best = max(scores, key=lambda step: (scores[step], step))
    kept = {path.name for path in (run.root / "checkpoints").glob("step-*")}
    assert f"step-{best:06d}" in kept
    assert len(kept) <= 2


def test_checkpoints_can_be_on_any_filesystem(uninterrupted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {**SMALL, "checkpoint": {"every": 1, "root": "memory://drumroll/elsewhere"}}
    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(2))
        with pytest.raises(CutOffError):
            run_tiny(tmp_path, **elsewhere)
    run = resume(tmp_path / "run")
    assert not (run.root / "checkpoints").exists()
    assert read_lines(run.incarnations_file)[-1]["resumed_from"] == "step-000002"
    assert weights(run) == weights(uninterrupted)


def test_a_checkpoint_can_be_exported(uninterrupted: RunFolder, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    uninterrupted.export(tmp_path / "out", step=4)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    final = AutoModelForCausalLM.from_pretrained(uninterrupted.final_model).state_dict()
    assert all(bool((exported[name] == final[name]).all()) for name in final)


def test_sft_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tiny_tree(tmp_path)
    config = {
        "pipeline": "sft",
        "model": tree["model"],
        "sft": tree["warmup"] | {"compare": None},
        "record": {"tensorboard": False},
        "checkpoint": {"every": 1},
    }
    del config["sft"]["compare"]
    whole = start(check_config({**config, "run_dir": str(tmp_path / "whole")}))

    def fail(*_: object) -> None:
        raise CutOffError

    with monkeypatch.context() as patch:
        patch.setattr("drumroll.pipelines.fleet.Fleet.export", fail)
        with pytest.raises(CutOffError):
            start(check_config({**config, "run_dir": str(tmp_path / "cut")}))
    resume(tmp_path / "cut")
    one, two = ((tmp_path / name / "model/final/model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == two
    assert whole.root == tmp_path / "whole"


def reward_of_mine(trajectory: drumroll.Trajectory) -> float:
    return float(len(trajectory.last_reply)) / 10


def test_from_python_functions_are_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tiny_tree(tmp_path)
    options = {"rollout": tree["rollout"], "devices": tree["devices"], "record": {"tensorboard": False}, "checkpoint": {"every": 1}}
    tasks = [{"prompt": f"{number}="} for number in range(10)]
    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(1))
        with pytest.raises(CutOffError):
            drumroll.train(model=tree["model"], tasks=tasks, reward=reward_of_mine, run_dir=tmp_path / "run", max_steps=2, **options)
    run = drumroll.resume(tmp_path / "run", reward=reward_of_mine)
    assert [line["step"] for line in run.metrics] == [1, 2]


def test_determinism_refuses_what_cannot_keep_the_promise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs `model\.dtype: float32`"):
        check_config(tiny_tree(tmp_path, deterministic=True))


def terminate_after_two_steps(arguments: list[str], run: RunFolder) -> None:
    """Start the command, send it SIGTERM when it has made two steps, and expect a checkpoint of where it stood."""
    already = len(weights(run)) if run.metrics_file.exists() else 0
    with subprocess.Popen([sys.executable, "-m", "drumroll", *arguments], stdout=subprocess.PIPE, text=True) as process:
        patience = time.monotonic() + 120
        while not run.metrics_file.exists() or len(weights(run)) < already + 2:
            assert time.monotonic() < patience
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        said, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    assert f"the run can go on from its checkpoint 'step-{len(weights(run)):06d}'" in said


@pytest.mark.real_ray
def test_sigterm_then_on_two_trainers_and_back(tmp_path: Path) -> None:
    """SIGTERM writes a checkpoint and exits 143; the run goes on with two ranks, then with one; losses agree to rounding."""
    changes = {**SMALL, "checkpoint": {"every_s": 1000.0}, "max_steps": 12}
    with local_cluster():
        whole = run_tiny(tmp_path / "whole", **changes)
    folder = tmp_path / "cut"
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_tree(folder, **{**changes, "run_dir": str(folder / "run")})))
    run = RunFolder(folder / "run")
    terminate_after_two_steps(["train", str(config)], run)
    terminate_after_two_steps(["resume", str(run.root), "devices.actor_train=0-1", "ray.cpu_slots=2"], run)
    resume(run.root, ["devices.actor_train=0"])
    assert len(read_lines(run.incarnations_file)) == 3
    mine, other = ([line for line in read_lines(each.metrics_file) if "weights" in line] for each in (run, whole))
    assert [line["step"] for line in mine] == [line["step"] for line in other]
    for one, two in zip(mine, other, strict=True):
        assert one["rollout/reward_mean"] == pytest.approx(two["rollout/reward_mean"], abs=0.05)
        assert one["update/grad_norm"] == pytest.approx(two["update/grad_norm"], rel=0.05, abs=1e-4)


@pytest.mark.real_ray
def test_a_supervised_run_whose_process_is_killed_goes_on_by_itself_as_if_it_had_not_been(tmp_path: Path) -> None:
    changes = {**SMALL, "max_steps": 40, "deterministic": True, "model": {"dtype": "float32"}}
    with local_cluster():
        undisturbed = run_tiny(tmp_path / "undisturbed", **changes)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_tree(tmp_path, **changes)))
    run = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "drumroll", "train", str(config), f"run_dir={run.root}", "--supervise"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as supervisor:
        patience = time.monotonic() + 120
        while not run.metrics_file.exists() or len(weights(run)) < 2:
            assert time.monotonic() < patience
            assert supervisor.poll() is None
            time.sleep(0.02)
        os.kill(int(run.lock_file.read_text()), signal.SIGKILL)
        _, said = supervisor.communicate(timeout=150)
    assert supervisor.returncode == 0, said
    assert "was ended by SIGKILL. It goes on in 1 s." in said
    assert len(read_lines(run.incarnations_file)) == 2
    assert [line["step"] for line in read_lines(run.metrics_file)] == list(range(1, 41))
    assert weights(run) == weights(undisturbed)
