"""Demonstrations as batches: an endless, seeded order of equal-sized updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drumroll.algo.aggregate import token_weights
from drumroll.config.models import SourceConfig
from drumroll.data.tasks import Demonstration, load_demonstrations
from drumroll.text.chat import chat_demonstration_ids
from drumroll.text.packing import pack_demonstrations
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Batch, sample_seed

Pair = tuple[list[int], list[int]]
"""Tokens of the prompt, tokens of the completion."""


class Demonstrations:
    """Encodes every demonstration once. Update u is a function of the seed and u alone."""

    def __init__(
        self,
        *,
        model_folder: str,
        source: dict[str, Any],
        completion_field: str,
        batch_size: int,
        seed: int,
        heldout: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._tokenizer = Tokenizer(Path(model_folder), trust_remote_code=trust_remote_code)
        self._pairs = self._encode(source, completion_field)
        self._heldout = self._encode(heldout, completion_field) if heldout else []
        self._batch_size = min(batch_size, len(self._pairs))
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])
        """The epoch that was asked for last, and its order."""

    def update(self, number: int) -> Batch:
        """The demonstrations of one update: epochs are shuffled anew, and their ends are not cut short."""
        first = number * self._batch_size
        return self._batch([self._pairs[self._place(position)] for position in range(first, first + self._batch_size)])

    def heldout(self) -> Batch:
        return self._batch(self._heldout)

    def _place(self, position: int) -> int:
        epoch, place = divmod(position, len(self._pairs))
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(sample_seed(self._seed, "demonstrations", epoch))
            self._order = (epoch, torch.randperm(len(self._pairs), generator=generator).tolist())
        return self._order[1][place]

    def _batch(self, pairs: list[Pair]) -> Batch:
        batch = pack_demonstrations(pairs)
        return batch.with_fields(weight=token_weights(batch, "token_mean", None))

    def _encode(self, source: dict[str, Any], completion_field: str) -> list[Pair]:
        return [self._pair(shown) for shown in load_demonstrations(SourceConfig.model_validate(source), completion_field)]

    def _pair(self, shown: Demonstration) -> Pair:
        if shown.messages is not None:
            return chat_demonstration_ids(self._tokenizer, shown.messages, shown.completion)
        return self._tokenizer.encode_demonstration(shown.prompt or "", shown.completion)
