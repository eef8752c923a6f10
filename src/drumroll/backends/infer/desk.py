"""An engine's front desk: requests come in, tokens go out, between the caller's event loop and the thread that computes.

event loop                                  compute thread
accept ── refused ones end here ──────────▶ works on `open`, under `changed`
poll ◀── fresh tokens, last chunks ───────┘ finish, stop
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drumroll.backends.infer.request import Request
from drumroll.errors import ConfigError
from drumroll.types import Chunk, FinishReason, GenRequest


@dataclass(frozen=True)
class Limits:
    """What the model can be asked."""

    context: int
    """Tokens of a prompt and its reply together."""
    vocab_size: int
    end_ids: frozenset[int]
    """Tokens that end any reply."""


def limits_of(config: Any, generation_config: Any, context_tokens: int | None, folder: Path) -> Limits:
    """Of a model's configs; `context_tokens` is what the user asks for."""
    text = config.get_text_config()
    longest: int | None = getattr(text, "max_position_embeddings", None)
    return limits_from(
        longest, text.vocab_size, [text.eos_token_id, getattr(generation_config, "eos_token_id", None)], context_tokens, folder
    )


def limits_from(
    longest: int | None, vocab_size: int, ends: Sequence[int | list[int] | None], context_tokens: int | None, folder: Path
) -> Limits:
    """Of what the configs say: positions that the model has, if they are limited, and end tokens."""
    if context_tokens is None and longest is None:
        raise ConfigError(f"engine.context_tokens: '{folder}' names no limit of its own, so set one.")
    if context_tokens is not None and longest is not None and context_tokens > longest:
        raise ConfigError(f"engine.context_tokens: got {context_tokens}, but the model's max_position_embeddings is {longest}. Lower it.")
    return Limits(context_tokens or longest or 0, vocab_size, frozenset().union(*map(_ids, ends)))


def _ids(value: int | list[int] | None) -> frozenset[int]:
    """Configs give end tokens as nothing, a number or a list."""
    return frozenset([value] if isinstance(value, int) else value or ())


class Desk:
    """What every engine does with requests, whatever computes their tokens. Safe to use from several threads."""

    def __init__(self, model_folder: Path, *, trust_remote_code: bool = False) -> None:
        self.model_folder = model_folder
        self.trust_remote_code = trust_remote_code
        self.changed = threading.Condition()
        """Guards everything here; whoever holds it may call any method."""
        self.open: dict[str, Request] = {}
        """Accepted and not at their end, by id."""
        self.stopped: Exception | None = None
        """Why nothing is accepted any more."""
        self._finished: list[Chunk] = []
        self._pollers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._decode_text: Callable[[list[int]], str] | None = None
        self._no_tokenizer = ""

    def accept(self, requests: Sequence[GenRequest], limits: Limits) -> list[Request]:
        """Those that have something to compute. One that can never run, or was complete already, is finished here."""
        now = time.monotonic()
        accepted: list[Request] = []
        if any(request.sampling.stop for request in requests):
            self._load_tokenizer()
        with self.changed:
            for request in requests:
                refusal = self._refusal(request, limits)
                if refusal:
                    self._finished.append(Chunk(request.id, [], [], [], "error", refusal))
                    continue
                decode_text = self._decode_text if request.sampling.stop else None
                entry = Request.of(request, limits.end_ids, limits.context, decode_text, now)
                outcome = entry.outcome()
                if outcome is not None:  # a resumed reply that was complete already
                    self._finished.append(entry.take_fresh(outcome))
                    continue
                self.open[entry.id] = entry
                accepted.append(entry)
            if len(accepted) < len(requests):
                self._wake_pollers()
        return accepted

    async def poll(self, wait_s: float) -> list[Chunk]:
        """New tokens, as `InferBackend.poll` promises."""
        loop = asyncio.get_running_loop()
        poller = (loop, loop.create_future())
        with self.changed:
            must_wait = not self._finished and self.stopped is None
            if must_wait:
                self._pollers.append(poller)
        if must_wait:
            try:
                await asyncio.wait([poller[1]], timeout=wait_s)
            finally:
                with self.changed:
                    if poller in self._pollers:
                        self._pollers.remove(poller)
        with self.changed:
            finished, self._finished = self._finished, []
            chunks = [entry.take_fresh() for entry in self.open.values() if entry.fresh.token_ids] + finished
            if not chunks and self.stopped is not None:
                raise self.stopped
        return chunks

    def finish(self, entry: Request, reason: FinishReason, error: str = "") -> None:
        """The request is at its end; its last chunk waits for the next poll."""
        with self.changed:
            del self.open[entry.id]
            self._finished.append(entry.take_fresh(reason, error))
            self._wake_pollers()

    def stop(self, reason: Exception, *, broken: bool) -> None:
        """Accept nothing more. Of a broken engine, open requests end with the reason; of a closed one they are dropped."""
        with self.changed:
            self.stopped = self.stopped or reason
            if broken:
                self._finished += [entry.take_fresh("error", str(reason)) for entry in self.open.values()]
            self.open.clear()
            self._wake_pollers()

    def _refusal(self, request: GenRequest, limits: Limits) -> str:
        """Why a request can never run, or nothing. Called with the lock held."""
        if self.stopped is not None:
            return str(self.stopped)
        sampling = request.sampling
        num_tokens = len(request.token_ids) + len(request.sampled)
        if request.id in self.open:
            return f"request '{request.id}' is already in the engine. Give every request an id of its own."
        if not len(request.token_ids):
            return f"request '{request.id}' has no prompt tokens. A reply needs at least one token to follow."
        if num_tokens >= limits.context:
            return (
                f"request '{request.id}' has {num_tokens} tokens, which leaves no room in a context of {limits.context}. "
                f"Shorten it, or raise engine.context_tokens."
            )
        for token in (min(*request.token_ids, 0, *request.sampled), max(*request.token_ids, 0, *request.sampled)):
            if not 0 <= token < limits.vocab_size:
                return f"request '{request.id}' holds token {token}, expected 0 to {limits.vocab_size - 1}. Was another tokenizer used?"
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            return (
                f"request '{request.id}': got temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}; expected "
                f"temperature >= 0, 0 < top_p <= 1, top_k >= 0."
            )
        if "" in sampling.stop:
            return f"request '{request.id}' has an empty stop string, which would end every reply at once. Remove it."
        if sampling.stop and self._decode_text is None:
            return f"request '{request.id}' has stop strings, but {self._no_tokenizer}"
        return ""

    def _load_tokenizer(self) -> None:
        """Only stop strings need text; the tokenizer comes with the first of them."""
        if self._decode_text is not None:
            return
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model_folder, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            self._no_tokenizer = f"no tokenizer can be loaded from '{self.model_folder}': {type(error).__name__}: {error}"
        else:
            self._decode_text = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _wake_pollers(self) -> None:
        """Called with the lock held."""
        for loop, waiter in self._pollers:
            try:
                loop.call_soon_threadsafe(_release, waiter)
            except RuntimeError:  # that loop is closed, so nobody waits there
                continue
        self._pollers.clear()


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
