"""A tiny student learns from a tiny trained teacher, on its own samples and on demonstrations; such runs resume bit for bit and replay; and
what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_cluster import local_cluster
from test_resume import CutOffError, failing_at
from tiny import run_tiny, tiny_tree, write_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from drumroll.config.load import check_config
from drumroll.config.models import ModelConfig
from drumroll.errors import ModelError
from drumroll.models.prepare import prepare_model
from drumroll.pipelines import rl
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.job import plan_for, prepare
from drumroll.pipelines.replay import replay
from drumroll.pipelines.start import resume, start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary
from drumroll.record.store import Filter, Reader
from drumroll.types import Batch, RankInfo, Sampling, Task, TopLogp, Trajectory
from drumroll.workers.assembler import Assembler

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("workers_in_this_process")]

VOCABULARY = 14
"""Three special tokens, ten digits and `=`."""

TEACHER_SEED, STUDENT_SEED = 5, 11


def demonstrations(folder: Path, count: int, seed: int) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return {"path": write_rows(folder / f"demonstrations-{seed}.jsonl", count, seed, demonstrations=True)}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that sorts somewhat."""
    folder = tmp_path_factory.mktemp("teacher")
    tree = {
        "pipeline": "sft",
        "seed": TEACHER_SEED,
        "run_dir": str(folder / "run"),
        "model": tiny_tree(folder)["model"],
        "sft": {"data": demonstrations(folder, 400, 7), "steps": 150, "batch_size": 32, "lr": 1e-2},
        "record": {"tensorboard": False},
    }
    with local_cluster():
        return str(start(check_config(tree)).final_model)


