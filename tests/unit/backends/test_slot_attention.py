"""Attention over the slot cache: a row's bits are its own, whoever its neighbours are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from drumroll.backends.infer.native.cache import SPARE, attend_grouped
from drumroll.backends.infer.native.slots import cache_length

LENGTHS = tuple(sorted({cache_length(size) for size in range(1, 1025)}))
HEADS = [(2, 2, 8), (4, 2, 8), (4, 4, 16), (4, 2, 16), (8, 8, 32), (8, 2, 32), (14, 2, 64), (4, 4, 128)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("num_seen", [1, 13, 31, 47, 63, 90, 120, 190, 250, 300, 500, 700])
def test_one_token_has_the_same_bits_among_any_rows_and_over_any_length(
    num_heads: int, num_kv_heads: int, head_dim: int, num_seen: int
) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, num_heads, 1, head_dim)
    key, value = torch.randn(2, 1, num_kv_heads, num_seen, head_dim)
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)[0]
    found = []
    for length in (each for each in LENGTHS if each >= num_seen):
        for num_rows, slot in ((16, 0), (16, 9), (48, 40)):
            queries = torch.randn(num_rows, num_heads, 1, head_dim)
            keys, values = 100 * torch.randn(2, num_rows, num_kv_heads, LENGTHS[-1] + SPARE, head_dim)
            queries[slot], keys[slot, :, :num_seen], values[slot, :, :num_seen] = query[0], key[0], value[0]
            mask = torch.zeros(num_rows, 1, 1, length)
            mask[..., num_seen:] = -torch.inf
            found.append(attend_grouped(queries, keys[:, :, :length], values[:, :, :length], mask, None)[slot])
    torch.testing.assert_close(found[0], expected)
    assert all(torch.equal(each, found[0]) for each in found)
