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


class Order:
    """An endless order of rows in equal-sized updates: epochs are shuffled anew, and their ends are not cut short.

    Update u is a function of the seed, the name and u alone."""

    def __init__(self, num_rows: int, batch_size: int, seed: int, name: str) -> None:
        self._num_rows = num_rows
        self._batch_size = min(batch_size, num_rows)
        self._seed = seed
        self._name = name
        self._epoch: tuple[int, list[int]] = (-1, [])
        """The epoch that was asked for last, and its order."""

    def places(self, update: int) -> list[int]:
        """Numbers of the rows of one update."""
        first = update * self._batch_size
        return [self._place(position) for position in range(first, first + self._batch_size)]

    def _place(self, position: int) -> int:
        epoch, place = divmod(position, self._num_rows)
        if self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(sample_seed(self._seed, self._name, epoch))
            self._epoch = (epoch, torch.randperm(self._num_rows, generator=generator).tolist())
        return self._epoch[1][place]


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
        teacher_temperature: float | None = None,
    ) -> None:
        """`teacher_temperature` is there where a teacher says something of them, too."""
        self._renderer = Renderer(Tokenizer(Path(model_folder), trust_remote_code=trust_remote_code))
        self._end_token = end_token
        self._teacher_temperature = teacher_temperature
        self._episodes = self._encode(source, completion_field)
        self._heldout = self._encode(heldout, completion_field) if heldout else []
        self._order = Order(len(self._episodes), batch_size, seed, "demonstrations")

    def update(self, number: int) -> Batch:
        """The demonstrations of one update."""
        return self._batch([self._episodes[place] for place in self._order.places(number)])

    def heldout(self) -> Batch:
        return self._batch(self._heldout)

    def _batch(self, episodes: list[Episode]) -> Batch:
        batch = pack_episodes(episodes)
        if self._teacher_temperature is not None:
            batch = batch.with_fields(teacher_temperature=torch.full_like(batch.temperature, self._teacher_temperature))
        return batch.with_fields(weight=token_weights(batch, "token_mean", None))

    def _encode(self, source: dict[str, Any], completion_field: str) -> list[Episode]:
        return [self._episode(shown) for shown in load_demonstrations(SourceConfig.model_validate(source), completion_field)]

    def _episode(self, shown: Demonstration) -> Episode:
        """As it was sampled, where the row has the tokens of this very tokenizer; from its text otherwise."""
        if shown.tokens is not None and shown.tokenizer == self._renderer.tokenizer.fingerprint:
            return shown.tokens
        return episode_ids(self._renderer, shown.exchanges, end_token=self._end_token)
