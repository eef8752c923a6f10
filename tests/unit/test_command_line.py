"""Commands that start nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drumroll import __version__
from drumroll.cli import app


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
