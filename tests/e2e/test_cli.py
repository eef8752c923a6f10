"""The commands on real runs: signals, failures that stop a run, and what can be asked of a run afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from tiny import tiny_tree
from transformers import AutoModelForCausalLM

from drumroll import cli
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary
from drumroll.record.store import Filter, Reader
from drumroll.registry import REGISTRY, Entry, require
from drumroll.workers.demonstrations import Demonstrations

pytestmark = pytest.mark.timeout(240)

MARK = "DRUMROLL_TEST_RUN"
"""An environment variable that every process of a run inherits."""

Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; returns what it printed."""

    def run(*arguments: object, code: int | None = None) -> str:
        monkeypatch.setattr(sys, "argv", ["drumroll", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        assert "Traceback" not in shown.err
        return shown.err if code else shown.out

    return run


def write_config(folder: Path, **changes: object) -> Path:
    tree = tiny_tree(folder, run_dir=str(folder / "run"), **{"warmup": {"steps": 1, "compare": False}, **changes})
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def processes(mark: str) -> list[int]:
    """Living processes that inherited the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


def session_folder(mark: str) -> Path:
    """Temporary folder of the run's private Ray, as its processes name it."""
    lines = [(Path("/proc") / str(pid) / "cmdline").read_bytes().decode() for pid in processes(mark)]
    return Path(next(found.group() for line in lines if (found := re.search(r"/[^\0=]*/drumroll-ray-\w+", line))))


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    patience = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < patience, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.05)


@contextmanager
def endless(folder: Path, mark: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own that would train for hours."""
    arguments = [sys.executable, "-m", "drumroll", "train", str(write_config(folder)), "max_steps=1000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(arguments, env={**os.environ, MARK: mark}, **pipes) as run:  # type: ignore[call-overload]
        try:
            yield run
        finally:
            for pid in processes(mark):
                os.kill(pid, signal.SIGKILL)


def num_steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("rollout/reward_mean") if metrics.exists() else 0


def test_signals_end_a_run_and_every_process_of_it_and_no_other_run(tmp_path: Path) -> None:
    """Two runs at the same time: SIGTERM for one, Ctrl-C for the other."""
    one, two = tmp_path / "one", tmp_path / "two"
    marks = {folder: f"{os.getpid()}-{folder.name}" for folder in (one, two)}
    with endless(one, marks[one]) as first, endless(two, marks[two]) as second:
        for folder, run in ((one, first), (two, second)):
            wait_until(lambda f=folder, r=run: num_steps(f) > 0 or r.poll() is not None, 120, "the first step")  # type: ignore[misc]
            assert run.poll() is None, run.stderr and run.stderr.read()
            assert len(processes(marks[folder])) >= 6
        temporary = {folder: session_folder(mark) for folder, mark in marks.items()}
        assert all(folder.is_dir() for folder in temporary.values())

        first.terminate()
        out, err = first.communicate(timeout=20)
        assert first.returncode == 143
        assert err == ""
        assert "the run can go on from its checkpoint" in out
        wait_until(lambda: not processes(marks[one]), 10, "the end of every process after SIGTERM")
        assert not temporary[one].exists()
        assert temporary[two].is_dir()

        reached = num_steps(two)
        wait_until(lambda: num_steps(two) > reached, 30, "another step of the other run")
        os.killpg(second.pid, signal.SIGINT)  # as a terminal does
        out, err = second.communicate(timeout=30)
        assert second.returncode == 130
        assert err == "drumroll: interrupted\n"
        assert "the run can go on from its checkpoint" in out
        wait_until(lambda: not processes(marks[two]), 10, "the end of every process after Ctrl-C")
        assert not temporary[two].exists()


REWARDS = """
def asleep(trajectory):
    raise RuntimeError("the judge is asleep")


def silent(trajectory):
    return None
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def test_a_reward_that_always_raises_stops_the_run(tmp_path: Path, rewards: Path, command: Command) -> None:
    config = write_config(tmp_path, rewards=[{"kind": f"{rewards}:asleep"}], data={"heldout": None})
    message = command("train", config, code=1)
    assert message.startswith("drumroll: RolloutError: sample train/")
    assert "of task 'train-" in message
    assert "failed 2 times (`rollout.max_attempts`)" in message
    assert "reward 'asleep' failed on task 'train-" in message
    assert f"RuntimeError: the judge is asleep ({rewards}, line 3)" in message


def test_a_reward_that_never_has_a_verdict_stops_the_run_after_ten_steps(tmp_path: Path, rewards: Path, command: Command) -> None:
    config = write_config(tmp_path, rewards=[{"kind": f"{rewards}:silent"}], data={"heldout": None}, max_steps=30)
    message = command("train", config, code=1)
    assert message.startswith("drumroll: RolloutError: 10 steps in a row had nothing to learn from")
    assert f"drumroll show {tmp_path / 'run'}" in message
    listed = command("show", tmp_path / "run", "--step", "10")
    assert "20 of 24 samples" in listed
    assert "no verdict" in listed


class TestAfterARun:
    def test_show_lists_and_filters(self, first: RunFolder, command: Command) -> None:
        assert "20 of 192 samples" in command("show", first.root)
        assert "20 of 24 samples" in command("show", first.root, "--phase", "train", "--step", "2")
        assert "48 samples" in command("show", first.root, "--phase", "train", "--step", ">=2", "--limit", "100")
        assert "No sample matches." in command("show", first.root, "--reward", ">5")
        assert "No sample matches." in command("show", first.root, "--domain", "chess")
        short = command("show", first.root, "--stop", "length", "--phase", "train", "--limit", "1000")
        rest = command("show", first.root, "--stop", "stop", "--phase", "train", "--limit", "1000")
        assert short.count("train/0000") + rest.count("train/0000") == 72

    def test_show_prints_one_sample_in_full(self, first: RunFolder, command: Command) -> None:
        shown = command("show", first.root, "train/000002/0003/001")
        for text in ("train, step 2", "exact_match", "positions", "temperature 1", "by the weights of step 1", "answer:"):
            assert text in shown
        assert "no sample" in command("show", first.root, "train/000009/0000/000", code=2)

    def test_export_writes_a_folder_that_transformers_loads(self, first: RunFolder, tmp_path: Path, command: Command) -> None:
        out = tmp_path / "deep" / "model"
        assert command("export", first.root, out).startswith(f"wrote {out} from {first.final_model}")
        exported, final = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, first.final_model))
        assert all(exported[name].equal(final[name]) for name in final)

    def test_export_writes_episodes_that_are_imitated_token_for_token(self, first: RunFolder, tmp_path: Path, command: Command) -> None:
        out = tmp_path / "episodes.jsonl"
        assert command("export", first.root, out, "--trajectories", "--phase", "train", "--step", ">=2") == f"wrote 48 episodes to {out}\n"
        batch = Demonstrations(
            model_folder=str(first.final_model), source={"path": str(out)}, completion_field="completion", batch_size=48, seed=0
        ).update(0)
        with Reader(first.store) as reader:
            samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train")) if row.step >= 2]
        sampled = sorted((sample.token_ids.tolist(), sample.loss_mask.tolist()) for sample in samples)
        bounds = batch.offsets.tolist()
        cuts = list(pairwise(bounds))
        assert sorted((batch.token_ids[a:b].tolist(), batch.loss_mask[a:b].tolist()) for a, b in cuts) == sampled
        assert "exists already" in command("export", first.root, out, "--trajectories", code=2)
        assert "no episode with a verdict" in command("export", first.root, tmp_path / "none", "--trajectories", "--reward", ">9", code=2)

    def test_play_shows_episodes_turn_by_turn(self, first: RunFolder, command: Command) -> None:
        shown = command("play", first.root, "--phase", "eval", "--limit", "2", "--delay", "0", "--env", "single_turn")
        assert shown.count("ended by") == 2
        assert shown.count("turn 1   reward") == 2
        assert "It has: single_turn." in command("play", first.root, "--env", "frozen_lake", code=2)
        assert "No episode matches." in command("play", first.root, "--step", "99")

    def test_the_saved_config_passes_the_checks(self, first: RunFolder, command: Command) -> None:
        assert command("check", first.config_file).startswith("ok: 40 training tasks, 20 held-out tasks, 3 steps")


