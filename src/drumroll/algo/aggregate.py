"""How much each token's loss counts in an update: weights that are fixed before the batch is split in any way.

The update's loss is the sum over all tokens of weight × loss, so ranks and micro-batches change nothing but the order of
summation. Shape suffixes: N trajectories, T tokens of the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from drumroll.types import Batch

Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]


def token_weights(batch: Batch, kind: Aggregation, constant_length: int | None = None) -> Tensor:
    """[T] float32, 0 outside the loss mask; `batch` is the whole update.

    token_mean: every token counts the same; sequence_mean: every trajectory with a token in the mask does; both sum to 1.
    constant_length: 1 / (trajectories × `constant_length`), so that a long trajectory counts for more than a short one.
    """
    mask_T = batch.loss_mask.float()
    if kind == "token_mean":
        return mask_T / mask_T.sum().clamp(min=1)
    if kind == "constant_length":
        if constant_length is None:
            raise ValueError("aggregation 'constant_length' needs the length to divide by: the budget of one reply")
        return mask_T / (max(batch.num_trajectories, 1) * constant_length)
    number_N = torch.arange(batch.num_trajectories, device=mask_T.device)
    trajectory_T = number_N.repeat_interleave(batch.offsets.diff(), output_size=batch.num_tokens)
    tokens_N = mask_T.new_zeros(batch.num_trajectories).index_add(0, trajectory_T, mask_T)
    return mask_T / (tokens_N.clamp(min=1)[trajectory_T] * (tokens_N > 0).sum().clamp(min=1))
