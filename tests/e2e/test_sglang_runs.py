"""A run whose engine is SGLang's, on the CPU, through Ray. `make test-sglang` installs what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import run_tiny

from drumroll.backends.infer.sglang import check_installed
from drumroll.errors import PluginError
from drumroll.record.files import read_lines

try:
    check_installed()
except PluginError as error:
    pytest.skip(f"{error} `make test-sglang` does both.", allow_module_level=True)


@pytest.mark.timeout(900)
def test_trainer_and_engine_agree_on_log_probabilities(tmp_path: Path) -> None:
    folder = run_tiny(
        tmp_path,
        model={"scratch": {"config": {"hidden_size": 128}}},
        engine={"kind": "sglang", "num_slots": 16},
        warmup={"compare": False},
        record={"tensorboard": False},
        ray={"start_timeout_s": 600},
    )
    steps = [line for line in read_lines(folder.metrics_file) if "weights" in line]
    assert len(steps) == 3
    assert max(step["mismatch/logp_mean"] for step in steps) < 1e-4
