"""A rank's training state as an object for Ray's store: plain arrays, which travel and lie there without being copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumroll.backends.train.shards import Extent, RankState
from drumroll.types import Schedule


class Packed(NamedTuple):
    """A tensor as bytes: arrays know fewer kinds of numbers."""

    data: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        return cls(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.data.copy()).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Memory:
    """See `RankState`, whose fields these are."""

    pieces: list[tuple[Extent, Packed]]
    schedule: Schedule | None
    update: int
    rng: dict[str, Packed]

    @classmethod
    def of(cls, state: RankState) -> Memory:
        pieces = [(extent, Packed.of(tensor)) for extent, tensor in state.pieces]
        return cls(pieces, state.schedule, state.update, {name: Packed.of(tensor) for name, tensor in state.rng.items()})

    def state(self) -> RankState:
        pieces = [(extent, packed.tensor()) for extent, packed in self.pieces]
        return RankState(pieces, self.schedule, self.update, {name: packed.tensor() for name, packed in self.rng.items()})
