"""The assembler: turns blocks of trajectories into each trainer rank's share of the step, beside trainer rank 0.

    blocks ──pack──► whole batch ──► shards to score ──► (ref_logp, old_logp) ──finish──► shards to train on
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from drumroll.algo.algorithm import build_algorithm
from drumroll.config.models import AlgoConfig
from drumroll.text.packing import pack, select, split_balanced
from drumroll.types import Batch, RankInfo, Trajectory, sample_seed


class Assembler:
    """Holds one step's batch between packing and training."""

    def __init__(self, rank: RankInfo, *, algo: dict[str, Any], num_shards: int, constant_length: int, seed: int) -> None:
        torch.set_num_threads(1)
        self._config = AlgoConfig.model_validate(algo)
        self._algorithm = build_algorithm(self._config, constant_length)
        self._num_shards = num_shards
        self._seed = seed
        self._batch: Batch | None = None
        self._shards: list[list[int]] = []

    def pack(self, accepted: Collection[str], *blocks: Sequence[Trajectory]) -> list[Batch]:
        """One shard per trainer rank, to be scored. Only accepted samples with a verdict enter."""
        wanted = set(accepted)
        trajectories = [t for block in blocks for t in block if t.sample_id in wanted and t.trainable]
        self._batch = pack(trajectories)
        self._shards = split_balanced(self._batch.lengths, self._num_shards)
        return [select(self._batch, indices) for indices in self._shards]

    def finish(self, step: int, ref_logp: Sequence[Tensor] | None, old_logp: Sequence[Tensor] | None) -> tuple[Any, ...]:
        """Advantages over the whole batch, then each rank's shard of every update. First comes what to report."""
        assert self._batch is not None, "pack comes before finish"
        batch = self._batch
        if ref_logp is not None:
            batch = batch.with_fields(ref_logp=self._whole(ref_logp))
        if old_logp is not None:
            batch = batch.with_fields(old_logp=self._whole(old_logp))
        batch = batch.with_fields(advantages=self._algorithm.advantage(batch))
        self._batch = None
        updates = self._updates(batch, step)
        return self._report(batch), *([update[rank] for update in updates] for rank in range(self._num_shards))

    def _whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Per-token values of the shards, back in the order of the whole batch."""
        assert self._batch is not None
        whole = torch.zeros(self._batch.num_tokens)
        bounds = self._batch.offsets.tolist()
        for indices, part in zip(self._shards, parts, strict=True):
            at = 0
            for n in indices:
                length = bounds[n + 1] - bounds[n]
                whole[bounds[n] : bounds[n + 1]] = part[at : at + length]
                at += length
        return whole

    def _updates(self, batch: Batch, step: int) -> list[list[Batch]]:
        """For every update of the step the ranks' shards, weighted so that they make up one update."""
        updates: list[list[Batch]] = []
        for epoch in range(self._config.epochs_per_step):
            generator = torch.Generator().manual_seed(sample_seed(self._seed, "updates", step, epoch))
            order = torch.randperm(batch.num_trajectories, generator=generator).tolist()
            if self._config.updates_per_step == 1:
                order.sort()
            for part in range(self._config.updates_per_step):
                update = select(batch, order[part :: self._config.updates_per_step])
                update = update.with_fields(weight=self._algorithm.weights(update))
                updates.append([select(update, indices) for indices in split_balanced(update.lengths, self._num_shards)])
        return updates

    def _report(self, batch: Batch) -> dict[str, float]:
        """What the controller logs of the batch."""
        lengths = batch.loss_mask.sum()
        advantages = batch.advantages
        assert advantages is not None
        touched = int((advantages * batch.loss_mask != 0).sum())
        return {
            "batch/num_trajectories": float(batch.num_trajectories),
            "batch/num_tokens": float(batch.num_tokens),
            "batch/num_new_tokens": float(lengths),
            "batch/informative_token_ratio": touched / max(1, int(lengths)),
        }
