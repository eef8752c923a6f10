"""An environment worker's end of the line to one engine: one batched submit, one outstanding poll, however many episodes.

episodes ──generate()──► outbox ──submit(batch)──► engine
    ▲                                                │
    └──────futures ◄── chunks joined ◄──poll()───────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from drumroll.errors import RolloutError
from drumroll.types import Chunk, GenRequest

Call = Callable[..., Awaitable[Any]]
"""`await call("method", *args)` on the engine's worker."""


class EngineClient:
    """Generates replies on one engine for many episodes at a time."""

    def __init__(self, call: Call, client_id: str, poll_wait_s: float = 2.0) -> None:
        self._call = call
        self._client_id = client_id
        self._poll_wait_s = poll_wait_s
        self._outbox: list[GenRequest] = []
        self._waiting: dict[str, asyncio.Future[Chunk]] = {}
        self._partial: dict[str, list[Chunk]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._flush: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenRequest) -> Chunk:
        """The whole reply as one chunk. Cancelling the caller aborts the request on the engine."""
        future: asyncio.Future[Chunk] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._outbox.append(request)
        if self._flush is None:
            self._flush = asyncio.create_task(self._submit_outbox())
        if self._pump is None:
            self._pump = asyncio.create_task(self._poll_while_needed())
        try:
            return await future
        except asyncio.CancelledError:
            self._outbox = [waiting for waiting in self._outbox if waiting.id != request.id]
            # Not awaited: an engine that does not answer must not hold the caller, whose time is up.
            abort = asyncio.create_task(self._abort(request.id))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise
        finally:
            self._waiting.pop(request.id, None)
            self._partial.pop(request.id, None)

    async def _abort(self, request_id: str) -> None:
        with suppress(Exception):  # an engine that is gone has nothing to abort
            await self._call("abort", self._client_id, [request_id])

    async def _submit_outbox(self) -> None:
        """Submit what has gathered in this turn of the event loop, and again while more arrives meanwhile."""
        await asyncio.sleep(0)
        try:
            while self._outbox:
                batch, self._outbox = self._outbox, []
                await self._call("submit", self._client_id, batch)
        except Exception as error:
            self._fail_all(error)
        finally:
            self._flush = None

    async def _poll_while_needed(self) -> None:
        """Wait for chunks as long as somebody waits for a reply."""
        try:
            while self._waiting:
                for chunk in await self._call("poll", self._client_id, self._poll_wait_s):
                    self._deliver(chunk)
        except Exception as error:
            self._fail_all(error)
        finally:
            self._pump = None

    def _deliver(self, chunk: Chunk) -> None:
        future = self._waiting.get(chunk.id)
        if future is None or future.done():
            return
        parts = self._partial.setdefault(chunk.id, [])
        parts.append(chunk)
        if chunk.finish is not None:
            future.set_result(
                Chunk(
                    id=chunk.id,
                    token_ids=[token for part in parts for token in part.token_ids],
                    logp=[value for part in parts for value in part.logp],
                    token_version=[version for part in parts for version in part.token_version],
                    finish=chunk.finish,
                    error=chunk.error,
                )
            )

    def _fail_all(self, error: Exception) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RolloutError(f"the engine did not answer: {error}"))
