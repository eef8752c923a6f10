"""The preference pipeline: digits in order are preferred to the same digits out of order."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_tree
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

import drumroll
from drumroll.backends.classifier import Classifier
from drumroll.cli import app
from drumroll.config.load import check_config, resolved_yaml
from drumroll.errors import DataError, DivergedError
from drumroll.models.folder import check_classifier_folder
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.job import prepare
from drumroll.pipelines.start import resume, start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("workers_in_this_process")]


class CutOffError(Exception):
    """Ends a run from inside."""


def make_pairs(count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        digits = rng.sample("0123456789", 4)
        ordered, other = "".join(sorted(digits)), "".join(rng.sample(digits, 4))
        rows.append({"prompt": "".join(digits) + "=", "chosen": ordered, "rejected": other if other != ordered else ordered[::-1]})
    return rows


def write(path: Path, rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tree(folder: Path, kind: str, changes: dict[str, Any] | None = None, **section: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {
        "pipeline": "preference",
        "name": kind,
        "seed": 11,
        "run_dir": str(folder / "run"),
        "model": tiny_tree(folder)["model"],
        "preference": {
            "kind": kind,
            "data": {"path": write(folder / "pairs.jsonl", make_pairs(200, 1))},
            "heldout": {"path": write(folder / "unseen.jsonl", make_pairs(50, 2))},
            "batch_size": 32,
            "steps": 60,
            "lr": 3e-3,
            **section,
        },
        "record": {"tensorboard": False},
        **(changes or {}),
    }


def weights(run: RunFolder) -> bytes:
    return (run.final_model / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Through Ray: two trainers share each update, and one reference scores it."""
    changes = {"devices": {"actor_train": "0-1", "reference": 0}, "ray": {"cpu_slots": 2}}
    return start(check_config(tree(tmp_path_factory.mktemp("dpo"), "dpo", changes, eval_every=25)))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Through Ray, with one trainer."""
    changes = {"devices": {"actor_train": 0}}
    return start(check_config(tree(tmp_path_factory.mktemp("scorer"), "reward_model", changes, eval_every=25)))


@pytest.mark.real_ray
@pytest.mark.parametrize("trained", ["policy", "scorer"])
def test_heldout_pairs_are_told_apart(trained: str, request: pytest.FixtureRequest) -> None:
    run: RunFolder = request.getfixturevalue(trained)
    summary = read_summary(run)
    assert summary["before"]["heldout_accuracy"] == 0.5  # a policy is its reference, and a fresh score is 0
    assert summary["before"]["heldout_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert summary["after"]["heldout_accuracy"] > 0.9
    assert summary["after"]["heldout_loss"] < 0.35
    assert summary["steps"] == 60
    evaluations = read_lines(run.eval_file)
    assert [(line["stage"], line["step"]) for line in evaluations] == [("before", 0), ("during", 25), ("during", 50), ("after", 60)]
    last = evaluations[-1]
    assert last["heldout_margin"] == pytest.approx(last["heldout_chosen_score"] - last["heldout_rejected_score"], abs=1e-5)


@pytest.mark.real_ray
@pytest.mark.parametrize("trained", ["policy", "scorer"])
def test_every_update_is_in_the_metrics(trained: str, request: pytest.FixtureRequest) -> None:
    run: RunFolder = request.getfixturevalue(trained)
    lines = read_lines(run.metrics_file)
    assert [line["step"] for line in lines] == list(range(60))
    assert all(line["preference/grad_norm"] > 0 for line in lines)
    assert lines[0]["preference/accuracy"] == pytest.approx(0.5)
    assert sum(line["preference/accuracy"] for line in lines[-5:]) / 5 > 0.9
    assert run.curve_file.stat().st_size > 5_000
    assert check_config(run.config()).name == run.config()["preference"]["kind"]


@pytest.mark.real_ray
def test_the_final_policy_is_the_one_that_was_judged(policy: RunFolder) -> None:
    """By plain transformers."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (policy.final_model, policy.initial_model)]
    tokenizer = AutoTokenizer.from_pretrained(policy.final_model)

    def logp(model: Any, prompt: str, reply: str) -> float:
        shown = tokenizer(prompt).input_ids
        said = [*tokenizer(reply, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([shown + said])).logits[0].log_softmax(-1)
        return float(sum(logp[len(shown) - 1 + place, token] for place, token in enumerate(said)))

    rows, last = make_pairs(50, 2), read_lines(policy.eval_file)[-1]
    trained, initial = ([[logp(model, row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows] for model in models)
    assert sum(row[0] for row in trained) / 50 == pytest.approx(last["heldout_chosen_logp"], abs=1e-3)
    gaps = [0.1 * (own[0] - own[1] - before[0] + before[1]) for own, before in zip(trained, initial, strict=True)]
    assert sum(gaps) / 50 == pytest.approx(last["heldout_margin"], abs=1e-3)
    assert sum(math.log1p(math.exp(-gap)) for gap in gaps) / 50 == pytest.approx(last["heldout_loss"], abs=1e-3)


@pytest.mark.real_ray
def test_the_final_scorer_is_the_one_that_was_judged(scorer: RunFolder) -> None:
    """By the reader of the reward `reward_model`."""
    rows, last = make_pairs(50, 2), read_lines(scorer.eval_file)[-1]
    classifier = Classifier(scorer.final_model, device="cpu", dtype="float32")

    async def scores(side: str) -> list[float]:
        return list(await asyncio.gather(*(classifier.score(row["prompt"] + row[side]) for row in rows)))

    chosen, rejected = (asyncio.run(scores(side)) for side in ("chosen", "rejected"))
    assert sum(chosen) / 50 == pytest.approx(last["heldout_chosen_score"], abs=1e-4)
    assert sum(better > worse for better, worse in zip(chosen, rejected, strict=True)) / 50 == pytest.approx(last["heldout_accuracy"])


@pytest.mark.real_ray
def test_a_reward_model_can_judge_and_begin_a_critic(scorer: RunFolder, tmp_path: Path) -> None:
    folder = str(scorer.final_model)
    rl = tiny_tree(tmp_path, warmup=None, critic={"path": folder}, algo={"advantage": "gae"})
    rl["rewards"] = [{"kind": "reward_model", "model": {"path": folder}}]
    assert {"critic", "reward"} <= set(prepare(check_config(rl)).roles)


@pytest.mark.parametrize("kind", ["ipo", "kto", "simpo"])
def test_the_other_losses_learn_too(tmp_path: Path, kind: str) -> None:
    summary = read_summary(start(check_config(tree(tmp_path, kind))))
    assert summary["before"]["heldout_accuracy"] < 0.6
    assert summary["after"]["heldout_accuracy"] > 0.9
    assert summary["after"]["heldout_loss"] < summary["before"]["heldout_loss"]


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_a_run_that_was_cut_off_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def config(name: str) -> Any:
        made = tree(tmp_path / name, kind, {"checkpoint": {"every": 1}, "deterministic": True}, steps=20, eval_every=5)
        return check_config({**made, "model": {**made["model"], "dtype": "float32"}})

    whole = start(config("whole"))
    prefer = Fleet.prefer

    def fail_late(fleet: Fleet, first: int, count: int) -> Any:
        if first >= 12:
            raise CutOffError
        return prefer(fleet, first, count)

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "prefer", fail_late)
        with pytest.raises(CutOffError):
            start(config("cut"))
    cut = resume(tmp_path / "cut" / "run")
    assert read_lines(cut.incarnations_file)[-1]["resumed_from"].startswith("preference-0000")
    assert weights(cut) == weights(whole)

    def figures(run: RunFolder) -> list[dict[str, Any]]:
        lines = [*read_lines(run.metrics_file), *read_lines(run.eval_file)]
        return [{name: value for name, value in line.items() if name != "time"} for line in lines]

    assert figures(cut) == figures(whole)
    cut.export(tmp_path / "exported", step=20)
    kind_of_model = AutoModelForSequenceClassification if kind == "reward_model" else AutoModelForCausalLM
    exported, final = (kind_of_model.from_pretrained(folder).state_dict() for folder in (tmp_path / "exported", cut.final_model))
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)
    if kind == "reward_model":
        check_classifier_folder(tmp_path / "exported")


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"on preferences were not finite.*`preference.lr`"):
        start(check_config(tree(tmp_path, "simpo", {"trainer": {"max_grad_norm": 1e9}}, lr=1e9, heldout=None)))


