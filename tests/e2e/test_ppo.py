"""PPO with a critic: what a run leaves behind, that it resumes bit for bit, that its steps replay, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import local_cluster
from safetensors.torch import load_file
from test_resume import CutOffError, failing_at
from tiny import run_tiny, tiny_tree
from transformers import AutoModelForSequenceClassification

from drumroll.config.load import check_config, merge
from drumroll.errors import ConfigError, ModelError
from drumroll.pipelines import rl
from drumroll.pipelines.job import plan_for, prepare
from drumroll.pipelines.replay import replay
from drumroll.pipelines.start import resume
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("workers_in_this_process")]

PPO: dict[str, Any] = {
    "max_steps": 4,
    "algo": {"advantage": {"kind": "gae", "gamma": 0.99, "lam": 0.9}, "updates_per_step": 2},
    "critic": {"lr": 1e-3, "warmup_steps": 2},
    "warmup": {"compare": False},
    "checkpoint": {"every": 1, "keep_last": 3},
    "record": {"tensorboard": False},
    "data": {"heldout": None},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run to the end. Nobody writes into it."""
    with local_cluster():
        return run_tiny(tmp_path_factory.mktemp("ppo"), **PPO)


def steps_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder.metrics_file) if "weights" in line]


def learnt(folder: RunFolder) -> list[dict[str, Any]]:
    """What each step says of policy and critic, without what depends on the clock."""
    return [
        {name: value for name, value in line.items() if name.startswith(("critic/", "update/", "batch/")) or name == "weights"}
        for line in steps_of(folder)
    ]


def model_files(folder: RunFolder) -> dict[str, bytes]:
    return {name: (folder.root / "model" / name / "model.safetensors").read_bytes() for name in ("final", "critic")}


def test_every_step_reports_what_the_critic_learnt(whole: RunFolder) -> None:
    steps = steps_of(whole)
    assert len(steps) == 4
    names = {"loss", "explained_variance", "value_mean", "return_mean", "clip_fraction", "grad_norm", "lr", "skipped"}
    for line in steps:
        assert {f"critic/{name}" for name in names} <= line.keys()
        assert all(math.isfinite(line[f"critic/{name}"]) for name in names)
    assert steps[0]["critic/value_mean"] == 0.0, "a fresh head says nothing"
    assert all(line["critic/value_mean"] != 0.0 for line in steps[1:])
    tokens = steps[1]["batch/num_tokens"]
    assert steps[1]["batch/num_scored_tokens"] == 2 * tokens, "old log-probabilities and values"


def test_only_the_critic_learns_in_its_warm_up(whole: RunFolder) -> None:
    steps = steps_of(whole)
    assert ["update/loss" in line for line in steps] == [False, False, True, True]
    digests = [line["weights"] for line in steps]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_critic_is_exported_as_a_classifier_that_began_with_the_warm_policy(whole: RunFolder) -> None:
    critic = AutoModelForSequenceClassification.from_pretrained(whole.critic_model)
    assert critic.config.num_labels == 1
    assert critic.score.weight.any()
    warm = load_file(whole.reference_model / "model.safetensors")["model.embed_tokens.weight"]
    initial = load_file(whole.initial_model / "model.safetensors")["model.embed_tokens.weight"]
    own = critic.model.embed_tokens.weight.detach()
    assert not torch.equal(own, warm)
    assert (own - warm).norm() < (own - initial).norm()


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_run_that_was_cut_off_ends_as_if_nothing_had_happened(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(step))
        with pytest.raises(CutOffError):
            run_tiny(tmp_path, **PPO)
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
    assert {path.name for path in checkpoint.iterdir() if path.is_dir()} == {"trainer", "critic"}
    run = resume(tmp_path / "run")
    assert learnt(run) == learnt(whole)
    assert model_files(run) == model_files(whole)


def test_a_changed_learning_rate_reaches_the_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(2))
        with pytest.raises(CutOffError):
            run_tiny(tmp_path, **PPO)
    run = resume(tmp_path / "run", ["critic.lr=5e-4"])
    assert [line["critic/lr"] for line in steps_of(run)] == [1e-3, 1e-3, 5e-4, 5e-4]


def test_replayed_steps_give_the_same_values_and_weights(whole: RunFolder) -> None:
    results = replay(whole.root, 4)
    assert [each.step for each in results] == [4]
    assert all(each.same_weights and not each.differences() for each in results)
    assert any(name.startswith("critic/") for name in results[0].again)


