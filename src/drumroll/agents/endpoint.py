"""The policy behind an OpenAI-compatible URL, for agents in processes of their own.

    agent ── POST /v1/chat/completions ──► session of its key ── tokens ──► engine
          ◄─ completion, or a stream ────  (every call recorded)  ◄──────── tokens, log-probabilities, versions
          ── POST /v1/reward ────────────► the verdict

A key is one session, a session is one sample's episode (see `sessions`), and a key reaches nothing else. What an agent asks for:

- `messages`, `tools`, `tool_choice` (auto, none) and `stream` are served. `model` may be anything: the policy answers.
- `max_tokens`, `max_completion_tokens`: the smallest of these and the session's own budgets counts. `stop` adds to the session's.
- `temperature` and `top_p` are ignored, because the policy learns from what it samples with the run's own settings; `obeys_sampling`
  obeys them, and what they change is not trained on. `seed` and penalties are ignored.
- More than one choice, log-probabilities, formats other than text, and a tool that must be called are refused (400).

A client that goes away takes its request out of the engine. An engine that fails answers 503, and the session never trains.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from drumroll.agents.protocol import ChatRequest, Envelope, Refusal, Reply, make_reply, model_list, read_chat, read_reward
from drumroll.agents.sessions import Call, Failure, Order, Session, SessionLimits, SessionResult
from drumroll.errors import UserError
from drumroll.registry import require
from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, GenRequest

require("aiohttp", extra="agents")

if TYPE_CHECKING:
    from aiohttp import web

BODY_BYTES = 8 * 2**20
"""The longest request."""

GRACE_S = 5.0
"""How long calls under way may take to leave the engine when their session is closed."""


class Engine(Protocol):
    """Where replies come from: the whole reply as one chunk. A caller that is cancelled takes its request out of the engine."""

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk: ...


@dataclass(eq=False)
class _Open:
    """A session that agents can reach."""

    key: str
    session: Session
    engine: Engine
    turns: asyncio.Semaphore
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the session has ended or failed."""
    sampling: set[asyncio.Task[Reply | None]] = field(default_factory=set)


