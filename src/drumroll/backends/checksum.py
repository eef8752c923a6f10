"""An integer sum over a tensor's bits: cheap, exact, the same on every device and in every order of summation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8

_BLOCK = {"cpu": 2**15, "cuda": 2**23}
"""Words that are looked at together: what fits into a core's cache, or what keeps a GPU busy without much memory."""


def checksum(tensor: Tensor) -> int:
    """Sum of the tensor's words of eight bytes, and of each word times its place, so that swapped values are noticed too; bytes that
    make no whole word count as words. Modulo 2⁶⁴, signed."""
    return checksums([begin_checksum(tensor)])[0]


def checksums(begun: Sequence[Tensor]) -> list[int]:
    """What `begin_checksum` began for several tensors of one device, waiting for the device once."""
    values: list[int] = torch.stack(list(begun)).tolist() if begun else []
    return values


def begin_checksum(tensor: Tensor) -> Tensor:
    """The checksum as a number on the tensor's device, which may still be computing it."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    num_whole = data.numel() // _WORD_BYTES
    words, rest = data[: num_whole * _WORD_BYTES].view(torch.int64), data[num_whole * _WORD_BYTES :].to(torch.int64)
    size = min(_BLOCK.get(words.device.type, 2**23), max(num_whole, len(rest)))
    places = torch.arange(2, size + 2, device=words.device, dtype=torch.int64)  # one more: each word counts once for itself
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, num_whole, max(1, size)):
        block = words[start : start + size]
        total += block.sum() * start + (block * places[: len(block)]).sum()
    if len(rest):
        total += rest.sum() * num_whole + (rest * places[: len(rest)]).sum()
    return total
