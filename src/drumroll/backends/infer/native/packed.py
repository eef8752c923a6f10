"""Products with weights that are laid out for the CPU's registers beforehand. A library that gets them as they are lays them out in every
product anew, which for few rows costs as much as the product itself.

A row of such a product has the same bits however many rows there are, and with any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

MOST_BYTES = 1 << 30
"""Of a model's weights. Each is held twice, as it came and packed, which larger models have no memory to spare for."""


def can_pack(weights: list[Tensor]) -> bool:
    """Whether products with all of these can be packed here."""
    return (
        all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        and sum(weight.numel() * weight.element_size() for weight in weights) <= MOST_BYTES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
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
        if self._packed is None:
            return linear(rows, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out
