"""What every registered training backend must do, on tiny models, against plain transformers and torch.

Run as a script, this file is one of two ranks (see `test_two_ranks_are_one`).
"""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumroll.algo.critic import value_loss
from drumroll.algo.kl import with_kl
from drumroll.algo.loss import cross_entropy, ppo_clip
from drumroll.backends.classifier import Classifier
from drumroll.backends.train.base import Head, Loss, Reads, TrainBackend
from drumroll.config.models import ParallelConfig, TrainerConfig
from drumroll.errors import ModelError, RunFolderError
from drumroll.registry import REGISTRY
from drumroll.text.packing import pack_demonstrations, select
from drumroll.types import Batch, RankInfo, Schedule, TokenLoss

VOCABULARY = 40
LR = 3e-3
EPS = 1e-4
"""Large enough that Adam does not blow up the rounding of gradients that are 0 in exact arithmetic."""


def make_models(root: Path) -> dict[str, Path]:
    """Random models with a tokenizer: llama (grouped queries), qwen2 (tied embeddings, biases), gpt2 (learned positions, dropout); and
    of each one with a scalar head, as `<name>_scalar`."""
    from tokenizers import Tokenizer, models
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GPT2Config,
        LlamaConfig,
        PreTrainedTokenizerFast,
        Qwen2Config,
    )

    size: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    body: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = {
        "llama": LlamaConfig(**size, **body, num_key_value_heads=2, max_position_embeddings=128),
        "qwen2": Qwen2Config(**size, **body, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True),
        "gpt2": GPT2Config(**size, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({chr(48 + i): i for i in range(VOCABULARY)}, unk_token="0"))
    )
    for name, config in configs.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # wide enough that a wrong neighbour or position shows
            torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        scalar = AutoModelForSequenceClassification.from_pretrained(root / name, num_labels=1)
        torch.nn.init.normal_(scalar.score.weight, std=0.3)
        scalar.save_pretrained(root / f"{name}_scalar")
        tokenizer.save_pretrained(root / f"{name}_scalar")
    return {name: root / name for stem in configs for name in (stem, f"{stem}_scalar")}


def make_batch(seed: int = 0, size: int = 9) -> Batch:
    """Uneven lengths, mixed temperatures, an observation inside some trajectories, weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    batch = pack_demonstrations([(draw(1 + n % 4), draw(2 + 5 * (n % 3) + (60 if n == 4 else 0))) for n in range(size)])
    mask = batch.loss_mask & (batch.position_ids % 7 != 6)
    weight = torch.rand(batch.num_tokens, generator=generator) * mask
    return batch.with_fields(
        loss_mask=mask,
        weight=weight / weight.sum(),
        advantages=torch.randn(batch.num_tokens, generator=generator) * mask,
        ref_logp=-torch.rand(batch.num_tokens, generator=generator) * 4 * mask,
        values=torch.randn(batch.num_tokens, generator=generator) * mask,
        returns=torch.randn(batch.num_tokens, generator=generator) * mask,
        temperature=torch.tensor([1.0, 0.7, 1.5, 0.0] * size)[:size],
    )


def make_backend(
    kind: str,
    folder: Path,
    rank: RankInfo | None = None,
    dtype: str = "float32",
    total_updates: int = 10,
    head: Head = "lm",
    reads: Reads = "before",
    parallel: ParallelConfig | None = None,
    **options: Any,
) -> TrainBackend:
    entry = REGISTRY.lookup("train_backend", kind)
    config = entry.schema(TrainerConfig).model_validate({"kind": kind, "lr": LR, "eps": EPS, **options})
    backend: TrainBackend = entry.target(config, folder, dtype, 0, head=head, reads=reads, parallel=parallel)
    backend.setup(rank or RankInfo("actor_train", 0, 1, "cpu"))
    backend.begin(config.resolve_schedule(total_updates))
    return backend


HEADS: tuple[Head, ...] = ("lm", "scalar")
LOSSES: dict[Head, Loss] = {"lm": ppo_clip, "scalar": partial(value_loss, clip=0.2)}


def named(name: str, head: Head) -> str:
    """The model of that name with that head."""
    return name if head == "lm" else f"{name}_scalar"


def outputs(backend: TrainBackend, batch: Batch) -> Tensor:
    """What the backend says of a batch's tokens."""
    return backend.logprobs(batch) if backend.head == "lm" else backend.values(batch)


