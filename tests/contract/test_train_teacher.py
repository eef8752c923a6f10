"""What every registered training backend does for distillation: it says what a teacher finds likeliest, and learns from it, as plain torch
does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_backends import EPS, LR, VOCABULARY, make_batch, plain_model
from torch import Tensor

from drumroll.algo.algorithm import ComposedLoss
from drumroll.algo.distill import build_imitation, gkd
from drumroll.backends.train import fsdp2
from drumroll.backends.train.base import TrainBackend
from drumroll.config.models import SoftTargetsConfig
from drumroll.text.packing import select
from drumroll.types import Batch, TokenLoss

Make = Callable[..., TrainBackend]


def all_logp(model: Any, batch: Batch, temperature: Tensor) -> Tensor:
    """[T, V] with gradient, every trajectory by itself; `temperature` is [N], and 0 counts as 1."""
    parts = []
    for number, (start, end) in enumerate(pairwise(batch.offsets.tolist())):
        logits = model(input_ids=batch.token_ids[None, start:end], use_cache=False).logits[0, :-1]
        parts += [torch.zeros(1, VOCABULARY), (logits / (float(temperature[number]) or 1.0)).log_softmax(-1)]
    return torch.cat(parts) * batch.loss_mask[:, None]


def truncated(batch: Batch) -> Batch:
    """As if it had been sampled from a part of the vocabulary, which is no business of a teacher."""
    return batch.with_fields(top_k=torch.full_like(batch.top_k, 3), top_p=torch.full_like(batch.top_p, 0.5))


def taught(batch: Batch, k: int = 5) -> Batch:
    """With a teacher that names tokens at random."""
    generator = torch.Generator().manual_seed(3)
    top = torch.randn(batch.num_tokens, VOCABULARY, generator=generator).log_softmax(-1).topk(k)
    return batch.with_fields(teacher_top_ids=top.indices.int(), teacher_top_logp=top.values)


@pytest.mark.parametrize("temperature", [None, 2.0])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_the_likeliest_tokens_are_those_of_plain_transformers(
    name: str, temperature: float | None, models: dict[str, Path], make: Make
) -> None:
    batch = truncated(make_batch())
    at = batch.temperature if temperature is None else torch.full_like(batch.temperature, temperature)
    batch = batch.with_fields(teacher_temperature=None if temperature is None else at)
    expected = all_logp(plain_model(models[name]), batch, at).detach()
    for budget in (16384, 25):
        said = make(models[name], micro_batch_tokens=budget).top_logprobs(batch, 4)
        assert (said.ids.dtype, said.ids.shape, said.top_logp.shape) == (torch.int32, (batch.num_tokens, 4), (batch.num_tokens, 4))
        inside = batch.loss_mask
        torch.testing.assert_close(said.logp, expected.gather(-1, batch.token_ids[:, None]).squeeze(-1), rtol=0, atol=1e-5)
        torch.testing.assert_close(said.top_logp[inside], expected[inside].topk(4).values, rtol=0, atol=1e-5)
        torch.testing.assert_close(said.top_logp[inside], expected[inside].gather(-1, said.ids[inside].long()), rtol=0, atol=1e-5)
        for value in (said.logp, said.ids, said.top_logp):
            assert not value[~inside].any()


def test_how_many_tokens_are_named(models: dict[str, Path], make: Make) -> None:
    batch, backend = make_batch(size=3), make(models["llama"])
    everything = backend.top_logprobs(batch, VOCABULARY + 9)
    assert everything.ids.shape == (batch.num_tokens, VOCABULARY)
    torch.testing.assert_close(everything.top_logp[batch.loss_mask].exp().sum(-1), torch.ones(int(batch.loss_mask.sum())))
    assert everything.ids[batch.loss_mask].sort().values.eq(torch.arange(VOCABULARY)).all()
    nothing = backend.top_logprobs(batch, 0)
    assert nothing.ids.shape == nothing.top_logp.shape == (batch.num_tokens, 0)
    torch.testing.assert_close(nothing.logp, backend.logprobs(batch), rtol=0, atol=1e-6)
    empty = backend.top_logprobs(select(batch, []), 4)
    assert (empty.logp.shape, empty.ids.shape) == ((0,), (0, 4))


def test_a_teacher_that_is_the_student_agrees_with_itself(models: dict[str, Path], make: Make) -> None:
    batch = truncated(make_batch())
    backend = make(models["llama"], micro_batch_tokens=25)
    said = backend.top_logprobs(batch, 6)
    given = backend.given_logprobs(batch.with_fields(teacher_top_ids=said.ids))
    torch.testing.assert_close(given, said.top_logp, rtol=0, atol=1e-5)
    alone = [select(batch, [number]) for number in range(batch.num_trajectories)]
    torch.testing.assert_close(torch.cat([backend.top_logprobs(one, 6).top_logp for one in alone]), said.top_logp, rtol=0, atol=1e-5)


def expected_update(model: Any, batch: Batch, loss: Any) -> float:
    """One update of a plain model; returns the loss."""
    assert batch.teacher_top_ids is not None
    plain = all_logp(model, batch, torch.ones_like(batch.temperature) if batch.teacher_temperature is not None else batch.temperature)
    at = batch.temperature if batch.teacher_temperature is None else batch.teacher_temperature
    logp = plain.gather(-1, batch.token_ids[:, None]).squeeze(-1)
    top_logp = all_logp(model, batch, at).gather(-1, batch.teacher_top_ids.long())
    total = (loss(logp, batch.with_fields(top_logp=top_logp)).loss * batch.weight).sum()
    total.backward()
    torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0, foreach=False).step()
    return float(total.detach())


@pytest.mark.parametrize("chunk", [None, 7 * VOCABULARY])
@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 25}])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd", "soft targets"])
def test_an_update_towards_a_teacher_is_that_of_plain_torch(
    kind: Any, options: dict[str, Any], chunk: int | None, models: dict[str, Path], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk is not None:
        monkeypatch.setattr(fsdp2, "_LOGITS_PER_CHUNK", chunk)
    batch = taught(make_batch())
    if kind == "soft targets":
        ones = torch.ones_like(batch.temperature)
        batch = batch.with_fields(temperature=ones, teacher_temperature=3.0 * ones)
        loss = build_imitation(SoftTargetsConfig(weight=0.6, temperature=3.0))
    else:
        loss = ComposedLoss(partial(gkd, divergence=kind), frozenset({"top_logp"}))
    backend = make(models["llama"], max_grad_norm=1e6, **options)
    (metrics,) = backend.train([batch], loss)
    model = plain_model(models["llama"])
    assert metrics["loss"] == pytest.approx(expected_update(model, batch, loss), rel=1e-4)
    assert 0 < metrics["teacher_top_mass"] < 1
    assert "top_logp" not in metrics
    plain = dict(model.named_parameters())
    for name, tensor in backend.weights():
        torch.testing.assert_close(tensor, plain[name].detach(), rtol=0, atol=2e-5)


def test_a_loss_that_does_not_ask_is_told_nothing(models: dict[str, Path], make: Make) -> None:
    seen: list[Batch] = []

    def loss(logp: Tensor, batch: Batch) -> TokenLoss:
        seen.append(batch)
        return TokenLoss(-logp)

    make(models["llama"]).train([taught(make_batch())], loss)
    assert [batch.top_logp for batch in seen] == [None]
