"""recipes/rlhf.py in small: from pairs to a reward model to PPO with it as reward and critic, and from the same pairs by DPO."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import local_cluster
from test_resume import CutOffError, failing_at
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import drumroll
from drumroll.config.load import read_yaml
from drumroll.pipelines import rl
from drumroll.record.files import read_lines
from drumroll.types import Trajectory

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("workers_in_this_process")]

RECIPE = runpy.run_path("recipes/rlhf.py")
QUALITY = runpy.run_path("recipes/rlhf/quality.py")

PAIRS = ["preference.heldout.limit=400", "preference.eval_every=0"]
SMALL: dict[str, list[str]] = {
    "sft": [
        "model.scratch.config.hidden_size=32",
        "model.scratch.config.intermediate_size=64",
        "model.scratch.config.tie_word_embeddings=false",  # transformers ties weights in one thread at a time
        "sft.steps=100",
        "sft.batch_size=32",
    ],
    "reward_model": ["preference.steps=120", *PAIRS],
    "ppo": [
        "max_steps=4",
        "rollout.groups_per_step=24",
        "critic.warmup_steps=1",
        "trainer.warmup_updates=0",
        "eval={num_tasks: 8}",
        "checkpoint.every=1",
    ],
    "dpo": ["preference.steps=80", *PAIRS],
}


def small(method: str) -> list[str]:
    common = ["record.tensorboard=false", "devices={actor_train: 0}"]
    return [f"{stage}.{change}" for stage in RECIPE["STAGES"][method] for change in [*SMALL[stage], *common]]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(run / "metrics.jsonl") if "weights" in line]


def lives(run: Path) -> int:
    return len(read_lines(run / "incarnations.jsonl"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both recipes. PPO is cut off in its third step, and the same command goes on with it. Nobody writes into it."""
    folder = tmp_path_factory.mktemp("rlhf")
    with local_cluster(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(2))
        with pytest.raises(CutOffError):
            RECIPE["main"](["ppo", "--out", str(folder), *small("ppo")])
        patch.undo()
        patch.setitem(RECIPE["report"].__globals__, "SAMPLES_PER_PROMPT", 1)
        RECIPE["main"](["ppo", "--out", str(folder)])
        RECIPE["main"](["dpo", "--out", str(folder), *[change for change in small("dpo") if change.startswith("dpo.")]])
    return folder


def test_a_second_call_goes_on_where_the_first_was_cut_off(out: Path) -> None:
    assert [lives(out / stage) for stage in ("sft", "reward_model", "ppo", "dpo")] == [1, 1, 2, 1]
    assert read_lines(out / "ppo/incarnations.jsonl")[1]["resumed_from"] == "step-000002"
    assert [line["step"] for line in steps_of(out / "ppo")] == [1, 2, 3, 4]


def test_what_changes_a_finished_stage_is_refused(out: Path) -> None:
    with pytest.raises(SystemExit, match=r"sft' is finished, so that seed=2 comes too late"):
        RECIPE["main"](["dpo", "--out", str(out), "sft.seed=2"])


def test_a_change_of_no_stage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        RECIPE["main"](["dpo", "--out", str(tmp_path), "ppo.seed=2"])
    assert "'ppo.seed=2' changes no stage of dpo" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_reward_is_the_score_of_the_reward_model_and_quality_is_no_part_of_it(out: Path) -> None:
    samples = drumroll.Run(out / "ppo").trajectories(phase="train", limit=32)
    folder = out / "reward_model/model/final"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    for sample in samples:
        assert sample.reward == pytest.approx(score(tokenizer, model, sample), abs=1e-4)
        assert sample.reward_parts["gold"] == QUALITY["quality"](sample.task.prompt, sample.last_reply)
    assert len({sample.reward_parts["gold"] for sample in samples}) > 1


@torch.no_grad()
def score(tokenizer: Any, model: Any, sample: Trajectory) -> float:
    ids = tokenizer(f"{sample.task.prompt}{sample.last_reply}", return_tensors="pt")["input_ids"]
    return float(model(input_ids=ids).logits)


def test_the_critic_begins_as_the_reward_model(out: Path) -> None:
    assert read_yaml(out / "ppo/config.yaml")["critic"]["path"] == f"{out}/reward_model/model/final"
    assert steps_of(out / "ppo")[0]["critic/value_mean"] != 0.0, "a fresh head would expect 0"


def test_every_step_reports_reward_quality_and_kl(out: Path) -> None:
    steps = steps_of(out / "ppo")
    assert all({"reward/reward_model_mean", "reward/gold_mean", "batch/kl_mean"} <= line.keys() for line in steps)
    assert steps[0]["batch/kl_mean"] == pytest.approx(0.0, abs=1e-5), "the policy is its reference"
    assert steps[1]["batch/kl_mean"] == pytest.approx(0.0, abs=1e-5), "only the critic has learnt"
    assert all(abs(line["batch/kl_mean"]) > 1e-5 for line in steps[2:])


def test_reward_model_and_dpo_tell_held_out_pairs_apart(out: Path) -> None:
    paths = {read_yaml(out / stage / "config.yaml")["preference"]["data"]["path"] for stage in ("reward_model", "dpo")}
    assert len(paths) == 1
    for stage in ("reward_model", "dpo"):
        summary = drumroll.Run(out / stage).summary
        assert summary["before"]["heldout_accuracy"] == 0.5
        assert summary["after"]["heldout_accuracy"] > 0.6


def test_the_report_has_quality_score_and_kl_of_every_policy(out: Path) -> None:
    report = json.loads((out / "report.json").read_text())
    assert report.keys() == {"heldout_accuracy", "sft", "ppo", "dpo"}
    assert report["sft"]["kl"] == 0.0
    assert report["ppo"]["kl"] > 0.0
    assert report["dpo"]["kl"] > report["ppo"]["kl"], "four small steps go less far than all these updates"
    assert report["dpo"]["gold"] > report["sft"]["gold"]
    assert report["dpo"]["score"] > report["sft"]["score"]


def test_no_held_out_prompt_is_trained_on() -> None:
    folder = Path("recipes/rlhf")
    held = {row["prompt"] for name in ("heldout", "heldout_pairs") for row in read_lines(folder / f"{name}.jsonl")}
    known = {row["prompt"] for name in ("train", "demonstrations", "pairs") for row in read_lines(folder / f"{name}.jsonl")}
    assert held
    assert not held & known