def heldout_kl(student: Path, teacher: str) -> dict[str, float]:
    """Mean KL per token between both on replies that nobody trained on, over the whole vocabulary, by plain transformers."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (student, teacher)]
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    found: dict[str, list[Tensor]] = {"reverse": [], "forward": []}
    for row in read_lines(student.parents[2] / "unseen" / "demonstrations-21.jsonl"):
        shown = tokenizer(row["prompt"]).input_ids
        said = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            p, q = (model(input_ids=torch.tensor([shown + said])).logits[0, len(shown) - 1 : -1].log_softmax(-1) for model in models)
        found["reverse"].append((p.exp() * (p - q)).sum(-1))
        found["forward"].append((q.exp() * (q - p)).sum(-1))
    return {name: float(torch.cat(parts).mean()) for name, parts in found.items()}


def weights(run: RunFolder) -> bytes:
    return (run.final_model / "model.safetensors").read_bytes()


# On the student's own samples.

ON_POLICY: dict[str, Any] = {
    "max_steps": 4,
    "seed": STUDENT_SEED,
    "rewards": [],
    "warmup": None,
    "rollout": {"groups_per_step": 48, "group_size": 1},
    "trainer": {"lr": 3e-3},
    "checkpoint": {"every": 1, "keep_last": 4},
    "record": {"tensorboard": False},
    "data": {"heldout": None},
}
KINDS: dict[str, dict[str, Any]] = {
    "advantage": {"advantage": "distill", "advantage_scaling": {"normalise": "batch"}, "updates_per_step": 4},
    "loss": {"loss": {"kind": "gkd", "divergence": "jsd", "beta": 0.7}},
}


def learn(folder: Path, teacher: str, algo: dict[str, Any], **changes: Any) -> RunFolder:
    demonstrations(folder / "unseen", 20, 21)
    return run_tiny(folder, **{**ON_POLICY, "teacher": {"path": teacher, "top_k": 6}, "algo": algo, **changes})


def steps_of(run: RunFolder) -> list[dict[str, Any]]:
    """What each step says, without what depends on the clock."""
    return [
        {name: value for name, value in line.items() if name.startswith(("update/", "batch/")) or name == "weights"}
        for line in read_lines(run.metrics_file)
        if "weights" in line
    ]


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, teacher: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunFolder]:
    """A run to the end. Nobody writes into it."""
    with local_cluster():
        return request.param, learn(tmp_path_factory.mktemp(request.param), teacher, KINDS[request.param])


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_the_student_comes_nearer(kind: str, teacher: str, tmp_path: Path) -> None:
    """Without any reward."""
    run = learn(tmp_path, teacher, KINDS[kind], max_steps=60, checkpoint={"every": 0})
    before, after = (heldout_kl(folder, teacher) for folder in (run.initial_model, run.final_model))
    assert after["reverse"] < 0.5 * before["reverse"], (before, after)
    steps = steps_of(run)
    sampled = [line["batch/teacher_kl"] for line in steps]
    assert sum(sampled[-5:]) < 0.5 * sum(sampled[:5])
    assert all(line["batch/informative_token_ratio"] == 1.0 for line in steps)
    passes = 2 if kind == "advantage" else 1
    assert all(line["batch/num_scored_tokens"] == passes * line["batch/num_tokens"] for line in steps)
    if kind == "loss":
        distances = [line["update/teacher_divergence"] for line in steps]
        assert sum(distances[-5:]) < 0.5 * sum(distances[:5])
        assert all(0.4 < line["update/teacher_top_mass"] <= 1.0 + 1e-6 for line in steps)


def test_what_the_teacher_said_is_what_transformers_says(whole: tuple[str, RunFolder], teacher: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher)
    run = whole[1]
    found = []
    with Reader(run.store) as reader:
        for row in reader.query(Filter(phase="train", state="consumed")):
            sample = reader.load(row.sample_id)
            assert row.step == 1 or sample.reward == 0.0
            if row.step != 1:
                continue
            ids = torch.tensor(sample.token_ids.astype(np.int64))
            with torch.no_grad():
                logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
            found.append((torch.from_numpy(sample.logp)[1:] - logp)[torch.from_numpy(sample.loss_mask)[1:]])
    assert float(torch.cat(found).mean()) == pytest.approx(steps_of(run)[0]["batch/teacher_kl"], rel=1e-3)


def test_a_run_that_was_cut_off_ends_as_if_nothing_had_happened(
    whole: tuple[str, RunFolder], teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, run = whole
    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", failing_at(2))
        with pytest.raises(CutOffError):
            learn(tmp_path, teacher, KINDS[kind])
    again = resume(tmp_path / "run")
    assert steps_of(again) == steps_of(run)
    assert weights(again) == weights(run)


@pytest.mark.parametrize("whole", ["loss"], indirect=True)
def test_steps_replay(whole: tuple[str, RunFolder]) -> None:
    results = replay(whole[1].root, 4)
    assert [(each.step, each.same_weights, each.differences()) for each in results] == [(4, True, {})]
    assert "batch/teacher_kl" in results[0].again


@pytest.mark.real_ray
def test_through_ray_it_goes_on_to_the_same_end(teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_cluster():
        run = learn(tmp_path / "whole", teacher, KINDS["loss"])
        with monkeypatch.context() as patch:
            patch.setattr(rl, "take_step", failing_at(1))
            with pytest.raises(CutOffError):
                learn(tmp_path / "cut", teacher, KINDS["loss"])
    again = resume(tmp_path / "cut" / "run")
    assert steps_of(again) == steps_of(run)
    assert weights(again) == weights(run)


def test_rewards_a_reference_a_critic_and_a_teacher_in_one_run(teacher: str, tmp_path: Path) -> None:
    """After a warm-up on demonstrations, with the teacher's distribution as the target."""
    demonstrations(tmp_path / "unseen", 20, 21)
    run = run_tiny(
        tmp_path,
        max_steps=2,
        algo={"advantage": "gae", "kl": {"coef": 0.01}, "distill": {"coef": 0.5, "discount": 0.9}},
        critic={"lr": 1e-3},
        teacher={"path": teacher},
        warmup={"compare": True, "steps": 10, "distill": {"weight": 0.8, "temperature": 2.0}},
        data={},
        devices={"teacher": 1},
        ray={"cpu_slots": 2},
        record={"tensorboard": False},
    )
    lines = read_lines(run.metrics_file)
    imitated = [line for line in lines if "sft/loss" in line]
    assert all({"sft/cross_entropy", "sft/teacher_divergence", "sft/teacher_top_mass"} <= line.keys() for line in imitated)
    assert len(imitated) > 10, "the comparison is by the same loss"
    for line in steps_of(run):
        assert line["batch/num_scored_tokens"] == 3 * line["batch/num_tokens"]
        assert {"batch/teacher_kl", "batch/kl_mean", "update/loss"} <= line.keys()


# On demonstrations.


