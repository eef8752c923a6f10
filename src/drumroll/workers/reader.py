"""Who sends engines their weights where nobody trains: a reader of the model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from drumroll.cluster.transport import SendsWeights
from drumroll.models.loading import as_in_files, check_complete, load_model
from drumroll.types import RankInfo


class ReaderWorker(SendsWeights):
    """Stands where a trainer stands in a sync."""

    def __init__(self, rank: RankInfo, *, model_folder: str, dtype: str, trust_remote_code: bool = False) -> None:
        self.rank = rank
        self.backend = FolderWeights(Path(model_folder), dtype, trust_remote_code=trust_remote_code)


class FolderWeights:
    """What a model's folder holds, read anew each time it is asked for: it is sent once, and again to engines that were replaced."""

    def __init__(self, folder: Path, dtype: str, *, trust_remote_code: bool) -> None:
        self._folder = folder
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._trust_remote_code = trust_remote_code

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        model, missing = load_model(self._folder, "lm", trust_remote_code=self._trust_remote_code, dtype=self._dtype)
        check_complete(self._folder, missing)
        yield from as_in_files(model, {name: parameter.detach() for name, parameter in model.named_parameters()}).items()
