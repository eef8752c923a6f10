"""Every file of examples/ as a newcomer runs it, and training from code that no file holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from statistics import fmean

import pytest

from drumroll import cli
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader

pytestmark = pytest.mark.timeout(240)

EXAMPLES = Path(__file__).parents[2] / "examples"

NOTEBOOK = """
    import drumroll

    wanted = "a"

    def letter(trajectory):
        return {"share": trajectory.last_reply.count(wanted) / 4, "none": None}

    run = drumroll.train(
        model={"scratch": {"characters": "abc", "config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}}},
        tasks=({"prompt": text} for text in ("b", "c", "bb", "cc")),
        reward=[letter, lambda trajectory: 1.0, lambda trajectory: 2.0],
        max_steps=2,
        run_dir="run",
        rollout={"groups_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 4}},
    )
    parts = run.trajectories(limit=1)[0].reward_parts
    print(run.model.is_dir(), len(run.trajectories(phase="train")), len(run.metrics), sorted(parts), parts["<lambda>"], parts["<lambda>_2"])
"""


def started(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    return subprocess.Popen([sys.executable, *arguments], env={**os.environ, "COLUMNS": "140"}, **pipes)  # type: ignore[call-overload, no-any-return]


def test_training_from_python_twice_at_the_same_time(tmp_path: Path) -> None:
    """The example script, and code whose reward exists only in `__main__`: two runs on one machine, and both finish."""
    code = textwrap.dedent(NOTEBOOK)
    with started([str(EXAMPLES / "vowel_reward.py")], tmp_path / "script") as script, started(["-c", code], tmp_path / "cell") as cell:
        script_out, script_err = script.communicate(timeout=200)
        cell_out, cell_err = cell.communicate(timeout=200)
    assert script.returncode == 0, script_err
    assert cell.returncode == 0, cell_err

    (root,) = (tmp_path / "script" / "runs").iterdir()
    summary = json.loads((root / "summary.json").read_text())
    before, after = summary["before"]["sampled"], summary["after"]["sampled"]
    assert after >= before + 0.2
    assert script_out.splitlines()[-1] == f"reward on new prompts: {before:.2f} → {after:.2f}"
    assert [json.loads(line)["prompt"] for line in (root / "inputs" / "heldout.jsonl").read_text().splitlines()] == list("lmnp")
    (kept,) = (root / "plugins").glob("*.py")
    assert "def vowels" in kept.read_text()

    assert cell_out.splitlines()[-1] == "True 16 2 ['<lambda>', '<lambda>_2', 'letter/share'] 1.0 2.0"


def test_every_extension_point_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of several turns, a reward, an advantage and a loss, all of them files of examples/."""
    overrides = [f"run_dir={tmp_path / 'run'}", "max_steps=20", "trainer.lr=1e-2"]
    monkeypatch.setattr(sys, "argv", ["drumroll", "train", "examples/all_together.yaml", *overrides])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code is None
    run = RunFolder.open(tmp_path / "run")
    steps = [line for line in read_lines(run.metrics_file) if "rollout/reward_mean" in line]
    assert len(steps) == 20
    assert {"reward/vowels_mean", "reward/environment_mean", "update/ratio", "env/invalid_mean"} <= set().union(*steps)
    rewards = [line["rollout/reward_mean"] for line in steps]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.1
    with Reader(run.store) as reader:
        rows = reader.query(Filter(phase="train"), limit=1000)
        assert len(rows) == 20 * 32
        assert {row.stop_reason for row in rows} <= {"done", "turns", "length"}
        longest = max((reader.load(row.sample_id) for row in rows), key=lambda trajectory: len(trajectory.turns))
    assert [turn.author for turn in longest.turns] == ["environment", "policy"] * 3
    assert {path.stem.rpartition("-")[0] for path in run.plugins.glob("*.py")} == {
        "guess_number", "best_of_group", "soft_clip_loss", "vowel_reward",
    }  # fmt: skip