def imitation(folder: Path, teacher: str, steps: int = 60, **distill: Any) -> Any:
    return check_config(
        {
            "pipeline": "sft",
            "seed": STUDENT_SEED,
            "run_dir": str(folder / "run"),
            "model": tiny_tree(folder)["model"],
            "teacher": {"path": teacher},
            "sft": {"data": demonstrations(folder, 200, 9), "steps": steps, "batch_size": 16, "lr": 1e-2, "distill": distill},
            "heldout": demonstrations(folder / "unseen", 20, 21),
            "checkpoint": {"every": 1},
            "record": {"tensorboard": False},
        }
    )


def test_on_demonstrations_the_student_comes_nearer(teacher: str, tmp_path: Path) -> None:
    """The reported distance is that of plain transformers over the whole vocabulary, which the teacher names all of."""
    run = start(imitation(tmp_path, teacher, weight=0.9))
    summary = read_summary(run)
    before, after = (heldout_kl(folder, teacher)["forward"] for folder in (run.initial_model, run.final_model))
    assert summary["before"]["heldout_teacher_divergence"] == pytest.approx(before, rel=1e-3)
    assert summary["after"]["heldout_teacher_divergence"] == pytest.approx(after, rel=1e-3)
    assert after < 0.5 * before
    assert summary["after"]["heldout_loss"] < summary["before"]["heldout_loss"]
    lines = read_lines(run.metrics_file)
    for line in lines:
        mixed = 0.1 * line["sft/cross_entropy"] + 0.9 * line["sft/teacher_divergence"]
        assert line["sft/loss"] == pytest.approx(mixed, rel=1e-4)


def test_on_demonstrations_a_run_that_was_cut_off_ends_with_the_same_weights(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"steps": 12, "weight": 0.5, "temperature": 2.0, "divergence": "jsd", "beta": 0.2}
    whole = start(imitation(tmp_path / "whole", teacher, **options))
    imitate = Fleet.imitate

    def fail_late(fleet: Fleet, first: int, count: int) -> Any:
        if first >= 6:
            raise CutOffError
        return imitate(fleet, first, count)

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "imitate", fail_late)
        with pytest.raises(CutOffError):
            start(imitation(tmp_path / "cut", teacher, **options))
    cut = resume(tmp_path / "cut" / "run")
    assert read_lines(cut.incarnations_file)[-1]["resumed_from"].startswith("sft-0000")
    assert weights(cut) == weights(whole)


# What the assembler makes of a teacher's words.


def sample(number: int, **changes: Any) -> Trajectory:
    size = 3 + number % 3
    values: dict[str, Any] = {
        "sample_id": f"s{number}",
        "group_id": f"g{number // 4}",
        "task": Task("t"),
        "turns": (),
        "token_ids": np.arange(size, dtype=np.int32) + 10 * number,
        "loss_mask": np.arange(size) >= 2,
        "logp": np.full(size, -0.25 * number, np.float32),
        "token_version": np.zeros(size, np.int32),
        "sampling": Sampling(),
        "seed": number,
        "reward": float(number % 2),
        "stop_reason": "stop",
    }
    return Trajectory(**{**values, **changes})


def say(batch: Batch, k: int) -> TopLogp:
    """A teacher whose every word says which token it is about."""
    logp = -batch.token_ids.float() / 10
    ids = batch.token_ids[:, None] + torch.arange(k)
    return TopLogp(logp, ids.int(), -ids / 10.0)


def assembled(block: list[Trajectory], num_ranks: int, num_teachers: int, **algo: Any) -> tuple[dict[str, float], list[Batch]]:
    worker = Assembler(RankInfo("assembler", 0, 1, "cpu"), num_shards=num_ranks, seed=3, algo=algo)
    worker.pack([(each.sample_id, each.attempt) for each in block], 0, 0, block)
    report, *shards = worker.finish(1, None, None, taught=[say(part, 3) for part in worker.shards(num_teachers)])
    return report, [shard for (shard,) in shards]


def by_sample(shards: Sequence[Batch], name: str) -> dict[str, list[Any]]:
    return {
        sample_id: getattr(shard, name)[start:end].tolist()
        for shard in shards
        for sample_id, start, end in zip(shard.sample_ids, shard.offsets.tolist(), shard.offsets.tolist()[1:], strict=False)
    }


