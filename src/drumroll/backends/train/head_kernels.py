"""What `head` asks of a chunk of logits, as one GPU kernel each, in Triton: every logit is read once.

Legend: r rows, V vocabulary. A program has a row, and goes through it in blocks.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumroll.backends.train.head import Rows

BLOCK = 4096
"""Logits that a program holds."""


def look(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A `head.Look`."""
    num_rows, vocab_size = logits.shape
    logp, entropy, lse = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    _look[(num_rows,)](logits, targets, temperature, logp, entropy, lse, vocab_size, BLOCK=BLOCK, num_warps=8)
    return logp, entropy, lse


@triton.jit
def _look(logits, targets, temperature, logp, entropy, lse, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * vocab_size
    warmth = tl.load(temperature + row)
    highest = -float("inf")
    mass = 0.0
    moment = 0.0
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(begin + column, mask=column < vocab_size, other=-float("inf")) / warmth
        # A row that begins with a block of impossible tokens has no highest yet to compare with.
        higher = tl.maximum(highest, tl.max(value, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp(value - base)
        shrink = tl.exp(highest - base)
        mass = mass * shrink + tl.sum(weight, axis=0)
        moment = moment * shrink + tl.sum(tl.where(weight == 0.0, 0.0, weight * value), axis=0)
        highest = higher
    total = highest + tl.log(mass)
    tl.store(lse + row, total)
    tl.store(entropy + row, total - moment / mass)
    tl.store(logp + row, tl.load(begin + tl.maximum(tl.load(targets + row), 0)) / warmth - total)


def slope(logits: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """A `head.Slope`."""
    num_rows, vocab_size = logits.shape
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    of_logp = rows.of_logp.contiguous()
    of_entropy = of_logp if rows.of_entropy is None else rows.of_entropy.contiguous()
    _slope[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits, rows.targets, rows.temperature, rows.lse, of_logp, of_entropy, rows.entropy, out, vocab_size,
        ENTROPY_LEARNS=rows.of_entropy is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _slope(
    logits, targets, temperature, lse, of_logp, of_entropy, entropy, out, vocab_size, ENTROPY_LEARNS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    warmth = tl.load(temperature + row)
    gradient = tl.load(of_logp + row)
    value = tl.load(logits + row * vocab_size + column, mask=inside, other=-float("inf")) / warmth - tl.load(lse + row)
    probability = tl.exp(value)
    rise = gradient
    if ENTROPY_LEARNS:
        surprise = tl.where(probability == 0.0, 0.0, value) + tl.load(entropy + row)
        rise = gradient + tl.load(of_entropy + row) * surprise
    result = tl.where(column == tl.load(targets + row), gradient, 0.0) - probability * rise
    tl.store(out + row * vocab_size + column, (result / warmth).to(out.dtype.element_ty), mask=inside)