def weights_of(backend: TrainBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def reference_logp(model: Any, batch: Batch) -> Tensor:
    """[T] with gradient: every trajectory by itself through the model's own attention, temperature applied by hand."""
    parts = []
    for n, (start, end) in enumerate(zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)):
        ids = batch.token_ids[start:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / (float(batch.temperature[n]) or 1.0)
        parts += [torch.zeros(1), logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)]
    return torch.cat(parts) * batch.loss_mask


def reference_values(model: Any, batch: Batch) -> Tensor:
    """[T] with gradient: the score at the token before, every trajectory by itself."""
    parts = []
    for start, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        hidden = model.base_model(input_ids=batch.token_ids[None, start:end], use_cache=False).last_hidden_state
        parts += [torch.zeros(1), model.score(hidden)[0, :-1, 0]]
    return torch.cat(parts) * batch.loss_mask


def plain_model(folder: Path, head: Head = "lm") -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


Make = Callable[..., TrainBackend]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_logprobs_are_those_of_plain_transformers(name: str, models: dict[str, Path], make: Make) -> None:
    batch = make_batch()
    expected = reference_logp(plain_model(models[name]), batch).detach()
    for budget in (16384, 25):
        got = make(models[name], micro_batch_tokens=budget).logprobs(batch)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert not got[~batch.loss_mask].any()


@pytest.mark.parametrize("reads", ["before", "through"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_values_are_the_scores_of_what_was_read(name: str, reads: Reads, models: dict[str, Path], make: Make) -> None:
    """A classifier of plain transformers scores a text at its last token: each prefix is such a text."""
    batch = make_batch(size=4)
    model = plain_model(models[f"{name}_scalar"], "scalar")
    expected = torch.zeros(batch.num_tokens)
    with torch.no_grad():
        for token in batch.loss_mask.nonzero().squeeze(1).tolist():
            start = token - int(batch.position_ids[token])
            expected[token] = model(input_ids=batch.token_ids[None, start : token + (reads == "through")]).logits.item()
    for budget in (16384, 25):
        got = make(models[f"{name}_scalar"], micro_batch_tokens=budget, head="scalar", reads=reads).values(batch)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert not got[~batch.loss_mask].any()


@pytest.mark.parametrize("head", HEADS)
def test_outputs_for_one_trajectory_do_not_depend_on_its_neighbours(head: Head, models: dict[str, Path], make: Make) -> None:
    batch = make_batch()
    backend = make(models[named("llama", head)], head=head)
    alone = torch.cat([outputs(backend, select(batch, [n])) for n in range(batch.num_trajectories)])
    torch.testing.assert_close(outputs(backend, batch), alone, rtol=0, atol=1e-5)
    assert outputs(backend, select(batch, [])).shape == (0,)


def test_logprobs_are_of_the_truncated_distribution(models: dict[str, Path], make: Make) -> None:
    batch = make_batch().with_fields(temperature=torch.full((9,), 0.7), top_k=torch.full((9,), 3))
    model = plain_model(models["llama"])
    expected = []
    for start, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        logits = model(input_ids=batch.token_ids[None, start:end]).logits[0, :-1].detach() / 0.7
        expected.append(0.0)
        for row, target in zip(logits, batch.token_ids[start + 1 : end].tolist(), strict=True):
            inside = {*row.topk(3).indices.tolist(), target}  # a sampled token is never outside its own distribution
            expected.append(float(row[target] - row[list(inside)].logsumexp(0)))
    got = make(models["llama"]).logprobs(batch)
    torch.testing.assert_close(got, torch.tensor(expected) * batch.loss_mask, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 25}, {"gradient_checkpointing": True, "micro_batch_tokens": 60}])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_updates_are_those_of_plain_torch(name: str, head: Head, options: dict[str, Any], models: dict[str, Path], make: Make) -> None:
    """Three updates with clipping, weight decay, warm-up and decay, whatever the size of the passes."""
    updates = [make_batch(seed) for seed in range(3)]
    loss: Loss = with_kl(ppo_clip, 0.2) if head == "lm" else LOSSES["scalar"]
    settings: dict[str, Any] = {"weight_decay": 0.1, "max_grad_norm": 0.5, "schedule": "linear", "warmup_updates": 1, "min_lr_ratio": 0.5}
    backend = make(models[named(name, head)], total_updates=3, head=head, **settings, **options)
    metrics = backend.train(updates, loss)

    model = plain_model(models[named(name, head)], head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1, foreach=False)
    for number, (batch, lr) in enumerate(zip(updates, (LR, LR, LR / 2), strict=True)):
        output = reference_logp(model, batch) if head == "lm" else reference_values(model, batch)
        total = (loss(output, batch.with_fields(old_logp=output.detach())).loss * batch.weight).sum()
        total.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert norm > 0.5, "nothing was clipped"
        assert metrics[number]["loss"] == pytest.approx(total.item(), rel=1e-4)
        assert metrics[number]["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert metrics[number]["lr"] == pytest.approx(lr)
        assert metrics[number]["num_tokens"] == batch.num_tokens
        assert metrics[number]["num_loss_tokens"] == int(batch.loss_mask.sum())
        assert metrics[number]["skipped"] == metrics[number]["nonfinite"] == 0.0
        if head == "lm":
            assert metrics[number]["ratio"] == pytest.approx(1.0)
            assert metrics[number]["kl"] > 0
            assert metrics[number]["entropy"] > 0
        else:
            assert 0.0 < metrics[number]["clip_fraction"] < 1.0
    expected = dict(model.named_parameters(remove_duplicate=False))
    for tensor_name, tensor in backend.weights():
        # Adam divides by the gradient's own size, so that rounding shows most where the gradient is nearly 0.
        torch.testing.assert_close(tensor, expected[tensor_name].detach(), rtol=0, atol=LR * 0.02, msg=lambda m, n=tensor_name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_head_that_holds_few_logits_at_a_time_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], make: Make
) -> None:
    monkeypatch.setattr("drumroll.backends.train.head.LOGITS_PER_CHUNK", 3 * VOCABULARY)
    test_logprobs_are_those_of_plain_transformers(name, models, make)
    test_updates_are_those_of_plain_torch(name, "lm", {"micro_batch_tokens": 60}, models, make)
    test_entropy_is_that_of_the_sampled_distribution(models, make)


