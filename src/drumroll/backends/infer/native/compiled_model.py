"""A `LeanModel` whose decode steps go through functions in C (`decode.c`), on the CPU in float32.

With one new token a row, torch's own calls take longer to be called than to compute, and its products multiply every row with as many
keys as the longest has. Here all of a layer but its products is four calls, and a row reads no more keys and values than it has.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from drumroll.backends.compiled import load
from drumroll.backends.infer.native.cache import SlotCache
from drumroll.backends.infer.native.lean import LeanModel
from drumroll.backends.llama_folder import Parts

SOURCE = Path(__file__).with_name("decode.c")


class _Shape(ctypes.Structure):
    """`struct shape` of decode.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "columns")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    ]


def open_lean(parts: Parts, *, compiles: bool) -> LeanModel:
    """The faster of both where it is allowed and can be."""
    weight = parts.weights["model.embed_tokens.weight"]
    if compiles and weight.device.type == "cpu" and weight.dtype == torch.float32:
        functions = load(SOURCE)
        if functions is not None:
            return CompiledModel(parts, functions)
    return LeanModel(parts)


class CompiledModel(LeanModel):
    """The same numbers but for rounding. A row's bits depend on its own tokens alone."""

    def __init__(self, parts: Parts, functions: ctypes.CDLL) -> None:
        super().__init__(parts)
        self._attend, self._add_and_norm, self._gate = functions.attend, functions.add_and_norm, functions.gate
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._attend.argtypes = [pointer, number, *(pointer,) * 11]
        self._add_and_norm.argtypes = [number, number, pointer, pointer, pointer, ctypes.c_float, pointer]
        self._gate.argtypes = [number, number, pointer, pointer]
        self._attend.restype = self._add_and_norm.restype = self._gate.restype = None
        self._like = torch.empty(0, self.num_kv_heads, 0, self.head_dim)

    def next_logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        num_rows, columns = len(tokens), cache.num_columns
        shape = _Shape(self.num_heads, self.num_kv_heads, self.head_dim, columns, self.scale, self.eps)
        residual = self.embedding[tokens[:, 0]]
        hidden, shares = torch.empty_like(residual), torch.empty(columns)
        gathered = torch.empty(num_rows, self.num_heads * self.head_dim)
        where = [each[:, 0].contiguous() for each in (positions, cache.places)]
        norms = [*(layer.before_attention for layer in self.layers[1:]), self.norm]
        self._norm(residual, None, self.layers[0].before_attention, hidden)
        for number, (layer, products, next_norm) in enumerate(zip(self.layers, self._products, norms, strict=True)):
            qkv = products.qkv(hidden)
            head_norms = layer.head_norms or (None, None)
            own = (qkv, self.cos, self.sin, *head_norms, *where, *cache.stored(number, self._like), shares, gathered)
            self._attend(ctypes.byref(shape), num_rows, *map(_address, own))
            self._norm(residual, products.out(gathered), layer.before_mlp, hidden)
            joint = products.gate_up(hidden)
            opened = joint.new_empty(num_rows, joint.shape[1] // 2)
            self._gate(*opened.shape, _address(joint), _address(opened))
            self._norm(residual, products.down(opened), next_norm, hidden)
        return self._head(hidden)

    def _norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor) -> None:
        """Add to the residual, in place; → `out`, its norm."""
        self._add_and_norm(*residual.shape, _address(residual), _address(delta), _address(weight), self.eps, _address(out))


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "functions in C read tensors end to end"
    return tensor.data_ptr()
