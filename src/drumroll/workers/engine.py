"""The `actor_infer` role: one engine, shared by many clients."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumroll.backends.infer.base import InferBackend
from drumroll.cluster.transport import ReceivesWeights
from drumroll.config.models import EngineConfig
from drumroll.registry import REGISTRY
from drumroll.rollout.engine_client import EnginePoll
from drumroll.types import Chunk, EngineLoad, GenRequest, RankInfo, Sampling

NEWS_S = 0.5
"""Clients hear of replies that go on at least this often, and so can tell a long one from an engine that hangs."""


WATCH = "watch"
"""The client that asks for a token to see whether there is one."""
PULSE_S = 0.1
"""How often it looks."""


class EngineWorker(ReceivesWeights):
    """Routes requests of several clients to one backend and its chunks back to whoever asked."""

    def __init__(self, rank: RankInfo, *, engine: dict[str, Any], model_folder: str, dtype: str, trust_remote_code: bool = False) -> None:
        entry = REGISTRY.lookup("infer_backend", engine["kind"])
        config = entry.schema(EngineConfig).model_validate(engine)
        self.rank = rank
        self.backend: InferBackend = entry.target(config, Path(model_folder), dtype, trust_remote_code=trust_remote_code)
        self.backend.setup(rank)
        self._owner: dict[str, tuple[str, str]] = {}
        """Backend's request id → (client, the client's own id)."""
        self._inbox: dict[str, list[Chunk]] = defaultdict(list)
        self._news: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._pump: asyncio.Task[None] | None = None

    async def submit(self, client: str, requests: Sequence[GenRequest]) -> None:
        renamed = [replace(request, id=uuid.uuid4().hex) for request in requests]
        self._owner.update({new.id: (client, old.id) for new, old in zip(renamed, requests, strict=True)})
        self.backend.submit(renamed)
        if self._pump is None:
            self._pump = asyncio.create_task(self._route())

    async def poll(self, client: str, wait_s: float) -> EnginePoll:
        """The client's chunks since its last poll, and the engine's load; waits for the first chunk up to `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news[client].wait()
        except TimeoutError:
            pass
        if self._pump is not None and self._pump.done():
            await self._pump  # raises what broke the engine
        self._news[client].clear()
        return EnginePoll(self._inbox.pop(client, []), self.backend.load())

    async def abort(self, client: str, ids: Sequence[str]) -> None:
        wanted = {(client, request_id) for request_id in ids}
        self.backend.abort([own for own, owner in self._owner.items() if owner in wanted])

    async def _route(self) -> None:
        """Pass chunks on for as long as the engine lives. A failure wakes every client, whose poll then raises it."""
        try:
            while True:
                for chunk in await self.backend.poll(NEWS_S):
                    client, own_id = self._owner[chunk.id]
                    if chunk.finish is not None:
                        del self._owner[chunk.id]
                    self._inbox[client].append(replace(chunk, id=own_id))
                    self._news[client].set()
        finally:
            for event in self._news.values():
                event.set()

    async def pulse(self) -> None:
        """Returns once the engine is seen to get on with its work: it gives a token, of somebody's reply or of one that is asked for here
        because nobody waits for any. One that may not compute has nothing to show. Raises what broke the engine."""
        before = self.backend.load().num_tokens_total
        while True:
            if self._pump is not None and self._pump.done():
                await self._pump
            load = self.backend.load()
            if load.paused or load.num_tokens_total != before:
                return
            if not load.num_running and not load.num_waiting:
                await self.submit(WATCH, [GenRequest("pulse", [0], Sampling(max_new_tokens=1), seed=0)])
            await asyncio.sleep(PULSE_S)
            self._inbox.pop(WATCH, None)

    async def pause(self) -> None:
        await self.backend.pause()

    async def resume(self) -> None:
        await self.backend.resume()

    async def sleep(self) -> None:
        await self.backend.sleep()

    async def wake(self) -> None:
        await self.backend.wake()

    async def load(self) -> EngineLoad:
        return self.backend.load()

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        await self.backend.close()
