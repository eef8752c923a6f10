"""The trainers of preference learning, and their reference: one rank of a training backend with a preference loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drumroll.algo.preference import build_preference
from drumroll.config.models import PreferenceConfig
from drumroll.registry import REGISTRY
from drumroll.types import Batch, RankInfo
from drumroll.workers.trainer import TrainWorker


class PreferenceTrainer(TrainWorker):
    """A loss that needs scores has a model with a scalar head, which is read at the last token of each text; `train` is by that loss."""

    def __init__(self, rank: RankInfo, *, preference: dict[str, Any], **options: Any) -> None:
        """`preference` is the section of the config, `options` are those of a trainer."""
        schema = REGISTRY.lookup("preference_loss", preference["kind"]).schema(PreferenceConfig)
        learned = build_preference(schema.model_validate(preference))
        self._scores = "scores" in learned.needs
        super().__init__(rank, **options, head="scalar" if self._scores else "lm", reads="through")
        self._loss = learned.loss

    def logprobs_of_each(self, updates: Sequence[Batch]) -> list[Tensor]:
        return [self.backend.logprobs(batch) for batch in updates]

    def judge(self, updates: Sequence[Batch]) -> dict[str, float]:
        """The loss and what it reports of this rank's share of a batch that is not trained on, summed with the weights, and their sum."""
        (batch,) = updates
        outcome = self._loss(self.backend.values(batch) if self._scores else self.backend.logprobs(batch), batch)
        values = {"loss": outcome.loss, **outcome.weighted, "weight": torch.ones_like(outcome.loss)}
        weight = batch.weight.double()
        return {name: float((value * weight)[batch.loss_mask].sum()) for name, value in values.items()}
