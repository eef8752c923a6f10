"""What a training backend must be able to do. `tests/contract/test_train_*.py` check every registered one.

Every rank of the role holds one backend, and every method marked *collective* must be called on all of them. Ranks that share the work on
the same trajectories (`ParallelConfig.devices_per_shard` in a row) are given the same shard, and say the same of it.

A model has one of two heads:

    lm       a causal language model. A token has a log-probability.
    scalar   a sequence classification model with one label, whose score (`score.weight`) is read at every token. A token has a value.
             A folder of a causal LM gets a score of zeros; an exported folder is read by `AutoModelForSequenceClassification` and by
             the reward `reward_model`.

A scalar head speaks of a token either when it has read all tokens `before` it, as a critic does, who judges the state that the token was
chosen in, so that values stand beside log-probabilities; or when it has read all `through` it, as a reward model does, whose score of a
text is its value at the text's last token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor

from drumroll.algo.loss import Loss
from drumroll.backends.train.shards import RankState
from drumroll.config.models import ParallelConfig, TrainerConfig
from drumroll.types import Batch, RankInfo, Schedule, TopLogp

__all__ = ["Head", "Loss", "Metrics", "RankState", "Reads", "TrainBackend"]

Metrics = dict[str, float]
Head = Literal["lm", "scalar"]
Reads = Literal["before", "through"]


class TrainBackend(ABC):
    """One rank of a trained model."""

    axes: ClassVar[frozenset[str]] = frozenset()
    """Which sizes of `ParallelConfig` it can compute with."""

    def __init__(
        self,
        config: TrainerConfig,
        model_folder: Path,
        dtype: str,
        seed: int,
        *,
        trust_remote_code: bool = False,
        head: Head = "lm",
        reads: Reads = "before",
        parallel: ParallelConfig | None = None,
    ) -> None:
        """`dtype` is what passes compute in (`float32`, `bfloat16`); `reads` is for a scalar head; `parallel` is how the ranks share the
        work, as data-parallel ones otherwise."""
        self.config = config
        self.model_folder = model_folder
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code
        self.seed = seed
        self.head = head
        self.reads = reads
        self.parallel = parallel or ParallelConfig()

    @abstractmethod
    def setup(self, rank: RankInfo) -> None:
        """Collective. Join the other ranks and load the model."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> Tensor:
        """Collective. [T] float32 on the CPU: log-probability of each token under its trajectory's sampling settings, 0 outside
        `loss_mask`. For `lm` heads."""

    @abstractmethod
    def values(self, batch: Batch) -> Tensor:
        """Collective. [T] float32 on the CPU: the head's value of each token, 0 outside `loss_mask`. For `scalar` heads.

        Example: with `reads` = `before`, the value of token 5 is the score at token 4; with `through`, the score at token 5."""

    @abstractmethod
    def top_logprobs(self, batch: Batch, k: int) -> TopLogp:
        """Collective. What a teacher says, on the CPU: the log-probability of each token, and the `k` likeliest in its place with theirs,
        0 outside `loss_mask`. Fewer than `k` where the vocabulary is smaller; none with a `k` of 0. For `lm` heads.

        Log-probabilities are of the whole vocabulary, whatever the sampling left out of it, at the batch's `teacher_temperature`, or at
        the trajectories' own `temperature` where it has none."""

    @abstractmethod
    def given_logprobs(self, batch: Batch) -> Tensor:
        """Collective. [T, K] float32 on the CPU: log-probability of each of `teacher_top_ids` by the same rules as `top_logprobs`, 0
        outside `loss_mask`. For `lm` heads."""

    @abstractmethod
    def train(self, updates: Sequence[Batch], loss: Loss) -> list[Metrics]:
        """Collective. One optimizer update for each batch; every rank passes its shard of each. The loss is given the log-probabilities
        of an `lm` head, or the values of a `scalar` head.

        Over all ranks the weights of a batch sum to 1 (or to 0: then the update is a no-op); the gradient is that of the sum
        over all ranks' tokens of weight × loss, whatever the number of ranks and micro-batches. Trajectories of one of the batch's
        `units`, which no shard splits, are in the same micro-batch. Where a batch has no `old_logp`, the
        log-probabilities of that very pass, without gradient, take its place. Where the loss needs `entropy` (`needs_of` in
        `algo.loss`), the batch that it is given has it, with gradient; so it is with `top_logp`, which is what `given_logprobs` says of
        that pass. An update whose loss or gradient is not finite, on whichever rank, leaves weights, optimizer and schedule of all ranks
        as they were.

        Metrics of each update, the same on every rank: `loss`, `grad_norm` (before clipping), `lr`, `num_tokens`,
        `num_loss_tokens` (in the loss mask), `skipped` (1.0 when nothing was updated), `nonfinite` (1.0 when that was because
        loss or gradient was not finite, rather than for want of weight); and unless there was no weight, as means over the
        loss mask, `entropy` and the loss's own; and its `weighted` ones as sums with the weights. The first update of a policy in RL also
        says how far it is from what was sampled (`mismatch`)."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. Full tensors by their Hugging Face names, in a fixed order, each valid until the next one is asked for.
        Shared tensors appear once, under the name that the model's safetensors file uses; floats come in `dtype`."""

    @abstractmethod
    def snapshot(self, *, alone: bool = False) -> RankState:
        """A copy of this rank's weights, optimizer, schedule, update count and random states in host memory. Of all that saving
        takes, training waits for this alone. What several ranks hold is in the snapshot of one of them; `alone`, in each one's, which can
        then be restored without the others', and which training must wait for: what is in host memory already is no copy."""

    @abstractmethod
    def state_bytes(self) -> int:
        """About how large a snapshot is once the optimizer has its state."""

    @abstractmethod
    def save(self, state: RankState, folder: Path) -> None:
        """Write a snapshot into `folder`, which all ranks share, down to the disk (see `shards`).

        Reads nothing that training changes and waits for no other rank, so any thread may do it while training goes on. The
        state is complete once every rank has returned."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Collective. Go to the state that was saved in `folder`, by ranks of this or another number and layout.

        Training goes on bit for bit as it would have with the same ranks, and to rounding with others. A state that
        is damaged, incomplete or of another model raises `CheckpointError` on every rank and leaves all of them as they were."""

    @abstractmethod
    def restore(self, state: RankState) -> None:
        """Go to a snapshot of this very rank that stands `alone`, taken by it or by the one before it in its place: bit for bit where
        that stood."""

    @abstractmethod
    def begin(self, schedule: Schedule) -> None:
        """Start a phase of training, before its first update: fresh optimizer state, updates counted from 0."""

    @abstractmethod
    def reschedule(self, schedule: Schedule) -> None:
        """Go on in the same phase, from the update where it stands, with another learning rate."""

    @abstractmethod
    def export(self, folder: Path, *, replace: bool = False) -> None:
        """Collective. Rank 0 writes a Hugging Face folder (config, tokenizer, safetensors), whole or not at all.

        A folder that holds something already is refused, or replaced by the new one once that is written."""

    @abstractmethod
    def to(self, where: Literal["device", "host"]) -> None:
        """Move weights, gradients and optimizer state to the device or to host memory."""

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks and free everything."""
