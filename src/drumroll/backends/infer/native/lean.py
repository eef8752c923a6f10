"""A decoder of the Llama family in few calls of torch, over the slot cache: on the CPU, the time of a small model goes into calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drumroll.backends.infer.native.cache import SlotCache, attend_grouped
from drumroll.backends.infer.native.layers import Layer, LlamaWeights
from drumroll.backends.llama_folder import Parts
from drumroll.backends.products import Product, can_pack


class Products(NamedTuple):
    """Of one layer."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product


class LeanModel(LlamaWeights):
    """What `slots` asks of a model, for those that could be taken apart."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._make_products()

    def _make_products(self) -> None:
        packs = can_pack([self.head, *(weight for layer in self.layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down))])
        self._head = Product(self.head, packs=packs)
        self._products = [
            Products(
                qkv=Product(layer.qkv, layer.qkv_bias, packs=packs),
                out=Product(layer.out, packs=packs),
                gate_up=Product(layer.gate_up, packs=packs),
                down=Product(layer.down, packs=packs),
            )
            for layer in self.layers
        ]

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._make_products()

    def renew(self) -> None:
        """Weights have changed in place."""
        for product in self._all_products():
            product.renew()

    def _all_products(self) -> Iterator[Product]:
        yield self._head
        for products in self._products:
            yield from products

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def fill(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> None:
        """Keys and values of [R, Q] tokens at `positions` [R, Q]; `mask` [R, 1, Q, length] is added to the scores."""
        self._forward(tokens, positions, mask, cache)

    def next_logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """[R, V] after the last of the tokens; their keys and values are stored as well."""
        return self._head(self._forward(tokens, positions, mask, cache)[:, -1])

    def weights(self) -> Mapping[str, Tensor]:
        return self.by_name

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """[R, Q, N] hidden states that the head takes."""
        num_rows, num_queries = tokens.shape
        width = (self.hidden_size,)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        residual = self.embedding[tokens]
        for number, (layer, products) in enumerate(zip(self.layers, self._products, strict=True)):
            hidden = rms_norm(residual, width, layer.before_attention, self.eps)
            qkv = products.qkv(hidden).view(num_rows, num_queries, -1, self.head_dim).transpose(1, 2)
            turned = self._turn(layer, qkv[:, : self.num_heads + self.num_kv_heads], cos, sin)
            keys, values = cache.update(turned[:, self.num_heads :], qkv[:, self.num_heads + self.num_kv_heads :], number)
            gathered = attend_grouped(turned[:, : self.num_heads], keys, values, mask, self.scale).reshape(num_rows, num_queries, -1)
            residual = residual + products.out(gathered)
            hidden = rms_norm(residual, width, layer.before_mlp, self.eps)
            gate, up = products.gate_up(hidden).chunk(2, dim=-1)
            residual = residual + products.down(silu(gate).mul_(up))
        return rms_norm(residual, width, self.norm, self.eps)

    def _turn(self, layer: Layer, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys [R, H + G, Q, D] by their positions."""
        if layer.head_norms is not None:
            queries, keys = torch.split(heads, [self.num_heads, self.num_kv_heads], dim=1)
            parts = zip((queries, keys), layer.head_norms, strict=True)
            heads = torch.cat([rms_norm(part, (self.head_dim,), weight, self.eps) for part, weight in parts], dim=1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