def test_from_python(tmp_path: Path) -> None:
    made = drumroll.preference(
        model=tiny_tree(tmp_path)["model"],
        data=make_pairs(20, 3),
        heldout=make_pairs(4, 4),
        kind="simpo",
        options={"steps": 2, "batch_size": 8, "gamma": 0.5},
        run_dir=tmp_path / "run",
        record={"tensorboard": False},
    )
    assert len(made.metrics) == 2
    assert made.summary["after"].keys() == {"heldout_accuracy", "heldout_loss", "heldout_margin"}
    assert (made.folder / "inputs" / "heldout.jsonl").exists()
    assert AutoModelForCausalLM.from_pretrained(made.model).num_parameters() > 0


def test_check_counts_rows_and_roles(tmp_path: Path) -> None:
    shown: dict[str, str] = {}
    for kind in ("dpo", "kto", "reward_model"):
        path = tmp_path / f"{kind}.yaml"
        path.write_text(resolved_yaml(check_config(tree(tmp_path, kind))))
        result = CliRunner().invoke(app, ["check", str(path)])
        assert result.exit_code == 0, result.output
        shown[kind] = result.output
    assert "dpo: 200 pairs, 50 held-out ones, 60 updates, roles actor_train, reference" in shown["dpo"]
    assert "kto: 400 judged replies, 100 held-out ones" in shown["kto"]
    assert shown["reward_model"].strip().endswith("roles actor_train")


def test_bad_rows_are_refused_before_anything_starts(tmp_path: Path) -> None:
    made = tree(tmp_path, "dpo")
    made["preference"]["data"] = {"path": write(tmp_path / "bad.jsonl", [{"prompt": "1=", "chosen": "1", "rejected": 2}])}
    with pytest.raises(DataError, match=r"bad\.jsonl', line 1: column 'rejected' holds 2"):
        start(check_config(made))
    made = tree(tmp_path, "kto")
    made["preference"]["data"] = {"path": write(tmp_path / "one.jsonl", [{"prompt": "1=", "completion": "1", "label": True}])}
    with pytest.raises(DataError, match="holds a single reply"):
        start(check_config(made))
    assert not (tmp_path / "run").exists()
