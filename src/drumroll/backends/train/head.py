"""Log-probabilities and entropies straight from hidden states: logits exist for a few rows at a time, forwards and backwards.

    logp_r = x_r[target] - lse(x_r)          d logp_r / d x_rj = [j = target] - p_rj
    H_r    = lse(x_r) - Σ p_rj x_rj          d H_r / d x_rj    = -p_rj (log p_rj + H_r)        x_r = hidden_r · weightᵀ / temperature_r

The backward pass computes the logits once more, so that no more than `LOGITS_PER_CHUNK` of them are ever held, whatever the length of the
batch. Legend: R rows, N numbers of a hidden state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LOGITS_PER_CHUNK = 2**27
"""Logits that are held at the same time, in float32: half a GiB, and as much for what is computed from them."""


class FusedHead(torch.autograd.Function):
    """`logp, entropy = FusedHead.apply(hidden, weight, targets, temperature, entropy_learns)`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, entropy_learns: bool
    ) -> tuple[Tensor, Tensor]:
        """[R, N], [V, N], [R], [R] → [R], [R], in float32."""
        logp, entropy, lse = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight, temperature[rows])
            lse[rows] = logits.logsumexp(-1)
            logp[rows] = logits.gather(-1, targets[rows, None])[:, 0] - lse[rows]
            entropy[rows] = lse[rows] - _expected(logits, lse[rows])
        ctx.save_for_backward(hidden, weight, targets, temperature, lse, entropy)
        ctx.entropy_learns = entropy_learns
        if not entropy_learns:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, of_logp: Tensor, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, lse, entropy = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight, temperature[rows])
            logp = logits.sub_(lse[rows, None])
            slope = logp.exp()
            if ctx.entropy_learns and of_entropy is not None:
                rise = of_entropy[rows, None] * (logp.masked_fill(slope == 0, 0.0) + entropy[rows, None])
                slope *= -(of_logp[rows, None] + rise)
            else:
                slope *= -of_logp[rows, None]
            slope.scatter_add_(-1, targets[rows, None], of_logp[rows, None])
            slope = slope.div_(temperature[rows, None]).to(hidden.dtype)
            of_hidden[rows] = slope @ weight
            of_weight += slope.T @ hidden[rows]
        return of_hidden, of_weight.to(weight.dtype), None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, LOGITS_PER_CHUNK // len(weight))
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """[r, V] in float32, at their rows' temperatures."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = (hidden @ weight.T).float()
    return logits.div_(temperature[:, None])


def _expected(logits: Tensor, lse: Tensor) -> Tensor:
    """[r] mean of the logits under their own distribution; impossible tokens add nothing."""
    probability = (logits - lse[:, None]).exp()
    return (probability * logits.masked_fill(probability == 0, 0.0)).sum(-1)


PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_neox"})
"""Types of models whose logits are the product of hidden states and one matrix, and nothing else."""


class HeadQuestion:
    """Makes a model's output layer answer with log-probabilities and entropies while it is asked for some.

    with question.of(targets, temperature, entropy_learns):
        logp, entropy = model(..., logits_to_keep=places).logits[0].T
    """

    def __init__(self, model: Any) -> None:
        self._asked: tuple[Tensor, Tensor, bool] | None = None
        head = model.get_output_embeddings()
        assert can_be_asked(model), "the model's head is more than one matrix"
        plain = head.forward

        def forward(hidden: Tensor) -> Tensor:
            if self._asked is None:
                logits: Tensor = plain(hidden)
                return logits
            logp, entropy = FusedHead.apply(hidden.flatten(0, -2), head.weight, *self._asked)  # type: ignore[no-untyped-call]
            return torch.stack((logp, entropy), dim=-1)[None]

        head.forward = forward

    @staticmethod
    def pays(num_rows: int, vocab_size: int) -> bool:
        """Whether there are so many logits that computing them twice is cheaper than holding them."""
        return num_rows * vocab_size > LOGITS_PER_CHUNK // 8

    @contextmanager
    def of(self, targets: Tensor, temperature: Tensor, entropy_learns: bool) -> Iterator[None]:
        """`targets` [R] and `temperature` [R], where 0 counts as 1."""
        self._asked = (targets, torch.where(temperature == 0, 1.0, temperature), entropy_learns)
        try:
            yield
        finally:
            self._asked = None


def can_be_asked(model: Any) -> bool:
    """Whether the model's logits are what `FusedHead` takes them for."""
    head = model.get_output_embeddings()
    return model.config.model_type in PLAIN_HEADS and isinstance(head, nn.Linear) and head.bias is None
