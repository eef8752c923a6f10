"""The RL pipeline through a real local Ray: what it leaves behind, that it repeats, and every kind of device map."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import run_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from drumroll.config.load import check_config, load_config
from drumroll.errors import RunFolderError
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary
from drumroll.record.store import Bounds, Filter, Reader

pytestmark = pytest.mark.timeout(180)


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.final_model / "model.safetensors")


def difference(one: RunFolder, other: RunFolder) -> float:
    """Largest difference of any weight."""
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_the_summary_has_the_figures_that_the_end_prints(first: RunFolder) -> None:
    summary = read_summary(first)
    for stage in ("before", "after", "comparison"):
        assert 0.0 <= summary[stage]["sampled"] <= 1.0
        assert 0.0 <= summary[stage]["greedy"] <= 1.0
    assert summary["steps"] == 3
    assert summary["seconds"]["total"] >= sum(summary["seconds"][phase] for phase in ("rollout", "score", "update", "sync"))
    assert summary["tokens"]["generated"] > 0


def test_the_final_model_loads_and_differs_from_the_first(first: RunFolder) -> None:
    model = AutoModelForCausalLM.from_pretrained(first.final_model)
    tokenizer = AutoTokenizer.from_pretrained(first.final_model)
    ids = tokenizer("4321=", return_tensors="pt").input_ids
    assert model(input_ids=ids).logits.isfinite().all()
    before = load_file(first.initial_model / "model.safetensors")
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(first).items())


def test_the_resolved_config_is_saved_and_loads(first: RunFolder) -> None:
    cfg = load_config([first.config_file])
    assert cfg.seed == 11
    assert check_config(first.config()) == cfg


def test_plugin_files_are_kept_with_the_run(first: RunFolder) -> None:
    index = json.loads((first.plugins / "index.json").read_text())
    (entry,) = (value for path, value in index.items() if path.endswith("rewards.py"))
    assert "def positions" in (first.plugins / entry["file"]).read_text()


def test_metrics_of_every_step_are_finite_and_named_by_phase(first: RunFolder) -> None:
    steps = [line for line in read_lines(first.metrics_file) if "rollout/reward_mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert {"update/loss", "update/grad_norm", "update/entropy", "sync/bytes", "time/rollout_s", "rollout/tokens_per_s"} <= line.keys()
        assert line["rollout/num_samples"] == 24.0
        assert line["mismatch/logp_mean"] <= line["mismatch/logp_max"] < 1e-4, "engines and trainers say the same in float32"
        assert line["mismatch/ratio_p01"] <= 1.0001
        assert line["mismatch/ratio_p99"] >= 0.9999
        assert len(line.pop("weights")) == 32  # digits of a digest
        assert all(isinstance(value, int | float) for value in line.values())
    assert list(first.tensorboard.glob("events*"))
    assert first.curve_file.stat().st_size > 10_000


def test_every_trajectory_is_in_the_store_as_it_was_sampled(first: RunFolder) -> None:
    with Reader(first.store) as reader:
        assert reader.count(Filter(phase="train")) == 72
        assert reader.count(Filter(phase="eval")) == 2 * 2 * 20
        for row in reader.query(Filter(phase="train", step=Bounds.at(2)), limit=10):
            trajectory = reader.load(row.sample_id)
            sampled = trajectory.loss_mask
            assert (trajectory.token_version[sampled] == 1).all()
            assert (trajectory.logp[sampled] < 0).all()
            assert trajectory.reward_parts.keys() == {"exact_match", "positions"}
            assert trajectory.reward == pytest.approx(trajectory.reward_parts["exact_match"] + 0.5 * trajectory.reward_parts["positions"])


def test_the_engines_log_probabilities_are_the_models_own(first: RunFolder) -> None:
    """Weights of step 3 generated the last evaluation: a plain forward of the exported model gives the same values."""
    model = AutoModelForCausalLM.from_pretrained(first.final_model)
    with Reader(first.store) as reader:
        rows = [row for row in reader.query(Filter(phase="eval", step=Bounds.at(3))) if row.temperature == 1.0][:10]
        assert rows
        for row in rows:
            trajectory = reader.load(row.sample_id)
            ids = torch.tensor(trajectory.token_ids, dtype=torch.long)
            with torch.no_grad():
                logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            expected = logp[:-1].gather(1, ids[1:, None])[:, 0]
            mask = torch.tensor(trajectory.loss_mask[1:])
            torch.testing.assert_close(torch.tensor(trajectory.logp[1:])[mask], expected[mask], atol=1e-4, rtol=0)


def test_a_run_folder_is_never_overwritten(first: RunFolder) -> None:
    before = sorted(path.name for path in first.root.iterdir())
    with pytest.raises(RunFolderError, match="already holds a run"):
        run_tiny(first.root.parent)
    assert sorted(path.name for path in first.root.iterdir()) == before


@pytest.mark.parametrize(
    ("kind", "devices", "sizes", "offload"),
    [
        ("colocated", {"actor_train": "0-1", "actor_infer": "0-1"}, {"tp": 2}, True),
        ("disjoint", {"actor_train": "0-1", "actor_infer": "2-3"}, {}, False),
        ("overlapping", {"actor_train": "0-1", "actor_infer": "1-2"}, {"cp": 2}, True),
    ],
)
def test_two_trainers_and_two_engines_learn_the_same_on_every_map(
    first: RunFolder, tmp_path: Path, kind: str, devices: dict[str, Any], sizes: dict[str, int], offload: bool
) -> None:
    """Engines sample the same tokens wherever they are, also when they have slept; two ranks, which share trajectories, matrices or tokens,
    sum the same gradient in another order."""
    waits, parallel = {"offload": offload}, {"actor_train": sizes}
    run = run_tiny(
        tmp_path, devices=devices, parallel=parallel, ray={"cpu_slots": 4}, warmup={"compare": False}, trainer=waits, engine=waits
    )
    assert difference(first, run) < 2e-4, kind
