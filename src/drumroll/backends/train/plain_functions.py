"""What a decoder layer does between its products, each as one function with its gradient written out: torch's own are made of many passes
over memory, forwards and backwards, which on the CPU take as long as the products.

    normed   n = x · r,  r = (mean x² + ε)^-½          dx = r · (g - n · mean(g · n))            g = w · dy,  dw = Σ n · dy
    gated    y = s(a) · b                                da = s'(a) · b · dy,  db = s(a) · dy       s(a) = a / (1 + e^-a)
    turned   y = x · cos + swap(x) · sin                 dx = dy · cos - swap(dy) · sin             swap([x₁ x₂]) = [-x₂ x₁]

Numbers narrower than float32 are widened where they are added up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, [..., N]."""
    out: Tensor = _Normed.apply(hidden, weight, eps)  # type: ignore[no-untyped-call]
    return out


def gated(joint: Tensor) -> Tensor:
    """[..., 2 I], gates before what they let through → [..., I]."""
    out: Tensor = _Gated.apply(joint)  # type: ignore[no-untyped-call]
    return out


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D] heads by the angles of their positions; `cos` and `sin` are [T, 1, D], the two halves of a `cos` the same, those of a `sin`
    with opposite signs, as `angles` makes them."""
    out: Tensor = _Turned.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return out


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T] positions, [D / 2] frequencies → the [T, 1, D] cosines and sines that `turned` takes."""
    angle = positions[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        rate = torch.linalg.vecdot(wide, wide).div_(hidden.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(hidden, weight, rate)
        out: Tensor = (wide * rate).mul_(weight).to(hidden.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, rate = ctx.saved_tensors
        of_out = of_out.float()
        unit = hidden.float() * rate
        of_weight = (of_out * unit).flatten(0, -2).sum(0)
        of_unit = of_out * weight
        share = torch.linalg.vecdot(of_unit, unit).div_(hidden.shape[-1]).unsqueeze(-1)
        of_hidden = of_unit.addcmul_(unit, share, value=-1).mul_(rate)
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> Tensor:
        gate, through = joint.chunk(2, dim=-1)
        opened = silu(gate)
        ctx.save_for_backward(joint, opened)
        return opened * through

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> Tensor:
        joint, opened = ctx.saved_tensors
        gate, through = joint.chunk(2, dim=-1)
        of_joint = torch.empty_like(joint)
        of_gate, of_through = of_joint.chunk(2, dim=-1)
        torch.mul(of_out, opened, out=of_through)
        torch.ops.aten.silu_backward.grad_input(of_out * through, gate, grad_input=of_gate)
        return of_joint


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (heads * cos).addcmul_(_halves_swapped(heads), sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return (of_out * cos).addcmul_(_halves_swapped(of_out), sin, value=-1), None, None


def _halves_swapped(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)