@pytest.mark.parametrize("num_teachers", [1, 2, 3])
def test_every_token_has_its_own_words_whoever_said_them(num_teachers: int) -> None:
    _, shards = assembled([sample(number) for number in range(8)], 2, num_teachers, loss="gkd")
    for shard in shards:
        said = say(shard, 3)
        assert shard.teacher_logp is not None
        assert shard.teacher_top_ids is not None
        assert shard.teacher_top_logp is not None
        assert torch.equal(shard.teacher_logp, said.logp)
        assert torch.equal(shard.teacher_top_ids, said.ids)
        assert torch.equal(shard.teacher_top_logp, said.top_logp)


def test_the_opinion_is_added_to_an_advantage_by_its_weight() -> None:
    block = [sample(number) for number in range(8)]
    _, alone = assembled(block, 2, 1, advantage="dr_grpo")
    report, both = assembled(block, 2, 1, advantage="dr_grpo", distill={"coef": 0.5})
    _, opinion = assembled(block, 2, 1, advantage="distill")
    plain, added, total = (by_sample(shards, "advantages") for shards in (alone, opinion, both))
    for name, values in total.items():
        assert values == pytest.approx([a + 0.5 * b for a, b in zip(plain[name], added[name], strict=True)])
    spoken = [value for values in added.values() for value in values if value]
    assert report["batch/teacher_kl"] == pytest.approx(-sum(spoken) / len(spoken))


def test_a_branch_of_an_episode_has_the_opinion_of_its_own_tokens() -> None:
    branch = sample(5, sample_id="s2/1", group_id="g0", reward=0.0)
    block = [sample(1), sample(2, branches=(branch,))]
    _, shards = assembled(block, 1, 1, advantage="distill")
    own = by_sample(shards, "advantages")["s2/1"]
    assert own == pytest.approx([0.0, 0.0, *(-(50 + place) / 10 + 1.25 for place in range(2, 5))])
    alone = replace(branch, branches=())
    assert by_sample(assembled([alone], 1, 1, advantage="distill")[1], "advantages")["s2/1"] == own


# What is refused, and the plan.


@pytest.mark.parametrize("pipeline", ["rl", "sft"])
@pytest.mark.parametrize(
    ("characters", "said"),
    [
        ("0123456789=+", r"`teacher\.path`: .* has 15 tokens and `model` has 14"),
        ("0123456798=", r"`teacher\.path`: .* not the same ones: number 11 is '9' there and '8' in `model`"),
    ],
)
def test_a_teacher_with_other_tokens_is_refused(pipeline: str, characters: str, said: str, tmp_path: Path) -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    other = ModelConfig.model_validate({"scratch": {"characters": characters, "config": size}})
    folder = str(prepare_model(other, tmp_path / "other", 0))
    changes = {**ON_POLICY, "teacher": {"path": folder}, "algo": KINDS["loss"]}
    cfg = check_config(tiny_tree(tmp_path, **changes)) if pipeline == "rl" else imitation(tmp_path, folder)
    with pytest.raises(ModelError, match=said):
        prepare(cfg)
    student = check_config(tiny_tree(tmp_path, **{**changes, "model": {"path": folder, "scratch": None}}))
    assert "teacher" in prepare(student).roles, "the same folder is a teacher with the student's tokens"


def test_a_teacher_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        prepare(imitation(tmp_path, str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        prepare(imitation(tmp_path, str(tmp_path / "empty")))


def test_the_plan_has_a_teacher_on_the_trainers_devices_and_counts_its_own_weights(teacher: str, tmp_path: Path) -> None:
    big = {"hidden_size": 64, "num_hidden_layers": 4}
    changes = {"teacher": {"path": teacher}, "algo": KINDS["loss"], "devices": "auto", "model": {"scratch": {"config": big}}}
    plan, _ = plan_for(check_config(tiny_tree(tmp_path, **{**ON_POLICY, **changes})), "1x4x80GiB")
    assert plan.relation("teacher", "actor_train") == "colocated"
    assert len(plan.workers("teacher")) == 4
    assert plan.memory["teacher"].gradients == plan.memory["teacher"].optimizer == 0
    assert 0 < plan.memory["teacher"].weights < plan.memory["actor_train"].weights / 4
    plan, _ = plan_for(imitation(tmp_path, teacher), "1x2xcpu")
    assert (plan.roles, plan.stages) == (("actor_train", "teacher"), ("score", "update"))
    assert "roles actor_train, teacher" in prepare(imitation(tmp_path, teacher)).describe()
