"""An integer sum over a tensor's bits: cheap, exact, the same on every device and in every order of summation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_BLOCK = {"cpu": 2**15, "cuda": 2**24}
"""Words that are looked at together: what fits into a core's cache, or what keeps a GPU busy without much memory."""


def checksum(tensor: Tensor) -> int:
    """Sum of the tensor's words, and of each word times its place, so that swapped values are noticed too; modulo 2⁶⁴, signed."""
    return checksums([begin_checksum(tensor)])[0]


def checksums(begun: Sequence[Tensor]) -> list[int]:
    """What `begin_checksum` began for several tensors of one device, waiting for the device once."""
    values: list[int] = torch.stack(list(begun)).tolist() if begun else []
    return values


def begin_checksum(tensor: Tensor) -> Tensor:
    """The checksum as a number on the tensor's device, which may still be computing it."""
    words = tensor.detach().contiguous().view(_WORD[tensor.element_size()]).flatten()
    size = min(_BLOCK.get(words.device.type, 2**24), words.numel())
    places = torch.arange(2, size + 2, device=words.device, dtype=torch.int64)  # one more: each word counts once for itself
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), max(1, size)):
        block = words[start : start + size].to(torch.int64)
        total += block.sum() * start + (block * places[: block.numel()]).sum()
    return total
