"""Products of rows with weights on the CPU, by oneDNN: torch's own go through MKL, which on other makers' processors leaves half of their
width unused in float32, so that they take twice as long.

`product` is for weights that learn, and has a gradient. `Product` is for weights that stay for many products: it lays them out for the
processor's registers once, which the library otherwise does in every product anew, and which for few rows costs as much as the product
itself. In float32, a row of such a product has the same bits however many rows there are, and with any number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

MOST_BYTES = 1 << 30
"""Of a model's packed weights. Each is held twice, as it came and packed, which larger models have no memory to spare for."""

WORTH_IT = 1 << 21
"""Multiplications from which on a product gains more from oneDNN than it costs to get there."""

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [..., I] → [..., O] by a weight [O, I], like torch's `linear`."""
    is_ours = _HAS_ONEDNN and rows.device.type == "cpu" and rows.dtype == weight.dtype == torch.float32
    if not is_ours or rows.numel() * len(weight) < WORTH_IT:
        return linear(rows, weight, bias)  # which goes through oneDNN for narrower numbers
    out: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out


def can_pack(weights: list[Tensor]) -> bool:
    """Whether products with all of these can be packed here."""
    return (
        _HAS_ONEDNN
        and all(weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) for weight in weights)
        and sum(weight.numel() * weight.element_size() for weight in weights) <= MOST_BYTES
    )


class Product:
    """rows [..., I] → [..., O] by a weight [O, I]. After the weight has changed in place, `renew` takes that over."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packs: bool) -> None:
        self.weight, self.bias = weight, bias
        self._packs = packs
        self._packed: Tensor | None = None
        self.renew()

    def renew(self) -> None:
        if self._packs:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias) if self._packed is None else _multiplied(rows, self._packed, self.bias)


class _Linear(torch.autograd.Function):
    """`linear`, whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _multiplied(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows = _multiplied(of_out, weight.T) if ctx.needs_input_grad[0] else None
        of_out, rows = of_out.flatten(0, -2), rows.flatten(0, -2)
        of_weight = None
        if ctx.needs_input_grad[1]:  # with the smaller side first, which is up to half as fast again
            in_order = len(weight) <= weight.shape[1]
            of_weight = _multiplied(of_out.T, rows.T) if in_order else _multiplied(rows.T, of_out.T).T
        return of_rows, of_weight, of_out.sum(0) if ctx.needs_input_grad[2] else None


def _multiplied(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, without a gradient; the weight may be packed."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out
