"""A `LeanModel` whose decode steps go through functions in C, on the CPU in float32.

With one new token a row, torch's own calls take longer to be called than to compute, and its products multiply every row with as many
keys as the longest has. Here all of a layer but its products is four calls, and a row reads no more keys and values than it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drumroll.backends.infer.native.cache import SlotCache
from drumroll.backends.infer.native.decode import Decode, HeadShape
from drumroll.backends.infer.native.lean import LeanModel
from drumroll.backends.llama_folder import Parts


def open_lean(parts: Parts, decode: Decode | None) -> LeanModel:
    """The faster of both, where it can be."""
    weight = parts.weights["model.embed_tokens.weight"]
    if decode is not None and weight.device.type == "cpu" and weight.dtype == torch.float32:
        return CompiledModel(parts, decode)
    return LeanModel(parts)


class CompiledModel(LeanModel):
    """The same numbers but for rounding. A row's bits depend on its own tokens alone."""

    def __init__(self, parts: Parts, decode: Decode) -> None:
        super().__init__(parts)
        self._decode = decode
        self._like = torch.empty(0, self.num_kv_heads, 0, self.head_dim)

    def next_logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        decode = self._decode
        shape = HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, cache.num_columns, self.scale, self.eps)
        own_positions, places = positions[:, 0].contiguous(), cache.places[:, 0].contiguous()
        norms = [*(layer.before_attention for layer in self.layers[1:]), self.norm]
        residual = self.embedding[tokens[:, 0]]
        hidden = decode.add_and_norm(residual, None, self.layers[0].before_attention, self.eps)
        for number, (layer, products, next_norm) in enumerate(zip(self.layers, self._products, norms, strict=True)):
            stored = cache.stored(number, self._like)
            gathered = decode.attend(shape, products.qkv(hidden), (self.cos, self.sin), layer.head_norms, own_positions, places, stored)
            hidden = decode.add_and_norm(residual, products.out(gathered), layer.before_mlp, self.eps)
            opened = decode.gate(products.gate_up(hidden))
            hidden = decode.add_and_norm(residual, products.down(opened), next_norm, self.eps)
        return self._head(hidden)