def test_entropy_is_that_of_the_sampled_distribution(models: dict[str, Path], make: Make) -> None:
    batch = make_batch().with_fields(temperature=torch.ones(9))
    metrics = make(models["llama"]).train([batch], cross_entropy)[0]
    entropies = []
    with torch.no_grad():
        for start, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
            logp = plain_model(models["llama"])(input_ids=batch.token_ids[None, start:end]).logits[0].log_softmax(-1)
            entropies += [torch.zeros(1), -(logp.exp() * logp).sum(-1)[:-1]]
    assert metrics["entropy"] == pytest.approx(float(torch.cat(entropies)[batch.loss_mask].mean()), rel=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_masked_tokens_change_nothing(head: Head, models: dict[str, Path], make: Make) -> None:
    """A reply's loss does not see what stands in fields outside the mask, and tokens after the last masked one have no say."""
    batch = make_batch()
    tail = pack_demonstrations([([3, 4], [5, 6, 7])])
    tail = tail.with_fields(
        loss_mask=torch.tensor([False, False, True, False, False]),
        weight=torch.tensor([0.0, 0, 1, 0, 0]),
        **{field: torch.ones(5) for field in ("advantages", "values", "returns")},
    )
    other = tail.with_fields(
        token_ids=torch.tensor([3, 4, 5, 20, 21]),
        weight=torch.tensor([9.0, 9, 1, 9, 9]),
        old_logp=None,
        **{field: torch.tensor([9.0, torch.nan, 1, torch.inf, 9]) for field in ("advantages", "values", "returns")},
    )
    results = []
    for part in (tail, other):
        backend = make(models[named("llama", head)], head=head)
        backend.train([batch, part], LOSSES[head])
        results.append(weights_of(backend))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


def broken(logp: Tensor, batch: Batch) -> TokenLoss:
    return TokenLoss(logp * torch.tensor([torch.nan]))


def steep(logp: Tensor, batch: Batch) -> TokenLoss:
    """A loss of 0 whose gradient is infinite."""
    return TokenLoss((logp - logp.detach()).abs().sqrt())


def endless(logp: Tensor, batch: Batch) -> TokenLoss:
    """An infinite loss whose gradient is finite."""
    return TokenLoss(logp + torch.inf)


FAULTY = (broken, steep, endless)


@pytest.mark.parametrize("head", HEADS)
def test_an_update_without_weight_or_with_a_broken_loss_is_no_update(head: Head, models: dict[str, Path], make: Make) -> None:
    batch, honest = make_batch(), LOSSES[head]
    backend, twin = (make(models[named("llama", head)], micro_batch_tokens=60, schedule="linear", head=head) for _ in range(2))
    backend.train([batch], honest)
    twin.train([batch], honest)

    def raising(output: Tensor, batch: Batch) -> TokenLoss:
        if batch.num_tokens < 60:
            raise ZeroDivisionError
        return honest(output, batch)

    for loss in FAULTY:
        metrics = backend.train([batch], loss)[0]
        assert (metrics["skipped"], metrics["nonfinite"]) == (1.0, 1.0)
    with pytest.raises(ZeroDivisionError):  # in the second pass, after the gradient of the first
        backend.train([batch], raising)
    for nothing in (
        batch.with_fields(weight=torch.zeros(batch.num_tokens)),
        batch.with_fields(weight=(~batch.loss_mask).float()),
        batch.with_fields(loss_mask=torch.zeros(batch.num_tokens, dtype=torch.bool)),
        select(batch, []),
    ):
        metrics = backend.train([nothing], honest)[0]
        assert (metrics["skipped"], metrics["nonfinite"], metrics["loss"], metrics["grad_norm"]) == (1.0, 0.0, 0.0, 0.0)
    assert backend.train([batch], honest) == twin.train([batch], honest), "skipped updates do not count"
    for (name, tensor), (_, expected) in zip(backend.weights(), twin.weights(), strict=True):
        assert torch.equal(tensor, expected), name


def test_a_new_schedule_starts_with_a_fresh_optimizer(models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    first, second = make_batch(1), make_batch(2)
    backend = make(models["qwen2"], schedule="cosine", total_updates=4)
    backend.train([first], cross_entropy)
    backend.begin(Schedule(1e-4, 2, "cosine"))
    assert [metrics["lr"] for metrics in backend.train([first, second], cross_entropy)] == pytest.approx([1e-4, 0.0])
    backend.export(tmp_path / "model")
    fresh = make(tmp_path / "model")
    for each in (fresh, backend):
        each.begin(Schedule(LR, 1))
        each.train([first], cross_entropy)
    for (name, tensor), (_, expected) in zip(backend.weights(), fresh.weights(), strict=True):
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("head", HEADS)
def test_the_same_seed_twice_is_bit_identical_also_through_host_memory(head: Head, models: dict[str, Path], make: Make) -> None:
    results = []
    for moves in (False, True):
        backend = make(models["gpt2"], micro_batch_tokens=40, head=head)
        for seed in range(2):
            if moves:
                backend.to("host")
                backend.to("device")
            backend.train([make_batch(seed)], LOSSES[head])
        results.append(weights_of(backend))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_weights_and_export_speak_the_language_of_hugging_face(name: str, models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    backend = make(models[name])
    on_disk = load_file(models[name] / "model.safetensors")
    sent = weights_of(backend)
    assert set(sent) == set(on_disk)
    assert all(torch.equal(sent[key], on_disk[key]) for key in on_disk)
    assert [key for key, _ in backend.weights()] == list(sent), "the order is fixed"

    batch = make_batch()
    backend.train([batch], cross_entropy)
    expected = backend.logprobs(batch)
    target = tmp_path / "run" / "model"
    backend.export(target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["model"], "nothing is left beside it"
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    torch.testing.assert_close(reference_logp(model, batch).detach(), expected, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(target).get_vocab() == AutoTokenizer.from_pretrained(models[name]).get_vocab()
    kept, source = AutoConfig.from_pretrained(target).to_dict(), AutoConfig.from_pretrained(models[name]).to_dict()
    assert {key for key in source if kept.get(key) != source[key]} <= {"transformers_version", "_name_or_path"}
    with pytest.raises(RunFolderError, match="not empty"):
        backend.export(target)
    backend.train([batch], cross_entropy)
    (target / "of the old model").touch()
    backend.export(target, replace=True)
    backend.export(tmp_path / "run" / "new", replace=True)
    assert sorted(path.name for path in target.parent.iterdir()) == ["model", "new"]
    replaced, new = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (target, target.parent / "new"))
    assert replaced == new


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_who_does_not_learn_scores_like_who_does(name: str, models: dict[str, Path], make: Make) -> None:
    """Though it has no masters."""
    policy = make(models[name], dtype="bfloat16")
    reference = make(models[name], rank=RankInfo("reference", 0, 1, "cpu"), dtype="bfloat16")
    assert torch.equal(reference.logprobs(make_batch()), policy.logprobs(make_batch()))
    sent, expected = weights_of(reference), weights_of(policy)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[key], expected[key]) for key in sent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_language_model_becomes_a_classifier(name: str, dtype: str, models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    """With a score of zeros; exported, it is what transformers and the reward `reward_model` read, and what training goes on from."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    batch = make_batch()
    backend = make(models[name], dtype=dtype, head="scalar", reads="through")
    assert not backend.values(batch).any()
    body = load_file(models[name] / "model.safetensors")
    sent = weights_of(backend)
    assert set(sent) == {*(key for key in body if key != "lm_head.weight"), "score.weight"}
    assert all(torch.equal(sent[key], body[key].to(sent[key].dtype)) for key in sent if key != "score.weight")

    backend.train([make_batch(seed) for seed in range(3)], LOSSES["scalar"])
    expected = backend.values(batch)
    assert expected.any()
    target = tmp_path / "model"
    backend.export(target)
    config = AutoConfig.from_pretrained(target)
    assert config.num_labels == 1
    assert config.architectures == [type(AutoModelForSequenceClassification.from_config(config)).__name__]
    again = make(target, dtype=dtype, head="scalar", reads="through")
    assert set(weights_of(again)) == set(sent)
    tolerance = 1e-5 if dtype == "float32" else 0.02
    torch.testing.assert_close(again.values(batch), expected, rtol=0, atol=tolerance)

    classifier = Classifier(target, device="cpu", dtype="float32")
    bounds = batch.offsets.tolist()
    for start, end in pairwise(bounds):
        if batch.loss_mask[end - 1]:  # the score of a text is its value at the last token
            (score,) = classifier._forward([batch.token_ids[start:end].tolist()])
            assert score == pytest.approx(float(expected[end - 1]), abs=tolerance)


def test_a_sliding_window_is_obeyed(models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = plain_model(models["qwen2"])
    window = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    model.save_pretrained(tmp_path / "windowed")
    (tmp_path / "windowed" / "config.json").write_text(json.dumps({**model.config.to_dict(), **window}))
    batch = make_batch()
    windowed = AutoModelForCausalLM.from_pretrained(tmp_path / "windowed", attn_implementation="eager").eval()
    expected = reference_logp(windowed, batch).detach()
    assert not torch.allclose(expected, reference_logp(model, batch), atol=1e-3)
    torch.testing.assert_close(make(tmp_path / "windowed").logprobs(batch), expected, rtol=0, atol=1e-5)


def test_models_that_cannot_be_trained_are_refused(models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma2Config, MambaConfig

    with pytest.raises(ModelError, match="cannot be loaded"):
        make(tmp_path / "nothing")
    size: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
    refused = {
        "state_space": (MambaConfig(**size, state_size=4), "mamba"),
        "capped": (Gemma2Config(**size, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8), "softcap"),
    }
    for name, (config, message) in refused.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        with pytest.raises(ModelError, match=message):
            make(tmp_path / name)
    for name, missing, head in (
        ("llama", "model.norm.weight", "lm"),
        ("llama", "model.norm.weight", "scalar"),
        ("llama_scalar", "score.weight", "scalar"),
    ):
        incomplete = tmp_path / f"{name} without {missing} for {head}"
        incomplete.mkdir()
        (incomplete / "config.json").write_bytes((models[name] / "config.json").read_bytes())
        tensors = load_file(models[name] / "model.safetensors")
        del tensors[missing]
        save_file(tensors, incomplete / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"lacks weights of its model: {missing}"):
            make(incomplete, head=head)


def test_a_scalar_head_is_refused_where_there_is_none(models: dict[str, Path], make: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig

    AutoModelForSequenceClassification.from_pretrained(models["llama"], num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="classifier with 3 labels; one with a single label, or a causal language model"):
        make(tmp_path / "three", head="scalar")
    encoder = BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    encoder.num_labels = 1
    AutoModelForSequenceClassification.from_config(encoder).save_pretrained(tmp_path / "encoder")
    with pytest.raises(ModelError, match="no linear layer named `score`"):
        make(tmp_path / "encoder", head="scalar")


def shards_of(update: Batch, number: int) -> list[list[int]]:
    """How two ranks share an update: evenly, unevenly, and all to one."""
    indices = list(range(update.num_trajectories))
    return [[indices[::2], indices[1::2]], [indices[:7], indices[7:]], [indices, []]][number]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"name": "llama", "micro_batch_tokens": 30},
    "accumulating": {"name": "qwen2", "micro_batch_tokens": 30, "reduce_every_pass": False, "reshard_after_forward": False},
    "checkpointing": {"name": "gpt2", "gradient_checkpointing": True},
    "scalar": {"name": "llama_scalar", "micro_batch_tokens": 30, "head": "scalar"},
}


def as_rank(rank: int, kind: str, root: Path, ports: list[str]) -> None:
    """What each of the two processes does: score, train, skip and export, and write down what it saw."""
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for (variant, options), port in zip(copy.deepcopy(VARIANTS).items(), ports, strict=True):
        place = RankInfo("actor_train", rank, 2, "cpu", rendezvous=f"127.0.0.1:{port}")
        backend = make_backend(kind, root / options.pop("name"), place, **options)
        updates = [make_batch(seed) for seed in range(3)]
        shards = [select(update, shards_of(update, number)[rank]) for number, update in enumerate(updates)]
        loss = LOSSES[backend.head]
        tensors[f"{variant}/before"] = outputs(backend, shards[1])
        seen[variant] = backend.train(shards[:2], loss)
        poison = torch.full_like(shards[0].weight, torch.nan if rank == 1 else 1.0)
        skipped = backend.train([shards[0].with_fields(advantages=poison, returns=poison)], loss)[0]
        seen[f"{variant}/skipped"] = [skipped["skipped"], skipped["nonfinite"]]
        seen[variant] += backend.train(shards[2:], loss)
        backend.to("host")
        backend.to("device")
        tensors[f"{variant}/empty"] = outputs(backend, shards[2])
        tensors |= {f"{variant}/weights/{name}": tensor.clone() for name, tensor in backend.weights()}
        backend.save(backend.snapshot(), root / "saved" / variant)
        backend.export(root / "exported" / variant)
        assert (root / "exported" / variant / "config.json").exists(), "no rank returns before the export is there"
        try:
            backend.export(root / "exported" / variant)
        except RunFolderError:
            seen[f"{variant}/refused"] = True
        backend.close()
    save_file(tensors, root / f"rank{rank}.safetensors")
    (root / f"rank{rank}.json").write_text(json.dumps(seen))


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def run_two_ranks(script: str, kind: str, root: Path, num_ports: int) -> list[Any]:
    """Run a script once for each of two ranks, on its own free ports; what each wrote to `rank<n>.json`."""
    ports = [str(port) for port in free_ports(num_ports)]
    logs = [root / f"rank{rank}.log" for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), kind, str(root), *ports], stderr=log.open("w"))
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(2)]


def of_each_update(metrics: dict[str, float]) -> dict[str, float]:
    """Without what only the first update of a call says."""
    return {name: value for name, value in metrics.items() if "/" not in name}


@pytest.mark.parametrize("kind", REGISTRY.names("train_backend"))
def test_two_ranks_are_one(kind: str, tmp_path: Path) -> None:
    models = make_models(tmp_path)
    seen = run_two_ranks(__file__, kind, tmp_path, len(VARIANTS))
    tensors = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    assert seen[0] == seen[1]
    updates = [make_batch(seed) for seed in range(3)]
    for variant, options in VARIANTS.items():
        assert seen[0][f"{variant}/skipped"] == [1.0, 1.0]
        assert seen[0][f"{variant}/refused"]
        head: Head = options.get("head", "lm")
        backend = make_backend(kind, models[options["name"]], head=head)
        for rank, indices in enumerate(shards_of(updates[1], 1)):
            expected = outputs(backend, select(updates[1], indices))
            torch.testing.assert_close(tensors[rank][f"{variant}/before"], expected, rtol=0, atol=1e-5)
        assert tensors[1][f"{variant}/empty"].shape == (0,)
        alone = backend.train(updates, LOSSES[head])
        for got, metrics in zip(seen[0][variant], alone, strict=True):
            assert of_each_update(got) == pytest.approx(of_each_update(metrics), rel=1e-3, abs=1e-6)
        for name in ("mismatch/logp_mean", "mismatch/logp_max") if head == "lm" else ():
            assert seen[0][variant][0][name] == pytest.approx(alone[0][name], rel=1e-3)
        torch.testing.assert_close(tensors[0][f"{variant}/empty"], outputs(backend, updates[2]), rtol=0, atol=1e-3)
        exported = load_file(tmp_path / "exported" / variant / "model.safetensors")
        for name, expected in backend.weights():
            whole = tensors[0][f"{variant}/weights/{name}"]
            assert torch.equal(whole, tensors[1][f"{variant}/weights/{name}"])
            assert torch.equal(whole, exported[name])
            torch.testing.assert_close(whole, expected, rtol=0, atol=LR * 0.02)
        backend.load(tmp_path / "saved" / variant)
        assert all(torch.equal(tensor, exported[name]) for name, tensor in backend.weights())
        backend.close()


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
