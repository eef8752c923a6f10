"""What an inference engine must be able to do. `tests/contract/test_infer_backends.py` checks every registered one.

An engine owns its compute thread: `submit` and `abort` return at once, `poll` waits without blocking the event loop.
Requests live one by one: each can be added or aborted at any time, and none depends on its neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from drumroll.config.models import EngineConfig
from drumroll.types import Chunk, EngineLoad, GenRequest, RankInfo, Version

if TYPE_CHECKING:  # checking a config looks up its engine's options, and needs no torch for that
    from torch import Tensor

Bucket: TypeAlias = "list[tuple[str, Tensor]]"
"""Some of the model's tensors by their Hugging Face names; valid only until the next bucket is asked for."""

Checksums = dict[str, int]
"""Integer sum of every received tensor (see `backends.checksum`)."""


class InferBackend(ABC):
    """One engine. Built from its options and a model folder, then `setup`, then requests; `close` at the end."""

    spans_devices: ClassVar[bool] = False
    """One engine computes on several devices (`parallel.actor_infer.tp`)."""
    exact_resume: ClassVar[bool] = True
    """A reply that is taken up again from its tokens goes on exactly as if it had never been interrupted."""

    def __init__(self, config: EngineConfig, model_folder: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
        """`dtype` is `float32` or `bfloat16`."""
        self.config = config
        self.model_folder = model_folder
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code

    @classmethod
    def refusal(cls, config: EngineConfig, facts: Mapping[str, Any]) -> str:
        """Why this engine cannot serve a model whose `config.json` says these facts, as far as that is known before it starts."""
        return ""

    @abstractmethod
    def setup(self, rank: RankInfo) -> None:
        """Load the model onto the rank's device. The engine starts paused, at version (0, -1)."""

    @abstractmethod
    def submit(self, requests: Sequence[GenRequest]) -> None:
        """Queue requests. One that can never run (empty, too long) ends with finish reason `error` and says why."""

    @abstractmethod
    async def poll(self, wait_s: float) -> list[Chunk]:
        """New tokens. Returns when a request has finished, or after `wait_s` with whatever there is, also nothing.

        The last chunk of a request says which slot it held, and from when to when: no two held one at the same time."""

    @abstractmethod
    def abort(self, ids: Sequence[str]) -> None:
        """End requests within one decode step, also while paused; their slots are free then. Tokens so far still arrive, with
        finish reason `aborted`. Unknown ids are ignored."""

    @abstractmethod
    async def update(self, version: Version, buckets: Iterator[Bucket], cache: Literal["keep", "recompute"]) -> Checksums:
        """Take new weights in place, between two decode steps; unfinished requests go on with them.

        `keep` continues on the old keys and values, `recompute` computes them anew from the tokens. If it fails, the
        engine refuses to run until an update succeeds."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop computing after the current decode step; requests stay."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on computing. Refused before the first successful update."""

    @abstractmethod
    async def sleep(self) -> None:
        """Pause and give the device's memory back: tokens and weights are kept, in host memory, keys and values are not."""

    @abstractmethod
    async def wake(self) -> None:
        """Undo `sleep`, except for keys and values; `resume` must follow. Nothing where the engine is awake."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """What the engine has to do, and which weights it serves; `paused` whenever it may not compute, for whatever reason."""

    @abstractmethod
    async def take_peak_bytes(self) -> int:
        """The most GPU memory that the engine had in use since the last time; 0 without a GPU."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the compute thread and free everything; unfinished requests are dropped."""
