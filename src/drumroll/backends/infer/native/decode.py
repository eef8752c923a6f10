"""The functions of `decode.c`, called with tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from drumroll.backends.compiled import load

SOURCE = Path(__file__).with_name("decode.c")
BLOCK = 64
"""As in decode.c."""


class HeadShape(ctypes.Structure):
    """`struct shape` of decode.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "columns")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    ]


class Decode:
    """Every tensor is of float32 on the CPU, if nothing else is said, and lies end to end. What a function returns it writes anew; what it
    changes in place is said. See decode.c."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._attend, self._add_and_norm, self._gate, self._draw = functions.attend, functions.add_and_norm, functions.gate, functions.draw
        self._attend.argtypes = [pointer, number, *(pointer,) * 11]
        self._add_and_norm.argtypes = [number, number, pointer, pointer, pointer, ctypes.c_float, pointer]
        self._gate.argtypes = [number, number, pointer, pointer]
        self._draw.argtypes = [number, number, *(pointer,) * 8]
        for function in (self._attend, self._add_and_norm, self._gate, self._draw):
            function.restype = None

    @classmethod
    def open(cls) -> Decode | None:
        """None where there is no compiler."""
        functions = load(SOURCE)
        return None if functions is None else cls(functions)

    def attend(
        self,
        shape: HeadShape,
        qkv: Tensor,
        turns: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        places: Tensor,
        stored: tuple[Tensor, Tensor],
    ) -> Tensor:
        """[R, (H + 2 G) D] → [R, H D]. `turns` are cosines and sines by position, `norms` those of queries and keys; `positions` and
        `places` [R] are int64. Keys and values are `stored`, in place."""
        num_rows = len(qkv)
        shares, out = torch.empty(shape.columns), torch.empty(num_rows, shape.heads * shape.dim)
        tensors = (qkv, *turns, *(norms or (None, None)), positions, places, *stored, shares, out)
        self._attend(ctypes.byref(shape), num_rows, *map(_address, tensors))
        return out

    def add_and_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """[R, N]; adds to the residual, in place, and returns its norm."""
        out = torch.empty_like(residual)
        self._add_and_norm(*residual.shape, _address(residual), _address(delta), _address(weight), eps, _address(out))
        return out

    def gate(self, joint: Tensor) -> Tensor:
        """[R, 2 I], gates before what they let through → [R, I]."""
        out = torch.empty(len(joint), joint.shape[1] // 2)
        self._gate(*out.shape, _address(joint), _address(out))
        return out

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """[R, V] → [R] tokens drawn and [R] their log-probabilities, as by `processed_logp` and `sample` without top-k and top-p. `seeds`
        and `index` are int64."""
        num_rows, size = logits.shape
        powers, blocks = torch.empty(size), torch.empty(-(-size // BLOCK), dtype=torch.float64)
        ids, logp = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        self._draw(num_rows, size, *map(_address, (logits, temperature, seeds, index, powers, blocks, ids, logp)))
        return ids, logp


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "functions in C read tensors end to end"
    return tensor.data_ptr()
