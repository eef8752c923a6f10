"""Commands that start nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from drumroll import __version__
from drumroll.cli import _supervised, app


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def config(tmp_path: Path) -> str:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1", "answer": "1"}) + "\n")
    tree = {
        "pipeline": "rl",
        "max_steps": 1,
        "model": {"scratch": {"characters": "01"}},
        "data": {"train": {"path": str(rows)}},
        "rewards": [{"kind": "exact_match"}],
        "ray": {"address": "auto"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tree))
    return str(path)


def test_the_version() -> None:
    assert said("--version") == f"{__version__}\n"


def test_a_cluster_that_is_not_joined_is_named(config: str) -> None:
    note = "`ray.address` is set: the device map is checked when the run starts; `drumroll plan … --pool 4x8x80GiB`"
    for command in ("check", "plan"):
        assert note in said(command, config)
        assert note not in said(command, config, "ray.address=null")
    assert note not in said("plan", config, "--pool", "1x8x80GiB")


def test_a_supervised_run_is_resumed_once_it_has_begun_and_begun_again_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may die before it has written anything that could be resumed."""
    asked: list[list[str]] = []
    folder = tmp_path / "run"

    def supervised(command: Callable[[], list[str]], **options: object) -> int:
        asked.append(command())
        folder.mkdir()  # as a process does that dies right after it has claimed its folder
        asked.append(command())
        assert not folder.exists(), "the next one claims it again"
        folder.mkdir()
        (folder / "config.yaml").touch()
        asked.append(command())
        return 0

    monkeypatch.setattr("drumroll.pipelines.supervise.supervise", supervised)
    monkeypatch.setattr("drumroll.pipelines.job.prepare", lambda cfg: None)
    assert _supervised(SimpleNamespace(run_dir=folder, name="x"), ["run.yaml"]) == 0
    assert [command[3] for command in asked] == ["train", "train", "resume"]
    assert asked[0][4:] == ["run.yaml", f"run_dir={folder}"]
    assert asked[2][4:] == [str(folder)]
