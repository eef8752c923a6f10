"""A stand-in for another package's engine: it counts upwards from the prompt, in this process, and does whatever `RemoteEngine` asks of it.

What packages do themselves is tested with them (`make test-vllm`, `make test-sglang`); this shows what drumroll does around them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar, Literal

from drumroll.backends.infer.remote import Piece, RemoteEngine
from drumroll.backends.infer.request import Request
from drumroll.backends.lent import Lent
from drumroll.config.models import EngineConfig

STEP_S = 0.002


class Counting(RemoteEngine):
    """The next token is the last one plus one, of log-probability minus the number of versions that were taken."""

    package: ClassVar[str] = "Counting"

    def __init__(self, config: EngineConfig, model_folder: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
        super().__init__(config, model_folder, dtype, trust_remote_code=trust_remote_code)
        self.told: list[str] = []
        self.taken: list[dict[str, Any]] = []
        self.died = False
        self._moving = asyncio.Event()

    async def _open(self) -> None:
        if self.model_folder.name == "too-large":
            raise RuntimeError("CUDA out of memory. Tried to allocate 14.2 GiB")
        self._moving.set()

    async def _shut(self) -> None:
        self.told.append("shut")

    def _has_died(self) -> bool:
        return self.died

    async def _generate(self, entry: Request) -> AsyncGenerator[Piece, None]:
        token = entry.tokens[-1]
        while True:
            await asyncio.sleep(STEP_S)
            await self._moving.wait()
            if self.died:
                raise ConnectionError("its process is gone")
            token = token + 1 if token < 40 else 3
            yield Piece([token], [-float(len(self.taken))], "tired" if token == 30 and entry.seed == 30 else "")

    async def _take_weights(self, lent: Lent) -> int:
        import torch

        from drumroll.backends.infer.intake import Intake

        def take() -> dict[str, Any]:
            intake = Intake(lent, 0, torch.device("cpu"))
            found = dict(intake.tensors())
            intake.check("the stand-in")
            return found

        self.taken.append(await asyncio.to_thread(take))
        return 7

    async def _stand_still(self) -> None:
        self._moving.clear()
        self.told.append("stand still")

    async def _go_on(self) -> None:
        self._moving.set()
        self.told.append("go on")

    async def _forget(self) -> None:
        self.told.append("forget")

    async def _release(self) -> None:
        self.told.append("release")

    async def _take_back(self, part: Literal["weights", "cache"]) -> None:
        self.told.append(f"take back {part}")
