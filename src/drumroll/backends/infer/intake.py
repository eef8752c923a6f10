"""Weights as they arrive in a process of another package's engine, out of the memory of the process that feeds it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from drumroll.backends.buckets import Inbox, compare
from drumroll.backends.checksum import begin_checksum, checksums
from drumroll.backends.infer.base import Checksums
from drumroll.backends.lent import Lent


class Intake:
    """One version's tensors, on this process's device.

    intake = Intake(lent, rank, device)
    model.load_weights(intake.tensors())
    intake.check("vLLM's worker 0")
    """

    def __init__(self, lent: Lent, reader: int, device: torch.device) -> None:
        self._lent, self._reader, self._device = lent, reader, device
        self._inbox, self._sums = Inbox(), Checksums()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        source = torch.device("cuda:0" if self._lent.on_device else "cpu")  # the first of the engine's devices, whichever this one is
        for bucket in self._inbox.shared(self._lent, self._reader, source):
            # A package may hold on to a tensor until its layer is complete, which can be after the bucket is filled anew.
            own = [(name, tensor.to(self._device, copy=True)) for name, tensor in bucket]
            sums = checksums([begin_checksum(tensor) for _, tensor in own])
            self._sums.update(zip((name for name, _ in own), sums, strict=True))
            yield from own

    def check(self, where: str) -> None:
        """Raise unless every tensor arrived as it was sent."""
        compare(self._inbox.expected, self._sums, where)
