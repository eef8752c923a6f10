"""A trainer and an engine of three tensors for test_cluster.py: importable by the processes that host them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from drumroll.backends.checksum import checksum
from drumroll.backends.infer.base import Bucket
from drumroll.cluster.transport import ReceivesWeights, SendsWeights
from drumroll.types import RankInfo, Version


def tensors(version: int) -> dict[str, Tensor]:
    torch.manual_seed(version)
    return {
        "embed.weight": torch.randn(50, 8),
        "layer.weight": torch.randn(8, 8).to(torch.bfloat16),
        "scale": torch.tensor(1.5 + version),
    }


class TrainBackend:
    def __init__(self) -> None:
        self.version = 0
        self.fault = ""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors(self.version).items():
            if self.fault == "raise":
                raise RuntimeError("the gather failed")
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            buffer = tensor.clone()
            yield name, buffer
            buffer.zero_()  # valid only until the next one is asked for


class InferBackend:
    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.paused = False
        self.corrupt = ""
        self.fault = ""

    async def update(self, version: Version, buckets: Iterator[Bucket], cache: str) -> dict[str, int]:
        return await asyncio.to_thread(self.take, buckets)

    def take(self, buckets: Iterator[Bucket]) -> dict[str, int]:
        sums = {}
        for bucket in buckets:
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raise":
                raise RuntimeError("no room for these weights")
            for name, tensor in bucket:
                if name == self.corrupt:
                    tensor.view(-1)[0] += 1
                self.weights[name] = tensor.clone()
                sums[name] = checksum(tensor)
        return sums

    async def take_peak_bytes(self) -> int:
        return 0

    async def pause(self) -> None:
        self.paused = True


class Trainer(SendsWeights):
    def __init__(self, rank: RankInfo) -> None:
        self.rank = rank
        self.backend = TrainBackend()

    def set(self, **values: Any) -> None:
        vars(self.backend).update(values)

    async def num_segments(self) -> int:
        """Shared memory that this process holds."""
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found += "drumroll-weights" in os.readlink(f"/proc/self/fd/{fd}")
        return found


class Engine(ReceivesWeights):
    def __init__(self, rank: RankInfo) -> None:
        self.rank = rank
        self.backend = InferBackend()

    def set(self, **values: Any) -> None:
        vars(self.backend).update(values)

    def matches(self, version: int) -> bool:
        sent = tensors(version)
        return list(self.backend.weights) == list(sent) and all(torch.equal(self.backend.weights[name], sent[name]) for name in sent)

    def paused(self) -> bool:
        return self.backend.paused
