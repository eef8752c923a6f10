"""An environment worker's end of the line to one engine: one batched submit, one outstanding poll, however many episodes.

    episodes ──generate()──► outbox ──submit, abort──► engine
        ▲                                                │
        └──────futures ◄── chunks joined ◄──poll()───────┘

Nobody waits here for ever: every call has a deadline, and every poll brings the engine's load, from which the client sees
whether an engine that is silent about a reply is paused, busy with others, or late.

`Engines` are all of them together: a reply whose engine is lost goes on at another one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from drumroll.errors import WorkerLost
from drumroll.types import Chunk, EngineLoad, FinishReason, GenRequest, Parcel

Call = Callable[..., Awaitable[Any]]
"""`await call("method", *args, deadline_s=30.0)` on the engine's worker; raises when it fails or takes longer."""

POLL_WAIT_S = 2.0
"""A poll waits this long for chunks, or a quarter of the time after which an engine is late, if that is less."""

CALL_S = 30.0
"""An engine whose process is alive answers a call within this time, beyond what the call is meant to wait."""

MAX_MOVES = 3
"""Engines that one reply may lose before it counts as their fault, or its own."""

REST_S = 5.0
"""An engine that was out of reach is not chosen for this long; one that is lost, not before it has been replaced."""

LAST_CHUNK_S = 2.0
"""How long a request that is aborted waits for its last chunk."""


@dataclass(frozen=True, slots=True)
class EnginePoll(Parcel):
    """What a poll of an engine brings to one of its clients."""

    chunks: list[Chunk]
    """Of the client's own requests."""
    load: EngineLoad


@dataclass(slots=True)
class _Reply:
    """A reply while it arrives."""

    id: str
    stall_s: float
    whole: asyncio.Future[Chunk]
    parts: list[Chunk] = field(default_factory=list)
    heard: float | None = None
    """When there was last news of it, by the client's count of the engine's working seconds; counted from the first poll on."""

    def end(self, finish: FinishReason, error: str = "") -> None:
        if not self.whole.done():
            self.whole.set_result(self.joined(finish, error))

    def joined(self, finish: FinishReason, error: str = "") -> Chunk:
        """What has arrived; the last chunk, if it is there, brings the slot."""
        return replace(_join(self.parts or [Chunk(self.id, [], [], [])]), finish=finish, error=error)


