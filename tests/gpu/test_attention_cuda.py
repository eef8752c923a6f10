"""Long sequences by cuDNN, short ones packed: both ways give the same on a GPU, forwards and backwards."""

from __future__ import annotations

import pytest
import torch

from drumroll.backends import attention
from drumroll.backends.attention import PackedLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("lengths", [[4096], [5000, 100, 300, 4100, 7]])
def test_long_and_short_ones_give_what_packed_ones_give(lengths: list[int]) -> None:
    device = torch.device("cuda:0")
    layout = PackedLayout(lengths, device)
    generator = torch.Generator(device).manual_seed(0)
    states = [
        torch.randn(sum(lengths), heads, 64, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weight = torch.randn(sum(lengths), 4, 64, generator=generator, device=device, dtype=torch.bfloat16)
    results = []
    for output in (
        attention._varlen(*states, layout.offsets, layout.max_length, None, None),
        attention._by_stretches(*states, layout, None),
    ):
        results.append((output, *torch.autograd.grad((output * weight).sum(), states)))
    for expected, got in zip(*results, strict=True):
        difference = (got.float() - expected.float()).norm() / expected.float().norm()
        assert difference < 0.01, "rounding of bfloat16"
