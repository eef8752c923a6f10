"""Values of trajectories at their tokens, and the way back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.algo.segments import spread, trajectory_sum
from drumroll.text.packing import pack_episodes
from drumroll.types import Batch

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def make_batch(sizes: list[int]) -> Batch:
    return pack_episodes([([1] * size, [True] * size) for size in sizes])


@given(lengths, st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
def test_every_token_has_its_trajectorys_value(sizes: list[int], dtype: torch.dtype) -> None:
    values = torch.arange(len(sizes)).to(dtype)
    got = spread(values, make_batch(sizes))
    assert got.dtype == dtype
    assert got.tolist() == [value for value, size in zip(values.tolist(), sizes, strict=True) for _ in range(size)]


@given(lengths, st.integers(0, 99))
def test_the_gradient_is_the_sum_over_the_trajectory(sizes: list[int], seed: int) -> None:
    batch = make_batch(sizes)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    values = torch.zeros(len(sizes), requires_grad=True)
    (gradient,) = torch.autograd.grad((spread(values, batch) * weights).sum(), values)
    assert torch.equal(gradient, trajectory_sum(weights, batch))
    torch.testing.assert_close(gradient, torch.stack([part.sum() for part in weights.split(sizes)]))


def test_small_gradients_are_not_lost_beside_a_large_one() -> None:
    """A sum in float32, in the order of the tokens, would be 1."""
    weights = torch.full((4097,), 2.0**-25)
    weights[0] = 1.0
    values = torch.zeros(1, requires_grad=True)
    (gradient,) = torch.autograd.grad((spread(values, make_batch([4097])) * weights).sum(), values)
    assert gradient.item() == 1.0 + 2.0**-13
