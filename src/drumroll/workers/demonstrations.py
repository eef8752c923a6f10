"""Demonstrations as batches: an endless, seeded order of equal-sized updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drumroll.algo.aggregate import token_weights
from drumroll.config.models import SourceConfig
from drumroll.data.tasks import Demonstration, load_demonstrations
from drumroll.text.episode import episode_ids
from drumroll.text.packing import pack_episodes
from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Batch, sample_seed

Episode = tuple[Sequence[int], Sequence[bool]]
"""Token ids, and where the loss is."""


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
        end_token: bool = True,
        trust_remote_code: bool = False,
    ) -> None:
        self._renderer = Renderer(Tokenizer(Path(model_folder), trust_remote_code=trust_remote_code))
        self._end_token = end_token
        self._episodes = self._encode(source, completion_field)
        self._heldout = self._encode(heldout, completion_field) if heldout else []
        self._batch_size = min(batch_size, len(self._episodes))
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])
        """The epoch that was asked for last, and its order."""

    def update(self, number: int) -> Batch:
        """The demonstrations of one update: epochs are shuffled anew, and their ends are not cut short."""
        first = number * self._batch_size
        return self._batch([self._episodes[self._place(position)] for position in range(first, first + self._batch_size)])

    def heldout(self) -> Batch:
        return self._batch(self._heldout)

    def _place(self, position: int) -> int:
        epoch, place = divmod(position, len(self._episodes))
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(sample_seed(self._seed, "demonstrations", epoch))
            self._order = (epoch, torch.randperm(len(self._episodes), generator=generator).tolist())
        return self._order[1][place]

    def _batch(self, episodes: list[Episode]) -> Batch:
        batch = pack_episodes(episodes)
        return batch.with_fields(weight=token_weights(batch, "token_mean", None))

    def _encode(self, source: dict[str, Any], completion_field: str) -> list[Episode]:
        return [self._episode(shown) for shown in load_demonstrations(SourceConfig.model_validate(source), completion_field)]

    def _episode(self, shown: Demonstration) -> Episode:
        """As it was sampled, where the row has the tokens of this very tokenizer; from its text otherwise."""
        if shown.tokens is not None and shown.tokenizer == self._renderer.tokenizer.fingerprint:
            return shown.tokens
        return episode_ids(self._renderer, shown.exchanges, end_token=self._end_token)
