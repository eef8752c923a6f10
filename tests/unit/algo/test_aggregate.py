"""Token weights against their definitions."""

from __future__ import annotations

import pytest
import torch

from drumroll.algo.aggregate import token_weights
from drumroll.text.packing import pack_demonstrations, select

BATCH = pack_demonstrations([([1, 2], [3, 4, 5]), ([1], [2]), ([1, 2], [])])
"""Three, one and no tokens in the mask."""


def test_token_mean_counts_every_token_the_same() -> None:
    assert token_weights(BATCH, "token_mean").tolist() == [0, 0, 0.25, 0.25, 0.25, 0, 0.25, 0, 0]


def test_sequence_mean_counts_every_trajectory_with_tokens_the_same() -> None:
    expected = [0, 0, 1 / 6, 1 / 6, 1 / 6, 0, 0.5, 0, 0]
    torch.testing.assert_close(token_weights(BATCH, "sequence_mean"), torch.tensor(expected))


def test_group_mean_counts_every_group_with_tokens_the_same() -> None:
    """Four tokens of one group in two trajectories, one of another, none of a third."""
    batch = pack_demonstrations([([1], [2, 3, 4]), ([1], [2]), ([1, 2], [3]), ([1], [])]).with_fields(
        group_index=torch.tensor([4, 0, 4, 2])
    )
    expected = [0, 1 / 8, 1 / 8, 1 / 8, 0, 1 / 2, 0, 0, 1 / 8, 0]
    torch.testing.assert_close(token_weights(batch, "group_mean"), torch.tensor(expected))


def test_constant_length_divides_by_trajectories_times_the_budget() -> None:
    torch.testing.assert_close(token_weights(BATCH, "constant_length", 10), BATCH.loss_mask / 30)
    with pytest.raises(ValueError, match="budget of one reply"):
        token_weights(BATCH, "constant_length")


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "group_mean", "constant_length"])
@pytest.mark.parametrize("indices", [[], [2]])
def test_nothing_to_learn_from_weighs_nothing(kind: str, indices: list[int]) -> None:
    part = select(BATCH, indices)
    assert torch.equal(token_weights(part, kind, 4), torch.zeros(part.num_tokens))  # type: ignore[arg-type]