class TestEvaluation:
    def test_a_runs_model_scores_what_it_scored_at_the_runs_end(self, first: RunFolder, tmp_path: Path, command: Command) -> None:
        shown = command("eval", first.root, "--out", tmp_path / "again")
        again = read_summary(RunFolder.open(tmp_path / "again"))
        assert again["evaluation"] == read_summary(first)["after"]
        assert f"{again['evaluation']['sampled']:.3f}" in shown
        assert not (tmp_path / "again" / "model").exists()
        assert "eval" in command("show", tmp_path / "again", "--phase", "eval")
        assert "holds an evaluation" in command("resume", tmp_path / "again", code=2)

    def test_another_model_with_a_config(self, first: RunFolder, tmp_path: Path, command: Command) -> None:
        config = write_config(tmp_path, rollout={"sampling": {"max_new_tokens": 2}})
        command("eval", config, "eval.num_tasks=4", "--model", first.root, "--out", tmp_path / "one")
        samples = read_lines(RunFolder.open(tmp_path / "one").eval_file)[0]
        assert samples["stage"] == "evaluation"
        assert samples["sampled_rollout/num_samples"] == 4.0
        assert samples["sampled_rollout/new_tokens_max"] <= 2.0

    def test_what_cannot_be_evaluated_is_said_before_anything_starts(self, tmp_path: Path, command: Command) -> None:
        config = write_config(tmp_path)
        assert "no held-out tasks" in command("eval", config, "data.heldout=null", "--out", tmp_path / "out", code=2)
        assert "no final model" in command("eval", tmp_path, "--out", tmp_path / "out", code=2)
        (tmp_path / "empty").mkdir()
        assert "holds no run" in command("eval", tmp_path / "empty", "--out", tmp_path / "out", code=2)
        assert not (tmp_path / "out").exists()


