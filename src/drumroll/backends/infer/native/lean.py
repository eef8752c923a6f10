"""A decoder of the Llama family in few calls of torch, over the slot cache: on the CPU, the time of a small model goes into calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from drumroll.backends.infer.native.cache import SlotCache, attend_grouped
from drumroll.backends.infer.native.layers import Layer, LlamaWeights


class LeanModel(LlamaWeights):
    """What `slots` asks of a model, for those that could be taken apart."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def fill(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> None:
        """Keys and values of [R, Q] tokens at `positions` [R, Q]; `mask` [R, 1, Q, length] is added to the scores."""
        self._forward(tokens, positions, mask, cache)

    def next_logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """[R, V] after the last of the tokens; their keys and values are stored as well."""
        return linear(self._forward(tokens, positions, mask, cache)[:, -1], self.head)

    def weights(self) -> Mapping[str, Tensor]:
        return self.by_name

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """[R, Q, N] hidden states that the head takes."""
        num_rows, num_queries = tokens.shape
        width = (self.hidden_size,)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        residual = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            hidden = rms_norm(residual, width, layer.before_attention, self.eps)
            qkv = linear(hidden, layer.qkv, layer.qkv_bias).view(num_rows, num_queries, -1, self.head_dim).transpose(1, 2)
            turned = self._turn(layer, qkv[:, : self.num_heads + self.num_kv_heads], cos, sin)
            keys, values = cache.update(turned[:, self.num_heads :], qkv[:, self.num_heads + self.num_kv_heads :], number)
            gathered = attend_grouped(turned[:, : self.num_heads], keys, values, mask, self.scale).reshape(num_rows, num_queries, -1)
            residual = residual + linear(gathered, layer.out)
            hidden = rms_norm(residual, width, layer.before_mlp, self.eps)
            gate, up = linear(hidden, layer.gate_up).chunk(2, dim=-1)
            residual = residual + linear(silu(gate).mul_(up), layer.down)
        return rms_norm(residual, width, self.norm, self.eps)

    def _turn(self, layer: Layer, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys [R, H + G, Q, D] by their positions."""
        if layer.head_norms is not None:
            queries, keys = torch.split(heads, [self.num_heads, self.num_kv_heads], dim=1)
            parts = zip((queries, keys), layer.head_norms, strict=True)
            heads = torch.cat([rms_norm(part, (self.head_dim,), weight, self.eps) for part, weight in parts], dim=1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
