"""Preferences as updates, a reward model from training to scoring, and KTO's reference point."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Words
from tokenizers import models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from drumroll.backends.classifier import Classifier
from drumroll.errors import DataError
from drumroll.models.scratch import scratch_tokenizer
from drumroll.rewards.reward_model import subject_of
from drumroll.text.packing import select
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Batch, RankInfo, Sampling, Schedule, Task, Trajectory, Turn
from drumroll.workers.pairs import PairAssembler, reference_point
from drumroll.workers.preference import PreferenceTrainer

RANK = RankInfo("actor_train", 0, 1, "cpu")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}={{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant={% endif %}"
)
ROWS = [{"prompt": f"{n}=", "chosen": str(n) * (1 + n % 3), "rejected": str(9 - n)} for n in range(5)]


def write(path: Path, rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def assembler(folder: Path, model_folder: Path, rows: Any = ROWS, num_shards: int = 1, **section: Any) -> PairAssembler:
    preference = {"kind": "dpo", "data": {"path": write(folder / "rows.jsonl", rows)}, "batch_size": 4, **section}
    return PairAssembler(RANK, num_shards=num_shards, seed=3, model_folder=str(model_folder), preference=preference)


def trainer(model_folder: Path, **section: Any) -> PreferenceTrainer:
    preference = {"data": {"path": "elsewhere"}, **section}
    options = {"trainer": {"kind": "fsdp2"}, "model_folder": str(model_folder), "dtype": "float32", "seed": 0}
    worker = PreferenceTrainer(RANK, preference=preference, **options)
    worker.begin(Schedule(3e-3, 10))
    return worker


def texts(batch: Batch) -> list[list[int]]:
    return [batch.token_ids[start:end].tolist() for start, end in pairwise(batch.offsets.tolist())]


def logp_of(batch: Batch) -> Tensor:
    """Some number for each token that does not depend on the rest of the batch."""
    return -(batch.token_ids * 7 + batch.position_ids).float() / 100


def test_updates_cover_every_row_once_an_epoch_and_depend_on_their_number_alone(tmp_path: Path, model_folder: Path) -> None:
    own, other = assembler(tmp_path, model_folder), assembler(tmp_path, model_folder)
    own.begin(0, 5)
    (updates,) = own.finish(None, None, None)
    other.begin(3, 1)
    ((fourth,),) = other.finish(None, None, None)
    assert torch.equal(updates[3].token_ids, fourth.token_ids)
    seen = [tuple(text) for update in updates for text in texts(update)]
    assert all(seen.count(text) == 4 for text in seen)  # 5 updates of 4 rows: 4 epochs of 5 rows


def test_an_update_has_chosen_and_rejected_replies_as_they_are_sampled(tmp_path: Path, model_folder: Path) -> None:
    own = assembler(tmp_path, model_folder, ROWS[2:3])
    own.begin(0, 1)
    ((batch,),) = own.finish(None, None, None)
    tokenizer = Tokenizer(model_folder)
    end = list(tokenizer.eos_ids[:1])
    prompt = tokenizer.encode_prompt("2=")
    assert texts(batch) == [prompt + tokenizer.encode("222") + end, prompt + tokenizer.encode("7") + end]
    assert batch.loss_mask.tolist() == [False] * len(prompt) + [True] * 4 + [False] * len(prompt) + [True] * 2
    assert batch.rewards.tolist() == [1.0, -1.0]
    assert batch.group_index.tolist() == [0, 0]
    assert batch.units == [0, 0]
    assert batch.weight.nonzero().tolist() == [[len(prompt) + 3]]
    assert batch.baseline is None


def test_margins_are_the_chosen_replies_baselines(tmp_path: Path, model_folder: Path) -> None:
    rows = [{**row, "by": 0.5 * number} for number, row in enumerate(ROWS)]
    own = assembler(tmp_path, model_folder, rows, margin_field="by", batch_size=5)
    own.begin(0, 1)
    ((batch,),) = own.finish(None, None, None)
    assert batch.baseline is not None
    assert sorted(batch.baseline[::2].tolist()) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert not batch.baseline[1::2].any()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_ranks_have_scored_comes_back_to_its_tokens(tmp_path: Path, model_folder: Path, kind: str, ranks: int) -> None:
    own = assembler(tmp_path, model_folder, num_shards=2, kind=kind, end_token=False)
    own.begin(0, 3)
    scored = [[logp_of(batch) for batch in shard] for shard in own.shards(ranks)]
    point = None
    if kind == "kto":
        point = [[logp_of(batch) + 1 for batch in shard] for shard in own.shards(ranks, mismatched=True)]
        others = [[logp_of(batch) for batch in shard] for shard in own.shards(ranks, mismatched=True)]
    shards = own.finish(scored, point, others if kind == "kto" else None)
    assert len(shards) == 2
    for update in range(3):
        for shard in shards:
            batch = shard[update]
            assert batch.ref_logp is not None
            assert torch.equal(batch.ref_logp, logp_of(batch))
            if kind == "dpo":
                assert batch.group_index[::2].tolist() == batch.group_index[1::2].tolist()
        whole = sum(float(shard[update].weight.sum()) for shard in shards)
        assert whole == pytest.approx(1.0)
        if kind == "kto":  # every token of a mismatched reply is one nat likelier: the point is the replies' mean length
            baselines = torch.cat([shard[update].baseline for shard in shards])  # type: ignore[misc]
            lengths = [int(mask.sum()) for shard in shards for mask in shard[update].loss_mask.split(shard[update].lengths)]
            assert baselines.tolist() == pytest.approx([sum(lengths) / len(lengths)] * 4)


def test_mismatched_replies_are_those_to_other_prompts(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"prompt": f"{n}=", "completion": str(n), "label": n % 2 == 0} for n in range(4)]
    own = assembler(tmp_path, model_folder, rows, kind="kto")
    own.begin(0, 1)
    ((matched,),), ((mismatched,),) = own.shards(1), own.shards(1, mismatched=True)
    assert all(text[-4] == text[-2] for text in texts(matched))
    assert all(text[-4] != text[-2] for text in texts(mismatched))
    assert sorted(text[-2] for text in texts(mismatched)) == sorted(text[-2] for text in texts(matched))
    signs = {text[-2]: reward for text, reward in zip(texts(matched), matched.rewards.tolist(), strict=True)}
    assert sorted(signs.values()) == [-1.0, -1.0, 1.0, 1.0]


def test_the_reference_point_is_not_negative(tmp_path: Path, model_folder: Path) -> None:
    own = assembler(tmp_path, model_folder)
    own.begin(0, 1)
    ((batch,),) = own.shards(1)
    assert reference_point(batch, logp_of(batch), logp_of(batch) + 1) == 0.0
    assert reference_point(batch, logp_of(batch) + 1, logp_of(batch)) > 0.0


def test_a_reply_that_nothing_stands_before_is_refused(tmp_path: Path) -> None:
    """The tokenizer puts no token of its own before a text."""
    folder = chat_model(tmp_path / "model", pad_token_id=0)
    PreTrainedTokenizerFast(tokenizer_object=Words(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))).save_pretrained(folder)
    with pytest.raises(DataError, match="no token that could be learnt from"):
        assembler(tmp_path, folder, [{"prompt": "", "chosen": "a", "rejected": "b"}], end_token=False)


# A reward model scores after training as it did in training.


def chat_model(folder: Path, pad_token_id: int | None) -> Path:
    tokenizer = scratch_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789=<>/ .\n?+")
    tokenizer.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trajectory(row: dict[str, Any], reply: str) -> Trajectory:
    """What a rollout would make of the row's prompt and this reply; only what a reward sees matters."""
    messages = tuple(row["prompt"]) if isinstance(row["prompt"], list) else None
    shown = row["prompt"] if messages is None else ""
    nothing: Any = None
    return Trajectory(
        sample_id="s",
        group_id="g",
        task=Task("t", prompt=shown or None, messages=messages),
        turns=(Turn("environment", 0, 1, shown), Turn("policy", 1, 2, reply)),
        token_ids=nothing,
        loss_mask=nothing,
        logp=nothing,
        token_version=nothing,
        sampling=Sampling(),
        seed=0,
        reward=None,
        stop_reason="stop",
    )


