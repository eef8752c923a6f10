"""A tiny model and a synchronous handle on an engine, for the tests of inference backends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from drumroll.backends.infer.base import Bucket, InferBackend
from drumroll.config.models import EngineConfig, ScratchConfig
from drumroll.models.loading import as_in_files
from drumroll.models.scratch import make_scratch
from drumroll.registry import REGISTRY
from drumroll.types import Chunk, GenRequest, RankInfo, Sampling, Version

T = TypeVar("T")

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789=+ .\n"
EOS = 2
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.4, "max_position_embeddings": 256}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 1},
    "qwen3": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {**SMALL},
    "gpt_neox": {**SMALL, "intermediate_size": 64},
    "mistral": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 12},
    "qwen3_moe": {
        **SMALL,
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}


LARGER = {"hidden_size": 128, "initializer_range": 0.2}
"""Other packages' kernels want heads of 32 at least."""


def make_model(folder: Path, architecture: str = "llama", seed: int = 0, kind: str = "native", **changes: Any) -> Path:
    """A model that the engine of that kind can run."""
    config = {**ARCHITECTURES[architecture], **(LARGER if kind != "native" else {}), **changes}
    if kind != "native" and "head_dim" in config:
        config["head_dim"] = 32
    make_scratch(ScratchConfig(architecture=architecture, characters=CHARACTERS, config=config), folder, seed)
    return folder


def reference(folder: Path) -> Any:
    """The model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as a trainer sends them: each once, under its name in the model's files."""
    model = reference(folder)
    return {name: tensor.detach() for name, tensor in as_in_files(model, dict(model.named_parameters())).items()}


def bucketed(weights: dict[str, torch.Tensor], size: int = 3) -> Iterator[Bucket]:
    items = list(weights.items())
    yield from (items[i : i + size] for i in range(0, len(items), size))


@dataclass
class Reply:
    """Everything that arrived for one request."""

    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    token_version: list[int] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    error: str = ""
    slot: int = -1
    started: float = 0.0
    ended: float = 0.0


class Driver:
    """Runs an engine's coroutines on a loop of its own and gathers what it sends."""

    def __init__(self, backend: InferBackend, folder: Path, patience_s: float = 30.0) -> None:
        self.backend, self.folder, self.patience_s = backend, folder, patience_s
        self.loop = asyncio.new_event_loop()
        self.replies: dict[str, Reply] = {}
        self.epoch = 0
        self.num_tokens_before = 0

    def do(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))

    def update(self, step: int, weights: dict[str, torch.Tensor] | None = None, cache: Any = "keep") -> dict[str, int]:
        return self.do(self.backend.update(self.version(step), bucketed(weights or tensors(self.folder)), cache))

    def version(self, step: int) -> Version:
        return Version(self.epoch, step)

    def start(self) -> None:
        self.update(0)
        self.do(self.backend.resume())

    def begin_anew(self) -> None:
        """As if the engine had just been started."""
        self.do(self.backend.wake())
        self.backend.abort([name for name, reply in self.replies.items() if not reply.finishes])
        self.until(lambda: self.backend.load().num_running + self.backend.load().num_waiting == 0)
        self.poll(0.0)
        self.replies.clear()
        self.epoch = self.backend.load().version.incarnation + 1
        self.num_tokens_before = self.backend.load().num_tokens_total
        self.start()

    def submit(self, *requests: GenRequest) -> None:
        self.backend.submit(requests)

    def poll(self, wait_s: float = 5.0) -> list[Chunk]:
        chunks = self.do(self.backend.poll(wait_s))
        for chunk in chunks:
            reply = self.replies.setdefault(chunk.id, Reply())
            assert len(chunk.token_ids) == len(chunk.logp) == len(chunk.token_version)
            assert not (reply.finishes and chunk.token_ids), "tokens after the finish"
            reply.token_ids += chunk.token_ids
            reply.logp += chunk.logp
            reply.token_version += chunk.token_version
            if chunk.finish is not None:
                reply.finishes.append(chunk.finish)
                reply.error, reply.slot, reply.started, reply.ended = chunk.error, chunk.slot, chunk.started, chunk.ended
            else:
                assert (chunk.slot, chunk.started, chunk.ended) == (-1, 0.0, 0.0), "only the last chunk knows"
        return chunks

    def gather(self, ids: Iterable[str]) -> list[Reply]:
        """Poll until all of them have finished."""
        wanted = list(ids)
        self.until(lambda: all(self.replies.get(i, Reply()).finishes for i in wanted))
        return [self.replies[i] for i in wanted]

    def until(self, condition: Callable[[], bool], wait_s: float = 0.2) -> None:
        end = time.monotonic() + self.patience_s
        while not condition():
            assert time.monotonic() < end, f"nothing more came: {self.replies}"
            self.poll(wait_s)

    def generate(self, *requests: GenRequest) -> list[Reply]:
        self.submit(*requests)
        return self.gather(request.id for request in requests)

    def close(self) -> None:
        self.do(self.backend.close())
        self.loop.close()


@contextmanager
def engine(
    folder: Path,
    kind: str = "native",
    dtype: str = "float32",
    started: bool = True,
    device: str = "cpu",
    num_devices: int = 1,
    **options: Any,
) -> Iterator[Driver]:
    entry = REGISTRY.lookup("infer_backend", kind)
    config = entry.schema(EngineConfig).model_validate({"kind": kind, "num_slots": 16, **options})
    backend: InferBackend = entry.target(config, folder, dtype)
    backend.setup(RankInfo("actor_infer", 0, 1, device, num_devices=num_devices))
    driver = Driver(backend, folder)
    try:
        if started:
            driver.start()
        yield driver
    finally:
        driver.close()


def ask(
    name: str, prompt: list[int], seed: int = 0, sampled: list[int] | None = None, deadline_s: float | None = None, **options: Any
) -> GenRequest:
    return GenRequest(name, prompt, Sampling(**{"max_new_tokens": 20, **options}), seed, sampled or [], deadline_s)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Some characters, no special token."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 3 + len(CHARACTERS), (length,), generator=generator).tolist()