def test_a_critic_can_begin_with_a_folder_and_have_a_device_of_its_own(whole: RunFolder, tmp_path: Path) -> None:
    changes = {
        "critic": {"path": str(whole.critic_model), "warmup_steps": 0},
        "devices": {"critic": 1},
        "ray": {"cpu_slots": 2},
        "max_steps": 1,
    }
    run = run_tiny(tmp_path, **{**PPO, **changes})
    first = steps_of(run)[0]
    assert first["critic/value_mean"] != 0.0
    assert "update/loss" in first


def test_a_critic_whose_numbers_are_not_finite_takes_the_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drumroll.algo import critic as algo

    honest = algo.value_loss
    broken = [3, 4, 5]

    def value_loss(value: Any, batch: Any, *, clip: float | None = None) -> Any:
        outcome = honest(value, batch, clip=clip)
        step = int(batch.token_version.max()) + 1
        if step in broken:
            broken.remove(step)
            return type(outcome)(outcome.loss * float("nan"), outcome.metrics)
        return outcome

    monkeypatch.setattr("drumroll.workers.trainer.value_loss", value_loss)
    run = run_tiny(tmp_path, **{**PPO, "max_steps": 6, "algo": {"advantage": {"kind": "gae"}, "updates_per_step": 1}})
    assert [line["kind"] for line in read_lines(run.incidents_file)] == ["nonfinite"] * 3 + ["rollback"]
    assert [line["resumed_from"] for line in read_lines(run.incarnations_file)] == ["", "step-000002"]
    assert [line["step"] for line in steps_of(run)] == list(range(1, 7))
    assert all(math.isfinite(line["critic/loss"]) for line in steps_of(run))


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no critic": ({"critic": None}, ["`algo.advantage.kind` is gae", "no section `critic`"]),
    "nothing needs it": ({"algo": {"advantage": {"kind": "grpo"}}}, ["section `critic`", "`algo.advantage.kind` is grpo"]),
    "no step left": ({"critic": {"warmup_steps": 4}}, ["`critic.warmup_steps` is 4", "`max_steps`"]),
    "a lambda above 1": (
        {"algo": {"advantage": {"kind": "gae", "lam": 1.5}}},
        ["`algo.advantage.lam`: got 1.5", "or equal to 1"],
    ),
    "a clip of nothing": ({"critic": {"value_clip": 0}}, ["`critic.value_clip`: got 0", "greater than 0"]),
    "narrow and deterministic": ({"deterministic": True, "model": {"dtype": "bfloat16"}}, ["`deterministic` needs `model.dtype: float32`"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_its_keys(tmp_path: Path, name: str) -> None:
    changes, said = REFUSED[name]
    tree = tiny_tree(tmp_path, **{**PPO, "algo": {"advantage": {"kind": "gae"}}})
    if "algo" in changes:
        del tree["algo"]
    with pytest.raises(ConfigError) as refusal:
        check_config(merge(tree, changes))
    for part in said:
        assert part in str(refusal.value)


def test_a_critic_with_other_tokens_is_refused(whole: RunFolder, tmp_path: Path) -> None:
    changes = {"critic": {"path": str(whole.critic_model)}, "model": {"scratch": {"characters": "0123456789=+"}}}
    with pytest.raises(ModelError, match=r"`critic\.path`: .* has 14 tokens and `model` has 15"):
        prepare(check_config(tiny_tree(tmp_path, **{**PPO, **changes})))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        prepare(check_config(tiny_tree(tmp_path, **{**PPO, "critic": {"path": str(tmp_path / "empty")}})))


def test_the_plan_has_a_critic_on_the_trainers_devices_only_where_something_needs_it(tmp_path: Path) -> None:
    plan, _ = plan_for(check_config(tiny_tree(tmp_path, **{**PPO, "devices": "auto"})), "1x4x80GiB")
    assert plan.relation("critic", "actor_train") == "colocated"
    assert len(plan.workers("critic")) == 4
    assert plan.memory["critic"].weights < plan.memory["actor_train"].weights, "it has no output matrix"
    plan, _ = plan_for(check_config(tiny_tree(tmp_path, devices="auto")), "1x4x80GiB")
    assert not plan.workers("critic")


@pytest.mark.real_ray
def test_through_ray_it_goes_on_to_the_same_end(whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, local_cluster():
        patch.setattr(rl, "take_step", failing_at(1))
        with pytest.raises(CutOffError):
            run_tiny(tmp_path, **PPO)
    run = resume(tmp_path / "run")
    assert learnt(run) == learnt(whole)
    assert model_files(run) == model_files(whole)
