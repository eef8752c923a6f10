"""The distribution that tokens are drawn from, and the draw: shared by the engine and by the trainer.

Legend: R rows, V vocabulary. The engine samples from `processed_logp` and reports it; the trainer recomputes the same
function with gradient, so both speak of one distribution.

Noise is a pure function of (sample seed, token index): whoever a sample's neighbours are, it draws the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def processed_logp(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    keep: Tensor | None = None,
    *,
    truncates: bool | None = None,
) -> Tensor:
    """[R, V] float32 log-probabilities after temperature, then top-k, then top-p, renormalised.

    `logits` [R, V]; `temperature`, `top_p`, `top_k` [R]; `top_p` 1 and `top_k` 0 are off. A row with temperature 0 is
    greedy: it gets the plain softmax at temperature 1, untruncated. `keep` [R] names one token of each row that stays
    inside whatever the truncation says, so that a token on the boundary never gets -inf from a rounding difference.
    `truncates` says whether any row uses top-k or top-p; None looks, which on a GPU waits for it. Differentiable.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature.float()).unsqueeze(-1)
    if truncates is None:
        truncates = bool(((top_k > 0) | (top_p < 1)).any())
    if truncates:
        with torch.no_grad():
            outside = _outside(scaled, torch.where(greedy, 1.0, top_p.float()), torch.where(greedy, 0, top_k))
            if keep is not None:
                outside.scatter_(-1, keep.unsqueeze(-1), False)
        scaled = scaled.masked_fill(outside, -torch.inf)
    return scaled.log_softmax(-1)


def sample(logp: Tensor, uniform: Tensor, greedy: Tensor | None = None) -> Tensor:
    """[R] token ids by inverse CDF of `logp` [R, V] at `uniform` [R] in [0, 1); rows with `greedy` [R] take the likeliest.

    A token of probability zero is never drawn: the CDF rises only at possible tokens."""
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    # A product that rounds up to the total would lie beyond the last token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cdf, target.unsqueeze(-1), right=True).squeeze(-1).clamp_(max=logp.shape[-1] - 1)
    return ids if greedy is None else torch.where(greedy, logp.argmax(-1), ids)


def uniform(seeds: Tensor, index: Tensor) -> Tensor:
    """[R] float64 in [0, 1): one number for each (sample seed, token index), both [R] int64.

    A counter-based hash in wrapping 64-bit integers: it keeps no state and is the same on every device."""
    bits = _mix(_mix(seeds) + index * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _outside(scaled: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """[R, V] True for tokens that top-k, then top-p of what top-k left, cut off. The likeliest token always stays."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond_k = (top_k > 0).unsqueeze(-1) & (rank >= top_k.unsqueeze(-1))
    probability = ordered.masked_fill(beyond_k, -torch.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    beyond_p = (top_p < 1).unsqueeze(-1) & (before >= top_p.unsqueeze(-1)) & (rank > 0)
    return torch.empty_like(beyond_k).scatter_(-1, order, beyond_k | beyond_p)


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch can hold."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    """Every output bit depends on every input bit (the finaliser of SplitMix64)."""
    bits = bits + _GOLDEN
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """A logical shift: torch's own carries the sign along."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
