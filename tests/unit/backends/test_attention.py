"""Attention to packed sequences: what is attended to together, and one sequence by itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.backends import attention
from drumroll.backends.attention import PackedLayout

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12))
def test_stretches_cover_every_sequence_once_and_long_ones_stand_alone(lengths: list[int]) -> None:
    layout = PackedLayout(lengths, CPU)
    if max(lengths) < attention._LONG:
        assert layout.stretches == []
        return
    found: list[int] = []
    place = 0
    for stretch in layout.stretches:
        assert stretch.start == place
        place = stretch.end
        sizes = stretch.offsets.diff().tolist()
        assert stretch.max_length == max(sizes)
        assert len(sizes) == 1 or stretch.max_length < attention._LONG
        found += sizes
    assert found == lengths
    assert place == sum(lengths)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_long_sequences_one_by_one_give_what_packed_ones_give(monkeypatch: pytest.MonkeyPatch, num_kv_heads: int) -> None:
    monkeypatch.setattr(attention, "_LONG", 8)
    lengths = [8, 13, 30, 9]
    layout = PackedLayout(lengths, CPU)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(sum(lengths), heads, 8, generator=generator).requires_grad_() for heads in (4, num_kv_heads, num_kv_heads)]
    weight = torch.randn(sum(lengths), 4, 8, generator=generator)
    results = []
    for attend in (
        lambda q, k, v: attention._padded(q, k, v, layout, None, None),
        lambda q, k, v: attention._by_stretches(q, k, v, layout, None),
    ):
        output = attend(*states)
        results.append((output, *torch.autograd.grad((output * weight).sum(), states)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_short_sequences_by_products_give_what_the_kernel_gives(
    monkeypatch: pytest.MonkeyPatch, num_kv_heads: int, window: int | None
) -> None:
    lengths = [3, 17, 40, 64]
    layout = PackedLayout(lengths, CPU)
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (num_kv_heads, 8), (num_kv_heads, 6))
    states = [torch.randn(sum(lengths), *size, generator=generator).requires_grad_() for size in sizes]
    weight = torch.randn(sum(lengths), 4, 6, generator=generator)
    results = []
    for short in (64, 0):
        monkeypatch.setattr(attention, "_SHORT", short)
        output = attention._padded(*states, layout, 0.3, window)
        results.append((output, *torch.autograd.grad((output * weight).sum(), states)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_few_lengths_are_prepared_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    def spy(query: torch.Tensor, *others: torch.Tensor, **options: object) -> torch.Tensor:
        seen.add(query.shape[2])
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    for length in np.linspace(4096, 32768, 200, dtype=int):
        states = torch.zeros(int(length), 1, 1)
        assert len(attention._alone(states, states, states, None)) == length
    assert len(seen) <= 13
