"""An entropy bonus in every registered training backend: its gradient is that of plain torch, and nothing computes it unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_backends import EPS, LR, make_batch, plain_model
from torch import Tensor

from drumroll.algo.algorithm import build_algorithm
from drumroll.backends.train.base import TrainBackend
from drumroll.config.models import AlgoConfig
from drumroll.types import Batch, TokenLoss


def scored(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """[T] log-probability and entropy with gradient, every trajectory by itself; top-k and temperature applied by hand."""
    logps, entropies = [], []
    for number, (start, end) in enumerate(zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)):
        ids = batch.token_ids[start:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / (float(batch.temperature[number]) or 1.0)
        if batch.top_k[number] and batch.temperature[number]:
            inside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(int(batch.top_k[number])).indices, True)
            logits = logits.masked_fill(~inside.scatter(-1, ids[1:, None], True), -torch.inf)
        logp = logits.log_softmax(-1)
        logps += [torch.zeros(1), logp.gather(-1, ids[1:, None]).squeeze(-1)]
        entropies += [torch.zeros(1), -torch.where(logp.isinf(), 0.0, logp.exp() * logp.masked_fill(logp.isinf(), 0.0)).sum(-1)]
    return torch.cat(logps) * batch.loss_mask, torch.cat(entropies) * batch.loss_mask


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 25}])
def test_an_update_with_an_entropy_bonus_is_that_of_plain_torch(
    top_k: int, options: dict[str, Any], models: dict[str, Path], make: Callable[..., TrainBackend]
) -> None:
    loss = build_algorithm(AlgoConfig.model_validate({"entropy_coef": 0.5})).loss
    batch = make_batch()
    batch = batch.with_fields(top_k=torch.full_like(batch.top_k, top_k))
    backend = make(models["llama"], max_grad_norm=1e6, **options)
    (metrics,) = backend.train([batch], loss)
    model = plain_model(models["llama"])
    logp, entropy = scored(model, batch)
    total = (loss(logp, batch.with_fields(old_logp=logp.detach(), entropy=entropy)).loss * batch.weight).sum()
    total.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0, foreach=False)
    optimizer.step()
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(float(entropy.detach()[batch.loss_mask].mean()), rel=1e-4)
    plain = dict(model.named_parameters())
    for name, tensor in backend.weights():
        torch.testing.assert_close(tensor, plain[name].detach(), rtol=0, atol=2e-5)


def test_a_loss_that_does_not_ask_gets_no_entropy(models: dict[str, Path], make: Callable[..., TrainBackend]) -> None:
    seen: list[Batch] = []

    def loss(logp: Tensor, batch: Batch) -> TokenLoss:
        seen.append(batch)
        return TokenLoss(-logp)

    (metrics,) = make(models["llama"]).train([make_batch()], loss)
    assert [batch.entropy for batch in seen] == [None]
    assert metrics["entropy"] > 0, "it is reported all the same"