class TestWithoutARun:
    def test_list_names_everything(self, command: Command) -> None:
        shown = command("list")
        for name in ("single_turn", "exact_match", "contains_word", "grpo", "rloo", "ppo_clip", "native", "fsdp2"):
            assert name in shown
        listed = command("list", "reward", "--plugin", "./examples/guess_number.py")
        assert "exact_match" in listed
        assert "grpo" not in listed
        assert "guess_number" in command("list", "env", "--plugin", "./examples/guess_number.py")

    def test_what_needs_a_package_that_is_missing_is_listed_with_the_install_line(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lookup = REGISTRY.lookup

        def without_math(family: str, kind: str) -> Entry:
            if kind == "math":
                require("no_such_package", "math")
            return lookup(family, kind)

        monkeypatch.setattr(REGISTRY, "lookup", without_math)
        listed = command("list", "reward")
        assert "pip install 'drumroll[math]'" in listed
        assert "exact_match" in listed

    def test_plan_prints_the_map(self, tmp_path: Path, command: Command) -> None:
        config = write_config(tmp_path)
        for shown in (command("plan", config), command("plan", config, "devices=auto", "--pool", "4x8x80GiB")):
            for role in ("actor_train", "actor_infer", "environment"):
                assert role in shown
        assert "32" in command("plan", config, "devices=auto", "--pool", "4x8x80GiB")
        assert not (tmp_path / "run").exists()

    def test_help(self, command: Command) -> None:
        for name in ("train", "eval", "check", "plan", "export", "show", "list"):
            assert name in command("--help", code=0)
