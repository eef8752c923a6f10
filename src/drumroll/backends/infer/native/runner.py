"""What the engine asks of the model on its device. One thread calls it.

    admit ─▶ fill, until nothing is left to fill ─▶ enter ─▶ launch, read, launch, read, … ─▶ leave

`slots` runs any model of transformers in fixed shapes, `paged` those of the Llama family on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from drumroll.backends.checksum import begin_checksum, checksums
from drumroll.backends.infer.checklist import Checklist
from drumroll.backends.infer.desk import Limits
from drumroll.backends.infer.native.cache import ATTENTION, attend
from drumroll.errors import ModelError
from drumroll.models.loading import check_complete, load_model

if TYPE_CHECKING:
    from drumroll.backends.infer.base import Bucket, Checksums
    from drumroll.backends.infer.native import Native
    from drumroll.backends.infer.request import Request

Flight: TypeAlias = Any
"""Decode steps that were launched and not read yet; each runner has its own kind."""


class Sampled(NamedTuple):
    """What decode steps gave, by slot: one token or several of each."""

    ids: Sequence[Sequence[int]]
    logp: Sequence[Sequence[float]]


class Runner(ABC):
    """A model with keys and values of the requests that it works on."""

    device: torch.device
    limits: Limits
    num_ahead: int
    """Launches that should be under way when the oldest is read, so that the device never waits for the host."""
    optional: frozenset[str] = frozenset()
    """Tensors that an update may leave out."""

    # -- Places

    @abstractmethod
    def admit(self, entry: Request) -> bool:
        """Give the request a slot, with keys and values of its first tokens where there are such already; False when there is no room."""

    @abstractmethod
    def leave(self, entry: Request, *, keep: bool) -> None:
        """Take the slot back. With `keep`, its keys and values are those of the tokens, and may serve later requests of its session."""

    @abstractmethod
    def forget(self, *, sessions: bool) -> None:
        """What requests left behind serves no others any more, with `sessions` not even those of the same session."""

    @abstractmethod
    def make_room(self, running: Sequence[Request]) -> list[Request]:
        """Prepare the next launch; those of the requests that must leave, because the others need their room."""

    def tidy(self, running: Mapping[int, Request]) -> bool:
        """Move requests to other slots where that makes the next launches cheaper; whether any was moved."""
        return False

    # -- Computing

    @abstractmethod
    def fill(self, entries: Sequence[Request]) -> None:
        """Compute keys and values for some of these requests, the first among them, and count them as cached."""

    @abstractmethod
    def enter(self, entries: Sequence[Request]) -> None:
        """Requests of which only the last token is not cached take part in decoding."""

    @abstractmethod
    def launch(self, running: Mapping[int, Request]) -> Flight | None:
        """Decode all requests that entered and did not leave, by slot; None when what is under way brings all of them to their ends."""

    @abstractmethod
    def read(self, flight: Flight) -> Sampled:
        """Wait for what was launched."""

    @abstractmethod
    def wipe(self, entry: Request) -> None:
        """Zero what the request holds: values that are not finite would spoil masked attention for the next owner."""

    # -- Weights and memory

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Every tensor that an update may bring, under every name that it has."""

    @abstractmethod
    def sleep(self) -> None:
        """Give the device's memory back. Nobody is running."""

    @abstractmethod
    def wake(self) -> None:
        """Back onto the device, except for keys and values."""

    def take_weights(self, buckets: Iterator[Bucket]) -> Checksums:
        """Copy every parameter in place, strictly."""
        sums: Checksums = {}
        checklist = Checklist(self.weights(), self.optional)
        for received in buckets:
            begun: dict[str, Tensor] = {}
            for name, tensor in received:
                target = checklist.tick(name, tensor)
                target.copy_(tensor)
                begun[name] = begin_checksum(target if target.dtype == tensor.dtype else tensor.to(self.device))
            sums.update(zip(begun, checksums(list(begun.values())), strict=True))  # a bucket is read through before the next is asked for
        checklist.complete()
        return sums


def open_runner(cfg: Native.Config, folder: Path, dtype: str, device_name: str, *, trust_remote_code: bool) -> Runner:
    """The runner that serves this model on this device best."""
    from drumroll.backends.infer.native.slots import SlotRunner

    device = torch.device(device_name)
    if device.type == "cpu":
        from drumroll.backends.llama_folder import LlamaFolder

        found = LlamaFolder.open(folder)
        if found is not None:
            return SlotRunner.of_folder(found, getattr(torch, dtype), cfg)
    model = load_for_inference(folder, dtype, device, trust_remote_code)
    if device.type == "cuda":
        from drumroll.backends.infer.native.fused import why_not_fused
        from drumroll.backends.infer.native.paged import PagedRunner

        if not why_not_fused(model):
            return PagedRunner(model, folder, cfg)
    return SlotRunner.of_model(model, folder, cfg)


def load_for_inference(folder: Path, dtype: str, device: torch.device, trust_remote_code: bool) -> Any:
    """The model of a folder on its device, as transformers loads it, attending by way of `cache.attend`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    model, missing = load_model(
        folder, "lm", trust_remote_code=trust_remote_code, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
    )
    check_complete(folder, missing)
    return model.eval().requires_grad_(False).to(device)


def own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """[V] after the tokens, the model's own way."""
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION)
    return logits[0, -1].float()


def refuse_other_logits(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise a `ModelError` where logits differ by more than rounding from those of the model itself."""
    share = float((got - expected).abs().max() / (expected - expected.mean()).abs().max().clamp_min(1e-6))
    if not share < (1e-3 if dtype == torch.float32 else 0.1):
        raise ModelError(f"{name} gives other logits in the native engine than by itself (off by {share:.1%}). Use another engine.")


def trial_tokens(vocab_size: int, context: int) -> list[int]:
    """A short text that every model can read."""
    return [i * 7 % vocab_size for i in range(min(24, context - 1))]


def signed(seed: int) -> int:
    """The seed's 64 bits as the int64 that torch can hold."""
    seed &= (1 << 64) - 1
    return seed - ((seed >> 63) << 64)
