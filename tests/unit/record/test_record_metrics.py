"""Metrics always land in valid JSON lines, whatever the values and whatever becomes of the other sinks."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drumroll.config.models import RecordConfig, TrackioConfig, WandbConfig
from drumroll.errors import ConfigError
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.metrics import MetricsLog, check_sinks

FILES_ONLY = RecordConfig(tensorboard=False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "x", {"name": "x"})


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_every_line_is_there_at_once_and_valid(folder: RunFolder) -> None:
    with MetricsLog(folder, FILES_ONLY, {}) as log:
        log.log(1, {"rollout/reward_mean": math.nan, "kl": math.inf, "n": np.float32(0.5)})
        (record,) = read_lines(folder.metrics_file)
        assert {**record, "time": 0} == {"step": 1, "time": 0, "rollout/reward_mean": "NaN", "kl": "Infinity", "n": 0.5}
        log.log_evaluation("before", 0, {"sampled": 0.4, "greedy": 0.6})
    (record,) = read_lines(folder.eval_file)
    assert (record["stage"], record["step"], record["sampled"], record["greedy"]) == ("before", 0, 0.4, 0.6)
    for line in folder.metrics_file.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_tensorboard_gets_a_copy(folder: RunFolder) -> None:
    with MetricsLog(folder, RecordConfig(), {}) as log:
        log.log(1, {"rollout/reward_mean": 0.25, "bad": math.nan})
    (events,) = folder.tensorboard.iterdir()
    assert b"rollout/reward_mean" in events.read_bytes()


def test_a_missing_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_sinks(FILES_ONLY)
    with pytest.raises(ConfigError, match=r"record\.wandb.*pip install wandb"):
        check_sinks(RecordConfig(wandb=WandbConfig()))
    with pytest.raises(ConfigError, match=r"record\.trackio.*pip install trackio"):
        check_sinks(RecordConfig(trackio=TrackioConfig()))


def test_wandb_and_trackio_are_told_everything(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda *names, **options: None,
        log=lambda values: told.append(("wandb", values)),
        finish=lambda: told.append("wandb finished"),
    )
    install(monkeypatch, "wandb", init=lambda **options: told.append(options) or run, Settings=lambda **options: options)
    install(
        monkeypatch,
        "trackio",
        init=lambda **options: told.append(options),
        log=lambda values, step: told.append(("trackio", step, values)),
        finish=lambda: told.append("trackio finished"),
    )
    record = RecordConfig(tensorboard=False, wandb=WandbConfig(project="p"), trackio=TrackioConfig(project="q"))
    with MetricsLog(folder, record, {"seed": 3}) as log:
        log.log(2, {"a": 1.0})
    assert (told[0]["project"], told[0]["mode"], told[0]["config"], told[0]["name"]) == ("p", "offline", {"seed": 3}, "run")
    assert (told[1]["project"], told[1]["config"]) == ("q", {"seed": 3})
    assert told[2:] == [("wandb", {"step": 2, "a": 1.0}), ("trackio", 2, {"a": 1.0}), "wandb finished", "trackio finished"]


def test_a_sink_that_fails_is_dropped_and_the_file_goes_on(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(values: dict[str, float], step: int) -> None:
        raise ConnectionError("no route")

    install(monkeypatch, "trackio", init=lambda **options: None, log=fail, finish=lambda: None)
    with MetricsLog(folder, RecordConfig(tensorboard=False, trackio=TrackioConfig()), {}) as log:
        with pytest.warns(UserWarning, match=r"record\.trackio failed.*no route"):
            log.log(1, {"a": 1.0})
        log.log(2, {"a": 2.0})
    assert [record["a"] for record in read_lines(folder.metrics_file)] == [1.0, 2.0]
