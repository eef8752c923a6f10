"""The `actor_train`, `reference`, `teacher` and `critic` roles: one rank of a training backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drumroll.algo.algorithm import ComposedLoss, build_algorithm
from drumroll.algo.critic import value_loss
from drumroll.algo.distill import build_imitation
from drumroll.algo.loss import Loss, cross_entropy
from drumroll.backends.train.base import Head, Metrics, RankState, Reads, TrainBackend
from drumroll.backends.train.memory import Memory
from drumroll.cluster.transport import SendsWeights
from drumroll.config.models import AlgoConfig, ParallelConfig, SoftTargetsConfig, TrainerConfig
from drumroll.registry import REGISTRY
from drumroll.types import Batch, RankInfo, Schedule, TopLogp


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
        head: Head = "lm",
        reads: Reads = "before",
        value_clip: float | None = None,
        distill: dict[str, Any] | None = None,
        parallel: dict[str, Any] | None = None,
    ) -> None:
        """`algo` is there for a policy in RL; a `scalar` head that reads `before` is a critic's, with `value_clip` for its loss. `distill`
        is the section of that name of supervised fine-tuning, `parallel` the role's part of that section."""
        entry = REGISTRY.lookup("train_backend", trainer["kind"])
        config = entry.schema(TrainerConfig).model_validate(trainer)
        self.rank = rank
        self.backend: TrainBackend = entry.target(
            config,
            Path(model_folder),
            dtype,
            seed,
            trust_remote_code=trust_remote_code,
            head=head,
            reads=reads,
            parallel=ParallelConfig.model_validate(parallel or {}),
        )
        self.backend.setup(rank)
        self._snapshot: RankState | None = None
        self._loss: Loss = partial(value_loss, clip=value_clip) if head == "scalar" else cross_entropy
        if algo is not None:
            algorithm = build_algorithm(AlgoConfig.model_validate(algo))
            self._loss = ComposedLoss(algorithm.loss, algorithm.needs)
        self._imitation = build_imitation(None if distill is None else SoftTargetsConfig.model_validate(distill))

    def logprobs(self, batch: Batch) -> Tensor:
        return self.backend.logprobs(batch)

    def values(self, batch: Batch) -> Tensor:
        return self.backend.values(batch)

    def teach(self, batch: Batch, top_k: int) -> TopLogp:
        """What a teacher says of the tokens, and its `top_k` likeliest in the place of each."""
        return self.backend.top_logprobs(batch, top_k)

    def teach_each(self, updates: Sequence[Batch], top_k: int) -> list[TopLogp]:
        return [self.backend.top_logprobs(batch, top_k) for batch in updates]

    def train(self, updates: Sequence[Batch]) -> list[Metrics]:
        """One update for each batch, by the algorithm's loss or a critic's."""
        return self.backend.train(updates, self._loss)

    def imitate(self, updates: Sequence[Batch]) -> list[Metrics]:
        """One update for each batch of demonstrations, by cross-entropy, or with a teacher also by the distance to it."""
        return self.backend.train(updates, self._imitation)

    def judge_imitation(self, batch: Batch) -> dict[str, float]:
        """Sums over the tokens of the loss mask of a batch that is not trained on: how many there are (`tokens`), their cross-entropy
        (`loss`), and with a teacher the distance to it (`teacher_divergence`)."""
        logp = self.backend.logprobs(batch)
        found = {"tokens": torch.ones_like(logp), "loss": -logp}
        if batch.teacher_top_ids is not None:
            outcome = self._imitation(logp, batch.with_fields(top_logp=self.backend.given_logprobs(batch)))
            found["teacher_divergence"] = outcome.metrics["teacher_divergence"]
        return {name: float(value[batch.loss_mask].sum()) for name, value in found.items()}

    def begin(self, schedule: Schedule) -> None:
        self.backend.begin(schedule)

    def reschedule(self, schedule: Schedule) -> None:
        self.backend.reschedule(schedule)

    def snapshot(self) -> None:
        """Copy the training state to host memory, for the next `save`."""
        self._snapshot = self.backend.snapshot()

    def halve_micro_batches(self) -> None:
        """Passes of half as many tokens from now on: slower, with less memory, and with the same gradient."""
        tokens = max(1, self.backend.config.micro_batch_tokens // 2)
        self.backend.config = self.backend.config.model_copy(update={"micro_batch_tokens": tokens})

    def state_bytes(self) -> int:
        """About how large what `remember` returns is."""
        return self.backend.state_bytes()

    def remember(self) -> Memory:
        """The training state as it is, for somebody to keep who outlives this process; it is copied on its way there."""
        return Memory.of(self.backend.snapshot(alone=True))

    def recall(self, memory: Memory) -> None:
        """Go back to what this rank, or the one before it in its place, was to remember."""
        self.backend.restore(memory.state())

    async def save(self, folder: str) -> None:
        """Write the snapshot and let go of it. The compute thread trains on meanwhile."""
        state, self._snapshot = self._snapshot, None
        assert state is not None, "snapshot comes before save"
        await asyncio.to_thread(self.backend.save, state, Path(folder))

    def load(self, folder: str) -> None:
        self.backend.load(Path(folder))

    def export(self, folder: str, *, replace: bool = False) -> None:
        self.backend.export(Path(folder), replace=replace)

    def to(self, where: Literal["device", "host"]) -> None:
        self.backend.to(where)

    def close(self) -> None:
        self.backend.close()
