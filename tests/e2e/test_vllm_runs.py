"""Runs whose engines are vLLM's, on the CPU, through Ray. `make test-vllm` installs what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import run_tiny

from drumroll.backends.infer.vllm import check_installed
from drumroll.errors import PluginError
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from vllm_processes import vllm_processes

try:
    check_installed()
except PluginError as error:
    pytest.skip(f"{error} `make test-vllm` does both.", allow_module_level=True)

pytestmark = pytest.mark.timeout(280)

CHANGES: dict[str, Any] = {
    "model": {"scratch": {"config": {"hidden_size": 128}}},
    "engine": {"kind": "vllm", "num_slots": 16},
    "warmup": {"compare": False},
    "record": {"tensorboard": False},
}


def steps_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder.metrics_file) if "weights" in line]


@pytest.mark.parametrize("staleness", [0, 1])
def test_trainer_and_engine_agree_on_log_probabilities(tmp_path: Path, staleness: int) -> None:
    folder = run_tiny(
        tmp_path, **CHANGES, rollout={"max_staleness": staleness}, algo={"correction": {"kind": "truncated_is" if staleness else "none"}}
    )
    steps = steps_of(folder)
    assert len(steps) == 3
    if staleness == 0:
        assert max(step["mismatch/logp_mean"] for step in steps) < 1e-4
    assert vllm_processes() == []
