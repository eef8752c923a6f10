"""The same run on two simulated Ray nodes: trainer and one engine on the first, another engine on the second."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader


def test_two_nodes_train_the_same_weights_as_one(first: RunFolder, tmp_path: Path) -> None:
    """Where a sample is generated changes nothing about it, and weights arrive bit for bit by either way."""
    script = Path(__file__).with_name("run_two_nodes.py")
    ended = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    transports = json.loads(ended.stdout.splitlines()[-1])
    assert transports == [["shared_memory", "broadcast"]] * 4  # before the first step and after each of three

    run = RunFolder.open(tmp_path / "run")
    here, there = (load_file(folder.final_model / "model.safetensors") for folder in (first, run))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    with Reader(run.store) as reader, Reader(first.store) as known:
        assert reader.count(Filter(phase="train")) == known.count(Filter(phase="train")) == 72