class Endpoint:
    """A server for many sessions at a time, in one event loop.

    Example: `endpoint = Endpoint(tokenizer)`, `await endpoint.start()`, `key = endpoint.open_session(lease, engine, limits)`; the agent
    gets `endpoint.base_url` and `key`; then `result = await endpoint.close_session(key)`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "policy",
        body_bytes: int = BODY_BYTES,
        keeps_cache: bool = True,
    ) -> None:
        """`tokenizer` has a chat template. `host` is the address to listen on, for this machine alone unless told otherwise; port 0 is
        any free one. `model` is the name that agents see. With `keeps_cache` engines may keep a session's keys and values from call to
        call."""
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._host = host
        self._port = port
        self._model = model
        self._body_bytes = body_bytes
        self._keeps_cache = keeps_cache
        self._sessions: dict[bytes, _Open] = {}
        """By the digest of the key: how long a lookup takes says nothing about keys."""
        self._runner: web.AppRunner | None = None
        self._handlers: dict[tuple[str, str], Callable[[web.Request, _Open], Awaitable[web.StreamResponse]]] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/reward"): self._reward,
            ("GET", "/v1/models"): self._models,
        }

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its `base_url`; known once the endpoint has started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Listen. The port is open when this returns."""
        from aiohttp import web

        app = web.Application(client_max_size=self._body_bytes)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening; calls under way end."""
        for opened in tuple(self._sessions.values()):
            await self.close_session(opened.key, Failure("aborted", "the endpoint was closed"))
        if self._runner is not None:
            await self._runner.cleanup()

    def open_session(
        self,
        order: Order,
        engine: Engine,
        limits: SessionLimits,
        *,
        is_judged: bool = False,
        obeys_sampling: bool = False,
        rank: int = -1,
    ) -> str:
        """A new session; its key. `is_judged`: reward functions follow, and the agent need not post a reward. `obeys_sampling`: an agent's
        own temperature and top_p count. `rank` is the environment worker's."""
        key = f"drumroll-{secrets.token_urlsafe(32)}"
        session = Session(order, limits, is_judged=is_judged, obeys_sampling=obeys_sampling, rank=rank)
        self._sessions[_digest(key)] = _Open(key, session, engine, asyncio.Semaphore(limits.max_parallel))
        return key

    async def session_over(self, key: str) -> None:
        """Returns when the agent has posted its last reward, or the session has failed."""
        await self._find(key).over.wait()

    async def close_session(self, key: str, failure: Failure | None = None) -> SessionResult:
        """End a session: its key opens nothing any more, and what it waits for leaves the engine. `failure` is why it gives no verdict,
        where its owner knows a reason."""
        opened = self._find(key)
        del self._sessions[_digest(key)]
        opened.session.ended = True
        opened.over.set()
        for task in opened.sampling:
            task.cancel()
        if opened.sampling:
            await asyncio.wait(opened.sampling, timeout=GRACE_S)
        return opened.session.result(failure)

    def _find(self, key: str) -> _Open:
        opened = self._sessions.get(_digest(key))
        if opened is None or not secrets.compare_digest(opened.key.encode(), _bytes(key)):
            raise Refusal(401, "invalid_api_key", "this key opens no session: it is unknown, or its session has ended.")
        return opened

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Every request, and every error."""
        from aiohttp import web

        opened: _Open | None = None
        try:
            handler = self._handlers.get((request.method, request.path))
            if handler is None:
                known = ", ".join(" ".join(route) for route in self._handlers)
                raise Refusal(404, "unknown_url", f"{request.method} {request.path} is not served here. Known: {known}.")
            opened = self._find(request.headers.get("Authorization", "").removeprefix("Bearer "))
            opened.session.check_open()
            return await handler(request, opened)
        except Refusal as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = Refusal(413, "request_too_large", f"the request is longer than {self._body_bytes} bytes.")
        except Exception as error:  # the boundary: whatever it is, the server stays up
            refusal = self._mistake(opened, error)
        if opened is not None:
            opened.session.note_refusal(refusal)
        # The same request gets the same error again: clients that repeat requests by themselves need not.
        return web.json_response(refusal.body, status=refusal.status, headers={"x-should-retry": "false"})

    async def _models(self, request: web.Request, opened: _Open) -> web.StreamResponse:
        from aiohttp import web

        return web.json_response(model_list(self._model))

    async def _reward(self, request: web.Request, opened: _Open) -> web.StreamResponse:
        from aiohttp import web

        opened.session.post(read_reward(await request.read()))
        if opened.session.ended:
            opened.over.set()
            for task in opened.sampling:
                task.cancel()
        return web.json_response({"reward": opened.session.reward, "done": opened.session.ended})

    async def _chat(self, request: web.Request, opened: _Open) -> web.StreamResponse:
        from aiohttp import web

        async with opened.turns:  # before its body is read: what waits takes no memory
            body = await request.read()
            chat = await asyncio.to_thread(read_chat, body)
            try:
                prompt = await asyncio.to_thread(opened.session.compose, chat, self._tokenizer)
            except UserError as error:  # the chat template or the tokenizer refuses what the messages say
                raise Refusal(400, "invalid_messages", str(error), "messages") from None
            call = opened.session.begin(prompt, chat)
            envelope = Envelope(f"chatcmpl-{call.name}", self._model, len(prompt.ids), 0)
            sampling = asyncio.create_task(self._sample(opened, call, prompt.ids, chat))
            opened.sampling.add(sampling)
            sampling.add_done_callback(opened.sampling.discard)
            try:
                if chat.stream:
                    return await self._stream(request, opened, call, sampling, envelope, chat.include_usage)
                reply = await self._reply(opened, sampling)
                return web.json_response(_sized(envelope, call).completion(reply))
            finally:
                sampling.cancel()  # where the client has gone away; otherwise it is done

    async def _sample(self, opened: _Open, call: Call, prompt_ids: list[int], chat: ChatRequest) -> Reply | None:
        """Have the engine answer a call, and record what it gave; None where that is no reply. It ends in good order when cancelled."""
        order = opened.session.order
        request = GenRequest(
            id=f"{order.sample_id}/{order.attempt}/{call.number}",
            token_ids=prompt_ids,
            sampling=call.sampling,
            seed=call.seed,
            deadline_s=order.deadline_s,
            session=f"{order.sample_id}/{order.attempt}" if self._keeps_cache else "",
        )
        try:
            chunk = await opened.engine.generate(request, order.stall_s)
        except asyncio.CancelledError:
            chunk = Chunk(request.id, [], [], [], "aborted")
        except Exception as error:  # engines may raise anything
            chunk = Chunk(request.id, [], [], [], "error", f"{type(error).__name__}: {error}")
        text = self._renderer.reply_text(chunk.token_ids, call.sampling.stop, prompt_ids)
        reply = make_reply(text, reads_calls=chat.reads_calls, cut=chunk.finish == "length", name=call.name)
        opened.session.finish(call, chunk, reply, text)
        if call.answered:
            return reply
        own = asyncio.current_task()
        if chunk.finish != "aborted" or own is None or not own.cancelling():
            self._fail(opened, _engine_failure(chunk))
        return None

    async def _stream(
        self,
        request: web.Request,
        opened: _Open,
        call: Call,
        sampling: asyncio.Task[Reply | None],
        envelope: Envelope,
        include_usage: bool,
    ) -> web.StreamResponse:
        """The reply as server-sent events. The first one goes out at once, so that an error behind it is an event, too."""
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await response.write(_event(envelope.opening()))
            try:
                reply = await self._reply(opened, sampling)
            except Refusal as refusal:
                opened.session.note_refusal(refusal)
                await response.write(_event(refusal.body))
            else:
                for event in _sized(envelope, call).events(reply, include_usage):
                    await response.write(_event(event))
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:  # the client has read as much as it wanted
            pass
        return response

    async def _reply(self, opened: _Open, sampling: asyncio.Task[Reply | None]) -> Reply:
        """The reply of a call under way; a `Refusal` where there is none."""
        await asyncio.wait({sampling})
        error = None if sampling.cancelled() else sampling.exception()
        if error is not None:
            raise self._mistake(opened, error)
        reply = None if sampling.cancelled() else sampling.result()
        if reply is not None:
            return reply
        failure = opened.session.failure
        if failure is not None:
            raise Refusal(503, "engine_failed", f"no reply from the policy: {failure.reason}")
        raise Refusal(401, "session_ended", "the session of this key has ended.")

    def _mistake(self, opened: _Open | None, error: BaseException) -> Refusal:
        """This program failed, which must not look like a mistake of the agent's."""
        reason = f"{type(error).__name__}: {error}"
        if opened is not None:
            self._fail(opened, Failure("failed", f"{reason}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"))
        return Refusal(500, "internal_error", reason)

    def _fail(self, opened: _Open, failure: Failure) -> None:
        opened.session.fail(failure)
        opened.over.set()


def _engine_failure(chunk: Chunk) -> Failure:
    if chunk.finish == "deadline":
        return Failure("deadline", chunk.error or "the engine gave the reply up", "engine")
    if chunk.finish == "aborted":
        return Failure("aborted", "the engine dropped the reply", "engine")
    return Failure("failed", f"no reply from the engine: {chunk.error}", "engine")


def _sized(envelope: Envelope, call: Call) -> Envelope:
    return Envelope(envelope.id, envelope.model, envelope.num_prompt_tokens, len(call.reply_ids))


def _event(content: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def _digest(key: str) -> bytes:
    return hashlib.sha256(_bytes(key)).digest()


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # as aiohttp decodes headers
