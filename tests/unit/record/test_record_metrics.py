"""Metrics always land in valid JSON lines, whatever the values and whatever becomes of the other sinks."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import sys
from collections.abc import Iterator
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
from drumroll.record.metrics import MetricsLog, check_sinks, rewind

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
        log.log(3, {}, weights="abc")
    assert (told[0]["project"], told[0]["mode"], told[0]["config"], told[0]["name"]) == ("p", "offline", {"seed": 3}, "run")
    assert (told[1]["project"], told[1]["config"], told[1]["name"], told[1]["resume"]) == ("q", {"seed": 3}, "run", "allow")
    assert told[2:] == [
        ("wandb", {"step": 2, "a": 1.0}),
        ("trackio", 2, {"a": 1.0}),
        ("wandb", {"step": 3}),
        ("trackio", 3, {}),
        "wandb finished",
        "trackio finished",
    ]
    with MetricsLog(folder, record, {"seed": 3}):
        assert (told[8]["id"], told[8]["resume"]) == (told[0]["id"], "allow")
        assert len(told[0]["id"]) == 32


def test_a_sink_that_fails_is_dropped_and_the_file_goes_on(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(values: dict[str, float], step: int) -> None:
        raise ConnectionError("no route")

    install(monkeypatch, "trackio", init=lambda **options: None, log=fail, finish=lambda: None)
    with MetricsLog(folder, RecordConfig(tensorboard=False, trackio=TrackioConfig()), {}) as log:
        with pytest.warns(UserWarning, match=r"record\.trackio failed.*no route"):
            log.log(1, {"a": 1.0})
        log.log(2, {"a": 2.0})
    assert [record["a"] for record in read_lines(folder.metrics_file)] == [1.0, 2.0]


def test_the_weights_are_text_in_the_line(folder: RunFolder) -> None:
    with MetricsLog(folder, FILES_ONLY, {}) as log:
        log.log(1, {"a": 1.0}, weights="9f3c")
        log.log(2, {"a": 1.0})
    assert [record.get("weights") for record in read_lines(folder.metrics_file)] == ["9f3c", None]


def test_a_run_that_is_taken_back_has_the_lines_of_then(folder: RunFolder) -> None:
    with MetricsLog(folder, FILES_ONLY, {}) as log:
        assert log.sizes() == {"metrics.jsonl": 0, "eval.jsonl": 0}
        log.log(1, {"a": 1.0})
        log.log_evaluation("before", 0, {"sampled": 0.1})
        sizes = log.sizes()
        log.log(2, {"a": 2.0})
        log.log(3, {"a": 3.0})
        log.log_evaluation("during", 2, {"sampled": 0.2})
    before = folder.metrics_file.read_bytes()
    rewind(folder, sizes)
    with MetricsLog(folder, FILES_ONLY, {}) as log:
        assert log.sizes() == sizes
        log.log(2, {"a": 20.0})
    assert [record["a"] for record in read_lines(folder.metrics_file)] == [1.0, 20.0]
    assert [record["step"] for record in read_lines(folder.eval_file)] == [0]
    assert [record["a"] for record in read_lines(folder.root / "metrics.superseded.jsonl")] == [2.0, 3.0]
    assert [record["step"] for record in read_lines(folder.root / "eval.superseded.jsonl")] == [2]
    assert before.startswith(folder.metrics_file.read_bytes()[: sizes["metrics.jsonl"]])


def test_the_disk_is_waited_for_once_a_checkpoint(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    with MetricsLog(folder, FILES_ONLY, {}) as log:
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").resolve().name))
        log.log(1, {"a": 1.0})
        log.log_evaluation("before", 0, {"sampled": 0.1})
        log.sizes()
        assert synced == []
        log.sync()
    assert synced == ["metrics.jsonl", "eval.jsonl"]


def shown(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: a session that starts at a step hides what was there of that step and later ones."""
    points: dict[str, list[tuple[int, float]]] = {}
    for event in (event for path in sorted(folder.tensorboard.iterdir()) for event in events(path.read_bytes())):
        if event.HasField("session_log"):
            points = {name: [point for point in those if point[0] < event.step] for name, those in points.items()}
        for value in event.summary.value:
            points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points


def events(content: bytes) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    place = 0
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        yield Event.FromString(content[place + 12 : place + 12 + length])
        place += length + 16


def test_tensorboard_shows_what_the_files_hold(folder: RunFolder) -> None:
    """The warm-up and the comparison count their updates as RL counts its steps: neither hides the other."""
    with MetricsLog(folder, RecordConfig(), {}) as log:
        for update in range(1, 4):
            log.log(update, {"sft/loss": 1.0 / update})
        log.log_evaluation("before", 0, {"sampled": 0.25})
        for step in range(1, 8):
            log.log(step, {"a": step}, weights="9f3c")
        sizes = log.sizes()
        log.log(8, {"a": 8.0})
        log.log_evaluation("after", 8, {"sampled": 0.5})
        log.log(4, {"sft/loss": 0.5})
    for value in (0.75, 0.875):  # taken back twice
        rewind(folder, sizes)
        with MetricsLog(folder, RecordConfig(), {}) as log:
            log.log(8, {"a": 10.0 * value})
            log.log_evaluation("after", 8, {"sampled": value})
    assert len(list(folder.tensorboard.iterdir())) == 3
    assert {name: sorted(points) for name, points in shown(folder).items()} == {
        "sft/loss": [(update, pytest.approx(1.0 / update)) for update in range(1, 4)],
        "a": [*((step, step) for step in range(1, 8)), (8, 8.75)],
        "eval/sampled": [(0, 0.25), (8, 0.875)],
    }
    rewind(folder, {})
    MetricsLog(folder, RecordConfig(), {}).close()
    assert not any(shown(folder).values())


def test_an_open_log_goes_on_where_it_was_taken_back_to(folder: RunFolder) -> None:
    with MetricsLog(folder, FILES_ONLY, {}) as log:
        log.log(1, {"a": 1.0})
        sizes = log.sizes()
        log.log(2, {"a": 2.0})
        rewind(folder, sizes)
        assert log.sizes() == sizes
        log.log(2, {"a": 20.0})
    assert [record["a"] for record in read_lines(folder.metrics_file)] == [1.0, 20.0]
