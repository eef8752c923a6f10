"""A decoder of the Llama family as a dozen kernels a layer, over pages of keys and values.

It is a function of flat tokens: a prefill gives it those of several slots end to end, a decode step one of each. What is different between
the two is how they attend, which the caller says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from drumroll.backends.infer.native.kernels import PAGE, add_rms_norm, rms_norm, rotate_and_store, silu_product
from drumroll.backends.infer.native.layers import LlamaWeights, why_not_taken_model
from drumroll.backends.llama_folder import Shape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(qkv, keys, values) of a layer → what its tokens gathered, [T, H D]."""


def why_not_fused(model: Any) -> str:
    """What keeps a model of transformers from being computed here, or nothing."""
    reason = why_not_taken_model(model)
    head_dim = 0 if reason else Shape.of(model.config.to_dict()).head_dim
    if not reason and (head_dim < 16 or head_dim & (head_dim - 1)):
        reason = f"its heads have {head_dim} numbers, and not a power of two from 16 on"
    return reason


class FusedModel(LlamaWeights):
    """On a GPU, or in Triton's interpreter."""

    def new_store(self, num_pages: int) -> Tensor:
        """[layers, 2, pages, kv_heads, PAGE, head_dim] for the keys and values of so many pages."""
        shape = (len(self.layers), 2, num_pages, self.num_kv_heads, PAGE, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def bytes_per_page(self) -> int:
        return 2 * len(self.layers) * self.num_kv_heads * PAGE * self.head_dim * int(self.dtype.itemsize)

    def forward(
        self, residual: Tensor, slots: Tensor, positions: Tensor, table: Tensor, pages: list[tuple[Tensor, Tensor]], attend: Attend
    ) -> Tensor:
        """[T, N] embeddings of tokens at `positions` [T] of `slots` [T] → hidden states that the head takes. `residual` is spent."""
        hidden = rms_norm(residual, self.layers[0].before_attention, self.eps)
        following = [layer.before_attention for layer in self.layers[1:]] + [self.norm]
        for layer, (keys, values), norm in zip(self.layers, pages, following, strict=True):
            qkv = linear(hidden, layer.qkv, layer.qkv_bias)
            rotate_and_store(qkv, slots, positions, table, self.cos, self.sin, keys, values, layer.head_norms, self.eps)
            hidden = add_rms_norm(linear(attend(qkv, keys, values), layer.out), residual, layer.before_mlp, self.eps)
            hidden = add_rms_norm(linear(silu_product(linear(hidden, layer.gate_up)), layer.down), residual, norm, self.eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, V] in float32 where the device can, for the log-probabilities' sake."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, self.head.T, out_dtype=torch.float32)
        return linear(hidden, self.head)
