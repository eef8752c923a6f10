"""Log-probabilities and entropies straight from hidden states: logits exist for a few rows at a time, forwards and backwards.

    logp_r = x_r[target] - lse(x_r)          d logp_r / d x_rj = [j = target] - p_rj
    H_r    = lse(x_r) - Σ p_rj x_rj          d H_r / d x_rj    = -p_rj (log p_rj + H_r)        x_r = hidden_r · weightᵀ / temperature_r

The backward pass computes the logits once more, so that no more than `LOGITS_PER_CHUNK` of them are ever held, whatever the length of the
batch. Where the vocabulary is divided over ranks, each computes the logits of its own part, and three numbers of each row travel:

    lse = log Σ_i exp(lse_i)          Σ p_j x_j = Σ_i exp(lse_i - lse) · (Σ p_j x_j of part i)

Legend: R rows, N numbers of a hidden state, V vocabulary, or a rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drumroll.backends.products import product
from drumroll.backends.train.grid import ALONE, Axis

LOGITS_PER_CHUNK = 2**28
"""Logits that are held at the same time, in float32: one GiB, and half as much for their gradient on a GPU; torch's own functions take two
or three times as much beside them."""

WORTH_IT = 2**24
"""Logits from which on computing them twice is cheaper than holding them."""


class Rows(NamedTuple):
    """What the gradient of a chunk's logits depends on, [r] each."""

    targets: Tensor
    """-1 where the target is not among the columns."""
    temperature: Tensor
    lse: Tensor
    """The logarithm of the sum of exponentials."""
    entropy: Tensor
    of_logp: Tensor
    of_entropy: Tensor | None
    """Where entropies learn."""


Look = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""([r, V] logits, which it may spend, targets, temperature) → log-probability of the target, entropy, lse, [r] each. A target of -1 may
get any."""
Slope = Callable[[Tensor, Rows, torch.dtype], Tensor]
"""([r, V] logits, which it may spend, what they are asked, dtype) → their gradient, in that dtype."""


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose rows of the head this rank has."""

    axis: Axis
    start: int
    size: int

    def own(self, token_ids: Tensor) -> Tensor:
        """Their numbers in this part; -1 for those of other parts."""
        own = token_ids - self.start
        return own.masked_fill((own < 0) | (own >= self.size), -1)

    def joined(self, logp: Tensor, entropy: Tensor, lse: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each rank has looked up in its part, as of the whole vocabulary."""
        chosen = (logp + lse).masked_fill(own < 0, 0.0)
        chosen, expected, parts = self.axis.whole(torch.stack((chosen, lse - entropy, lse))[None], 0).unbind(1)
        lse = parts.logsumexp(0)
        return chosen.sum(0) - lse, lse - ((parts - lse).exp() * expected).sum(0), lse


class FusedHead(torch.autograd.Function):
    """`logp, entropy = FusedHead.apply(hidden, weight, targets, temperature, entropy_learns, part)`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        entropy_learns: bool,
        part: VocabularyPart | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[R, N], [V, N], [R], [R] → [R], [R], in float32."""
        read, _ = _functions(hidden.device)
        if part is not None:
            targets = part.own(targets)
        logp, entropy, lse = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(hidden, weight):
            logp[rows], entropy[rows], lse[rows] = read(_logits(hidden[rows], weight), targets[rows], temperature[rows])
        if part is not None:
            logp, entropy, lse = part.joined(logp, entropy, lse, targets)
        ctx.save_for_backward(hidden, weight, targets, temperature, lse, entropy)
        ctx.entropy_learns = entropy_learns
        if not entropy_learns:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, of_logp: Tensor, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, lse, entropy = ctx.saved_tensors
        _, differentiate = _functions(hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rise = of_entropy if ctx.entropy_learns else None
        for rows in _chunks(hidden, weight):
            asked = Rows(targets[rows], temperature[rows], lse[rows], entropy[rows], of_logp[rows], None if rise is None else rise[rows])
            of_logits = differentiate(_logits(hidden[rows], weight), asked, hidden.dtype)
            of_hidden[rows] = product(of_logits, weight.T)
            if of_weight is not None:
                of_weight += product(of_logits.T, hidden[rows].T)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, LOGITS_PER_CHUNK // len(weight))
    size -= size % 128 if size > 128 else 0  # whole tiles of a GPU's matrix products
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[r, V] in float32, at temperature 1."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return product(hidden, weight).float()


def _functions(device: torch.device) -> tuple[Look, Slope]:
    """What reads a chunk's logits: one kernel each on a GPU."""
    if device.type == "cuda":
        from drumroll.backends.train import head_kernels

        return head_kernels.look, head_kernels.slope
    return look, slope


def look(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A `Look` in torch's own functions."""
    logits = logits.div_(temperature[:, None])
    lse = logits.logsumexp(-1)
    logp = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0] - lse
    probability = (logits - lse[:, None]).exp()
    expected = (probability * logits.masked_fill(probability == 0, 0.0)).sum(-1)  # impossible tokens add nothing
    return logp, lse - expected, lse


def slope(logits: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """A `Slope` in torch's own functions."""
    logp = logits.div_(rows.temperature[:, None]).sub_(rows.lse[:, None])
    result = logp.exp()
    rise = rows.of_logp[:, None]
    if rows.of_entropy is not None:
        rise = rise + rows.of_entropy[:, None] * (logp.masked_fill(result == 0, 0.0) + rows.entropy[:, None])
    result *= -rise
    result.scatter_add_(-1, rows.targets.clamp(min=0)[:, None], rows.of_logp.masked_fill(rows.targets < 0, 0.0)[:, None])
    return result.div_(rows.temperature[:, None]).to(dtype)


PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_neox"})
"""Types of models whose logits are the product of hidden states and one matrix, and nothing else."""


class HeadQuestion:
    """Makes a model's output layer answer with log-probabilities and entropies while it is asked for some.

    with question.of(targets, temperature, entropy_learns):
        logp, entropy = model(..., logits_to_keep=places).logits[0].T
    """

    def __init__(self, model: Any, part: VocabularyPart | None = None) -> None:
        """`part` of the vocabulary is this rank's, where it is divided."""
        axis = part.axis if part is not None else ALONE
        self._asked: tuple[Tensor, Tensor, bool] | None = None
        head = model.get_output_embeddings()
        assert can_be_asked(model), "the model's head is more than one matrix"
        plain = head.forward

        def forward(hidden: Tensor) -> Tensor:
            if self._asked is None:
                logits: Tensor = plain(hidden)
                return logits
            rows = axis.entered(hidden.flatten(0, -2))
            logp, entropy = FusedHead.apply(rows, head.weight, *self._asked, part)  # type: ignore[no-untyped-call]
            return torch.stack((logp, entropy), dim=-1)[None]

        head.forward = forward

    @staticmethod
    def pays(num_rows: int, vocab_size: int) -> bool:
        """Whether there are so many logits that computing them twice is cheaper than holding them."""
        return num_rows * vocab_size > WORTH_IT

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
