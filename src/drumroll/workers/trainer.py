"""The `actor_train` and `reference` roles: one rank of a training backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drumroll.algo.algorithm import build_algorithm
from drumroll.algo.loss import cross_entropy
from drumroll.backends.train.base import Metrics, TrainBackend
from drumroll.cluster.transport import SendsWeights
from drumroll.config.models import AlgoConfig, TrainerConfig
from drumroll.registry import REGISTRY
from drumroll.types import Batch, RankInfo, Schedule


class TrainWorker(SendsWeights):
    """Every method is called on all ranks at once."""

    def __init__(
        self,
        rank: RankInfo,
        *,
        trainer: dict[str, Any],
        model_folder: str,
        dtype: str,
        seed: int,
        trust_remote_code: bool = False,
        algo: dict[str, Any] | None = None,
    ) -> None:
        entry = REGISTRY.lookup("train_backend", trainer["kind"])
        config = entry.schema(TrainerConfig).model_validate(trainer)
        self.rank = rank
        self.backend: TrainBackend = entry.target(config, Path(model_folder), dtype, seed, trust_remote_code=trust_remote_code)
        self.backend.setup(rank)
        self._loss = build_algorithm(AlgoConfig.model_validate(algo)).loss if algo is not None else cross_entropy

    def logprobs(self, batch: Batch) -> Tensor:
        return self.backend.logprobs(batch)

    def train(self, updates: Sequence[Batch]) -> list[Metrics]:
        """One update for each batch, by the algorithm's loss."""
        return self.backend.train(updates, self._loss)

    def imitate(self, updates: Sequence[Batch]) -> list[Metrics]:
        """One update for each batch of demonstrations, by cross-entropy."""
        return self.backend.train(updates, cross_entropy)

    def cross_entropy(self, batch: Batch) -> tuple[float, int]:
        """Sum of the negative log-probabilities of the masked tokens, and how many there are."""
        with torch.no_grad():
            return float(-self.backend.logprobs(batch)[batch.loss_mask].sum()), int(batch.loss_mask.sum())

    def begin(self, schedule: Schedule) -> None:
        self.backend.begin(schedule)

    def remember(self, name: str) -> None:
        self.backend.remember(name)

    def recall(self, name: str) -> None:
        self.backend.recall(name)

    def export(self, folder: str) -> None:
        self.backend.export(Path(folder))

    def to(self, where: Literal["device", "host"]) -> None:
        self.backend.to(where)

    def close(self) -> None:
        self.backend.close()