class EngineClient:
    """Generates replies on one engine for many episodes at a time. Example: `await client.generate(request, stall_s=60)`."""

    def __init__(self, call: Call, client_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._client_id = client_id
        self._clock = clock
        self._waiting: dict[str, _Reply] = {}
        self._outbox: dict[str, GenRequest] = {}
        self._unwanted: list[str] = []
        self._sender: asyncio.Task[None] | None = None
        self._poller: asyncio.Task[None] | None = None
        self.is_gone = False
        """Whether the engine is lost for good, and not only out of reach."""
        self._worked_s = 0.0
        """Seconds that the engine was seen at work: not paused, and somebody waiting for it."""
        self._num_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Replies that have not ended."""
        return len(self._waiting)

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
        """The whole reply as one chunk.

        It ends as `deadline` when the engine, at work, has no news of it for `stall_s`, and as `lost` when the engine is out of
        reach. A caller that is cancelled gets what was sampled so far as an `aborted` reply, after `LAST_CHUNK_S` at most.
        Whenever a reply ends early, its request leaves the engine.
        """
        reply = _Reply(request.id, stall_s, asyncio.get_running_loop().create_future())
        self._waiting[request.id] = reply
        self._outbox[request.id] = request
        self._send_soon()
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll_while_needed())
        try:
            return await asyncio.shield(reply.whole)
        except asyncio.CancelledError:
            if self._outbox.pop(request.id, None) is None:  # it is in the engine
                self._withdraw(reply)
                await asyncio.wait({reply.whole}, timeout=LAST_CHUNK_S)
            return reply.joined("aborted")
        finally:
            del self._waiting[request.id]

    def _withdraw(self, reply: _Reply) -> None:
        """Have the engine drop a request. Not awaited: an engine that does not answer holds nobody up."""
        self._unwanted.append(reply.id)
        self._send_soon()

    def _send_soon(self) -> None:
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Pass on what has gathered in this turn of the event loop, and again while more arrives meanwhile."""
        await asyncio.sleep(0)
        while self._outbox or self._unwanted:
            try:
                if self._outbox:
                    requests, self._outbox = list(self._outbox.values()), {}
                    await self._call("submit", self._client_id, requests, deadline_s=CALL_S)
                if self._unwanted:
                    unwanted, self._unwanted = self._unwanted, []
                    await self._call("abort", self._client_id, unwanted, deadline_s=CALL_S)
            except Exception as error:  # whatever it is, the engine is out of reach
                self._fail_all(error)
        self._sender = None

    async def _poll_while_needed(self) -> None:
        """Wait for chunks as long as somebody waits for a reply."""
        try:
            polled_at = self._clock()
            while self._waiting:
                wait_s = min(POLL_WAIT_S, *(reply.stall_s / 4 for reply in self._waiting.values()))
                answer: EnginePoll = await self._call("poll", self._client_id, wait_s, deadline_s=wait_s + CALL_S)
                now = self._clock()
                if not answer.load.paused:
                    self._worked_s += now - polled_at
                polled_at = now
                for chunk in answer.chunks:
                    self._deliver(chunk)
                self._notice_silence(answer.load)
        except Exception as error:  # whatever it is, the engine is out of reach
            self._fail_all(error)
        finally:
            self._poller = None

    def _deliver(self, chunk: Chunk) -> None:
        reply = self._waiting.get(chunk.id)
        if reply is None:
            return
        reply.parts.append(chunk)
        reply.heard = self._worked_s
        if chunk.finish is not None:
            reply.end(chunk.finish, chunk.error)

    def _notice_silence(self, load: EngineLoad) -> None:
        """End the replies that the engine is late with. One of which nothing has come yet may be waiting for a slot: while the
        engine gives tokens to others, it is busy and not late."""
        progressed, self._num_tokens = load.num_tokens_total != self._num_tokens, load.num_tokens_total
        for reply in self._waiting.values():
            if reply.heard is None or (progressed and not reply.parts):
                reply.heard = self._worked_s
            elif self._worked_s - reply.heard > reply.stall_s and not reply.whole.done():
                reply.end("deadline", f"the engine was at work and gave no token of the reply for {reply.stall_s:g} s")
                self._withdraw(reply)

    def _fail_all(self, error: Exception) -> None:
        """Nobody waits for an engine that is out of reach; should it come back, the requests are not wanted any more."""
        self.is_gone = self.is_gone or isinstance(error, WorkerLost)
        for reply in self._waiting.values():
            if not reply.whole.done():
                reply.end("lost", f"it did not answer: {error}")
                self._withdraw(reply)
        self._outbox.clear()


class Engines:
    """The engines of a run as one environment worker sees them. Example: `await engines[3].generate(request, stall_s=60)`.

    A reply whose engine is lost goes on at the least busy of the others, from the tokens that have arrived; where there is no other, it
    waits for one to come back. Where replies must be repeatable to the last bit, it begins anew.
    """

    def __init__(self, clients: Sequence[EngineClient], *, goes_on: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._clients = list(clients)
        self._goes_on = goes_on
        self._clock = clock
        self._resting_until = [0.0] * len(self._clients)
        self._returned = asyncio.Event()

    def __getitem__(self, rank: int) -> _Seat:
        return _Seat(self, rank)

    def replace(self, rank: int, client: EngineClient) -> None:
        """The engine of this rank is another one from now on, and serves."""
        self._clients[rank] = client
        self._resting_until[rank] = 0.0
        self._returned.set()

    async def generate(self, request: GenRequest, stall_s: float, rank: int) -> Chunk:
        """As `EngineClient.generate`, beginning at the engine `rank` if that can be reached."""
        parts: list[Chunk] = []
        num_lost = 0
        if self._resting_until[rank] > self._clock():
            rank = await self._another()
        while True:
            sampled = [*request.sampled, *(token for part in parts for token in part.token_ids)]
            chunk = await self._clients[rank].generate(replace(request, sampled=sampled), stall_s)
            if self._goes_on or chunk.finish != "lost":
                parts.append(chunk)
            if chunk.finish != "lost" or num_lost == MAX_MOVES:
                return _join(parts or [chunk])
            num_lost += 1
            self._resting_until[rank] = math.inf if self._clients[rank].is_gone else self._clock() + REST_S
            try:
                rank = await self._another()
            except asyncio.CancelledError:
                return replace(_join(parts or [chunk]), finish="aborted")

    async def _another(self) -> int:
        """An engine that is not known to be out of reach, as soon as there is one."""
        while True:
            now = self._clock()
            ready = [rank for rank, until in enumerate(self._resting_until) if until <= now]
            if ready:
                return min(ready, key=lambda rank: (self._clients[rank].num_waiting, rank))
            self._returned.clear()
            first = min(self._resting_until)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if first == math.inf else first - now):
                    await self._returned.wait()


@dataclass(frozen=True, slots=True)
class _Seat:
    """One of the engines, for an episode that was given it."""

    engines: Engines
    rank: int

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
        return await self.engines.generate(request, stall_s, self.rank)


def _join(parts: Sequence[Chunk]) -> Chunk:
    """A reply from its parts; how it ended is for the last one to say."""
    return replace(
        parts[-1],
        token_ids=[token for part in parts for token in part.token_ids],
        logp=[value for part in parts for value in part.logp],
        token_version=[version for part in parts for version in part.token_version],
    )