@pytest.mark.parametrize("padding", ["own", "end", "none"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_model_scores_as_training_did(tmp_path: Path, chat: bool, padding: str) -> None:
    """Also where the padding token is the one that ends every message, and a reply spells out the end of its message."""
    folder = chat_model(tmp_path / "model", {"own": 0, "end": 2, "none": None}[padding])
    shown = ["2+2?", "a", "what is 3?"]
    rows = [
        {"prompt": [{"role": "user", "content": text}] if chat else text, "chosen": f"so {n}.", "rejected": "no<eos>" * (n + 1)}
        for n, text in enumerate(shown)
    ]
    own = assembler(tmp_path, folder, rows, kind="reward_model", batch_size=3)
    worker = trainer(folder, kind="reward_model")
    own.begin(0, 8)
    (updates,) = own.finish(None, None, None)
    metrics = worker.train(updates)
    assert metrics[-1]["loss"] < metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert metrics[0]["accuracy"] == pytest.approx(0.5)
    worker.export(str(tmp_path / "scorer"))
    classifier = Classifier(tmp_path / "scorer", device="cpu", dtype="float32")

    values = worker.values(updates[0])
    trained = sorted(values[updates[0].loss_mask].tolist())

    async def scores() -> list[float]:
        subjects = [subject_of(trajectory(row, row[side])) for row in rows for side in ("chosen", "rejected")]
        return list(await asyncio.gather(*(classifier.score(subject) for subject in subjects)))

    assert sorted(asyncio.run(scores())) == pytest.approx(trained, abs=1e-5)
    assert len({round(score, 4) for score in trained}) == 6


@pytest.mark.parametrize("kind", ["dpo", "simpo", "reward_model"])
def test_micro_batches_change_nothing(tmp_path: Path, model_folder: Path, kind: str) -> None:
    own = assembler(tmp_path, model_folder, kind=kind)
    own.begin(0, 2)
    scored = [[logp_of(batch) * batch.loss_mask for batch in shard] for shard in own.shards(1)]
    (updates,) = own.finish(scored if kind == "dpo" else None, None, None)
    outcomes = []
    for budget in (16384, 12):
        worker = trainer(model_folder, kind=kind)
        worker.backend.config = worker.backend.config.model_copy(update={"micro_batch_tokens": budget})
        outcomes.append((worker.train(updates), torch.cat([tensor.flatten() for _, tensor in worker.backend.weights()])))
    assert outcomes[0][0][0] == pytest.approx(outcomes[1][0][0], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], atol=1e-5, rtol=1e-3)
    judged = trainer(model_folder, kind=kind).judge(updates[:1])
    assert judged["loss"] == pytest.approx(outcomes[0][0][0]["loss"], rel=1e-5)
    assert judged["weight"] == pytest.approx(1.0)
    parts = [trainer(model_folder, kind=kind).judge([select(updates[0], list(part))]) for part in (range(2), range(2, 8), ())]
    assert sum(part["loss"] for part in parts) == pytest.approx(judged["loss"], rel=1e-5)
