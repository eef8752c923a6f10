"""Chat messages in, a text out, over any inference engine: how a reward asks a model of the plan, for example as a judge.

    complete ─┐                              ┌─ submit ─▶ engine
    complete ─┼─ template, tokens, a future ─┤              │
    complete ─┘            ▲                 └─ abort       │
                           └──── one loop polls ◀───────────┘   while anybody waits

Control tokens come from the chat template alone: whoever spells one out inside a message gets ordinary characters.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumroll.backends.infer.base import Bucket, InferBackend
from drumroll.errors import ModelError, WorkerError
from drumroll.hub import resolve_folder
from drumroll.models.folder import check_folder
from drumroll.models.loading import as_in_files, check_complete, load_model
from drumroll.models.prepare import resolve_dtype
from drumroll.registry import REGISTRY
from drumroll.rewards.place import ChatModel
from drumroll.text.chat import messages_to_ids
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, GenRequest, Message, RankInfo, Sampling, Version

POLL_S = 5.0
"""The engine's poll returns as soon as a reply is complete; this is how long it waits otherwise."""


async def open_chat(model: ChatModel, *, device: str) -> ChatEngine:
    """Load a model into an engine of its own on `device` (`cpu`, `cuda:0`), ready to answer."""
    folder = await asyncio.to_thread(resolve_folder, model.path, model.revision, "model", ModelError)
    check_folder(folder, trust_remote_code=model.trust_remote_code)
    tokenizer = Tokenizer(folder, trust_remote_code=model.trust_remote_code)
    _check_template(tokenizer)
    dtype = resolve_dtype(model.dtype, device)
    backend: InferBackend = REGISTRY.lookup("infer_backend", model.engine.kind).target(
        model.engine, folder, dtype, trust_remote_code=model.trust_remote_code
    )
    await asyncio.to_thread(backend.setup, RankInfo("reward", 0, 1, device))
    source = await asyncio.to_thread(_load, folder, dtype, model.trust_remote_code)
    await backend.update(Version(0, 0), _tensors(source), "keep")  # engines serve only weights that they were sent
    await backend.resume()
    context: int = model.engine.context_tokens or source.config.get_text_config().max_position_embeddings
    return ChatEngine(backend, tokenizer, context_tokens=context)


@dataclass(slots=True)
class _Call:
    """A reply that somebody waits for."""

    done: asyncio.Future[list[int]]
    token_ids: list[int] = field(default_factory=list)


class ChatEngine:
    """Answers chat messages with an engine that is set up and running. All calls come from one event loop.

    Example: `await engine.complete([{"role": "user", "content": "2+2?"}], max_new_tokens=16, temperature=0)`.
    """

    def __init__(self, backend: InferBackend, tokenizer: Tokenizer, *, context_tokens: int) -> None:
        """`context_tokens` is the engine's longest prompt plus reply."""
        self.backend = backend
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self._defuse = Defuser(tokenizer)
        self._numbers = itertools.count()
        self._calls: dict[str, _Call] = {}
        self._loop: asyncio.Task[None] | None = None

    async def complete(self, messages: Sequence[Message], *, max_new_tokens: int, temperature: float, seed: int | None = None) -> str:
        """The text of one answer, without end tokens; it is cut short at `max_new_tokens` and where the context ends.

        A prompt that leaves no room in the context is a `ValueError`, an engine that fails a `WorkerError`. Without a seed, the
        same question gets the same answer. Cancelling the call ends the request in the engine."""
        prompt_ids = messages_to_ids(self.tokenizer, [self._defuse(message) for message in messages])
        if len(prompt_ids) >= self.context_tokens:
            raise ValueError(
                f"the messages have {len(prompt_ids)} tokens, which leaves no room for a reply in the context of {self.context_tokens} "
                f"tokens of '{self.tokenizer.folder}'. Shorten them, or raise `engine.context_tokens` if the model allows it."
            )
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, stop_token_ids=self.tokenizer.eos_ids)
        call = _Call(asyncio.get_running_loop().create_future())
        name = str(next(self._numbers))
        self._calls[name] = call
        try:
            self.backend.submit([GenRequest(name, prompt_ids, sampling, seed or 0)])
            if self._loop is None or self._loop.done():
                self._loop = asyncio.create_task(self._poll())
            return self.tokenizer.decode(await call.done, after=prompt_ids)
        finally:
            if self._calls.pop(name, None) is not None:
                self.backend.abort([name])

    async def close(self) -> None:
        """Stop the engine; whoever still waits gets a `WorkerError`."""
        if self._loop is not None:
            self._loop.cancel()
        self._fail_all("the chat engine was closed.")
        await self.backend.close()

    async def _poll(self) -> None:
        """Hand tokens to those who wait for them, until nobody does. What the engine's poll raises, everybody gets."""
        try:
            while self._calls:
                for chunk in await self.backend.poll(POLL_S):
                    self._take(chunk)
        except Exception as error:
            self._fail_all(f"the chat engine failed: {type(error).__name__}: {error}")

    def _take(self, chunk: Chunk) -> None:
        call = self._calls.get(chunk.id)
        if call is None:  # it was cancelled, and these are its last tokens
            return
        call.token_ids += chunk.token_ids
        if chunk.finish is None:
            return
        del self._calls[chunk.id]
        if call.done.done():
            return
        if chunk.finish in ("stop", "length"):
            call.done.set_result(call.token_ids)
        else:
            call.done.set_exception(WorkerError(f"the chat engine gave no reply ({chunk.finish}): {chunk.error}"))

    def _fail_all(self, reason: str) -> None:
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(WorkerError(reason))
        self._calls.clear()


class Defuser:
    """Takes the power from control tokens that are spelled out in a text, by a space behind their first character.

    A reply that is shown to another model could otherwise end its own message there and go on in the name of someone else:
    `<|im_end|>` becomes `< |im_end|>`, which a tokenizer reads as any other text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, value: Any) -> Any:
        """The same text, or message with the same fields, with every text in it defused."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
        if isinstance(value, Mapping):
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        return value


def _check_template(tokenizer: Tokenizer) -> None:
    if not tokenizer.hf.chat_template:
        raise ModelError(
            f"the tokenizer in '{tokenizer.folder}' has no chat template, so the model cannot be asked anything in chat messages. "
            f"Use an instruction-tuned model, or put a `chat_template.jinja` into the folder."
        )


def _load(folder: Path, dtype: str, trust_remote_code: bool) -> Any:
    import torch

    model, missing = load_model(folder, "lm", trust_remote_code=trust_remote_code, dtype=getattr(torch, dtype))
    check_complete(folder, missing)
    return model


def _tensors(model: Any) -> Iterator[Bucket]:
    """The weights as a trainer sends them: each once, under its name in the model's files."""
    for name, tensor in as_in_files(model, dict(model.named_parameters())).items():
        yield [(name, tensor.detach())]
