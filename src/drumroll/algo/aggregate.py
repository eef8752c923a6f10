"""How much each token's loss counts in an update: weights that are fixed before the batch is split in any way.

The update's loss is the sum over all tokens of weight × loss, so ranks and micro-batches change nothing but the order of
summation. Shape suffixes: N trajectories, T tokens of the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from drumroll.algo.segments import spread, trajectory_sum
from drumroll.types import Batch

Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "constant_length"]


def token_weights(batch: Batch, kind: Aggregation, constant_length: int | None = None) -> Tensor:
    """[T] float32, 0 outside the loss mask; `batch` is the whole update.

    token_mean: every token counts the same; sequence_mean: every trajectory with a token in the mask does; group_mean: every group with
    such a token does, and the tokens of a group among each other. These sum to 1.
    constant_length: 1 / (trajectories × `constant_length`), so that a long trajectory counts for more than a short one.
    """
    mask_T = batch.loss_mask.float()
    if kind == "token_mean":
        return mask_T / mask_T.sum().clamp(min=1)
    if kind == "constant_length":
        if constant_length is None:
            raise ValueError("aggregation 'constant_length' needs the length to divide by: the budget of one reply")
        return mask_T / (max(batch.num_trajectories, 1) * constant_length)
    tokens_N = trajectory_sum(mask_T, batch)
    unit_N = batch.group_index if kind == "group_mean" else torch.arange(batch.num_trajectories, device=mask_T.device)
    tokens_U = mask_T.new_zeros(int(unit_N.max()) + 1 if len(unit_N) else 0).index_add(0, unit_N, tokens_N)
    return mask_T / (spread(tokens_U.clamp(min=1)[unit_N], batch) * (tokens_U > 0).sum().clamp(min=1))
