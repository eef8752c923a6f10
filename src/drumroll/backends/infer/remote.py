"""An engine of another package, in processes of its own, behind drumroll's contract: what is the same whichever package it is.

    event loop           this engine's thread, with a loop of its own           the package's processes
    submit, abort ─────▶ a queue, lanes; at most `num_slots` requests go on ──▶ schedule, compute, sample
    poll ◀── the desk ── tokens of each request, with the version they are of ◀─┘
    update ────────────▶ freeze ── buckets in shared or device memory ────────▶ `intake.Intake`

Requests stay frozen inside the package while it is paused or takes weights, and go on from their keys and values; to compute those anew,
it takes all requests back into its queue. Importing this loads no torch: `setup` does.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib.metadata
import re
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from drumroll.backends.infer.base import Bucket, Checksums, InferBackend
from drumroll.backends.infer.desk import Desk, Limits, limits_of
from drumroll.backends.infer.request import Request
from drumroll.backends.lent import Lent
from drumroll.config.models import EngineConfig
from drumroll.errors import PluginError, WeightSyncError, WorkerError
from drumroll.models.loading import as_in_files
from drumroll.types import Chunk, EngineLoad, FinishReason, GenRequest, RankInfo, Version

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

BUCKET_BYTES = 256 * 2**20
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more tokens of one request."""

    ids: list[int]
    logp: list[float]
    ended: str = ""
    """Why the package says that there are no more; a request knows by itself when its reply is over."""


class RemoteEngine(InferBackend):
    """One engine of another package. A subclass says how that package starts, generates, stands still and takes weights; its own
    coroutines all run on the engine's thread."""

    package: ClassVar[str]
    """As people write it."""
    spans_devices: ClassVar[bool] = True
    with_experts: ClassVar[frozenset[str]] = frozenset()
    """Families of models with experts that were seen to compute the same as in transformers, where these are joined."""

    def __init__(self, config: EngineConfig, model_folder: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
        super().__init__(config, model_folder, dtype, trust_remote_code=trust_remote_code)
        self._desk = Desk(model_folder, trust_remote_code=trust_remote_code)
        self._thread: threading.Thread | None = None
        self._limits: Limits | None = None
        self._targets: dict[str, Tensor] = {}
        self._device = "cpu"
        self._num_devices = 1
        self._peak_bytes = 0
        # Of the engine's thread; others at most read a number.
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._one_at_a_time: asyncio.Lock
        self._version = Version(0, -1)
        self._paused = True
        self._asleep = False
        self._weights_complete = False
        self._frozen = False
        """Whether the package has been told to compute nothing."""
        self._cache_asleep = False
        """Whether the package has given the memory of its keys and values back."""
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lanes = list(range(config.num_slots))
        self._num_tokens = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @classmethod
    def refusal(cls, config: EngineConfig, facts: Mapping[str, Any]) -> str:
        family = str(facts.get("model_type"))
        has_experts = any(facts.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        if has_experts and family not in cls.with_experts:
            known = ", ".join(sorted(cls.with_experts)) or "none"
            return f"it has experts, and {cls.package} was not seen to take the weights of those of '{family}' as they are (of {known})"
        return ""

    # -- The contract, called from any thread

    def setup(self, rank: RankInfo) -> None:
        self._device, self._num_devices = rank.device, rank.num_devices
        self._limits, self._targets = _describe(self.model_folder, self.config, trust_remote_code=self.trust_remote_code)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name=f"{self.package}-engine", daemon=True)
        self._thread.start()
        ready.result()

    def submit(self, requests: Sequence[GenRequest]) -> None:
        assert self._limits is not None, "the engine is used before setup"
        accepted = self._desk.accept(requests, self._limits)
        if accepted:
            self._loop.call_soon_threadsafe(self._accept, accepted)

    async def poll(self, wait_s: float) -> list[Chunk]:
        return await self._desk.poll(wait_s)

    def abort(self, ids: Sequence[str]) -> None:
        self._loop.call_soon_threadsafe(self._abort, list(ids))

    async def update(self, version: Version, buckets: Iterator[Bucket], cache: Literal["keep", "recompute"]) -> Checksums:
        return await self._call(self._update(version, buckets, cache))

    async def pause(self) -> None:
        await self._call(self._pause())

    async def resume(self) -> None:
        await self._call(self._resume())

    async def sleep(self) -> None:
        await self._call(self._sleep())

    async def wake(self) -> None:
        await self._call(self._wake())

    def load(self) -> EngineLoad:
        with self._desk.changed:
            num_running = len(self._running)
            busy_now = 0.0 if self._busy_since is None else time.perf_counter() - self._busy_since
            return EngineLoad(
                num_running=num_running,
                num_waiting=len(self._desk.open) - num_running,
                num_slots=self.config.num_slots,
                version=self._version,
                paused=self._paused or not self._weights_complete,
                num_tokens_total=self._num_tokens,
                busy_s_total=self._busy_s + busy_now,
            )

    async def take_peak_bytes(self) -> int:
        return await self._call(self._take_peak())

    async def close(self) -> None:
        self._desk.stop(WorkerError(f"the {self.package} engine is closed."), broken=False)
        if self._thread is not None:
            with suppress(RuntimeError):  # its loop has ended already
                self._loop.call_soon_threadsafe(self._closing.set)
            await asyncio.to_thread(self._thread.join)

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Have the engine's thread do something, and wait for its result."""
        if self._desk.stopped is not None:
            coroutine.close()
            raise self._desk.stopped
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    # -- The engine's thread

    async def _serve(self, ready: Future[None]) -> None:
        """Start the package's processes, and stay until the engine is closed."""
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        try:
            await self._open()
        except BaseException as error:
            ready.set_exception(WorkerError(f"{self.package} did not start: {type(error).__name__}: {error}"))
            return
        ready.set_result(None)
        try:
            await self._closing.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shut()

    def _accept(self, entries: list[Request]) -> None:
        for entry in entries:
            self._waiting.append(entry)
            if entry.deadline is not None:
                self._loop.call_later(max(0.0, entry.deadline - time.monotonic()), self._expire, entry)
        self._admit()

    def _admit(self) -> None:
        """Waiting requests go on, in their order, as long as there are lanes."""
        if self._paused or self._frozen or not self._weights_complete:
            return
        with self._desk.changed:
            while self._waiting and self._lanes:
                entry = self._waiting.popleft()
                entry.lane, entry.started = heapq.heappop(self._lanes), time.time()
                self._running[entry.id] = entry
                self._tasks[entry.id] = asyncio.create_task(self._run(entry))
        self._note_work()

    def _abort(self, ids: list[str]) -> None:
        for unwanted in ids:
            entry = self._desk.open.get(unwanted)
            if entry is not None:
                self._finish(entry, "aborted")

    def _expire(self, entry: Request) -> None:
        if self._desk.open.get(entry.id) is entry:
            self._finish(entry, "deadline")

    def _finish(self, entry: Request, reason: FinishReason, error: str = "") -> None:
        """The request leaves, wherever it stands."""
        with self._desk.changed:
            if self._running.pop(entry.id, None) is None:
                self._waiting.remove(entry)
            task = self._tasks.pop(entry.id, None)
            if entry.lane >= 0:
                heapq.heappush(self._lanes, entry.lane)
            self._desk.finish(entry, reason, error)
        if task is not None and task is not asyncio.current_task():
            task.cancel()  # which has the package abort it
        self._note_work()
        self._admit()

    async def _run(self, entry: Request) -> None:
        """One request's tokens, from the package to the desk."""
        stream = self._generate(entry)
        try:
            async for piece in stream:
                with self._desk.changed:
                    num_before = len(entry.tokens)
                    outcome = entry.extend(piece.ids, piece.logp, self._version.step)
                    self._num_tokens += len(entry.tokens) - num_before
                if outcome == "error":
                    self._finish(entry, "error", f"request '{entry.id}': the model's logits are not finite. Are its weights?")
                elif outcome is not None:
                    self._finish(entry, outcome)
                elif piece.ended:
                    self._finish(entry, "error", f"request '{entry.id}': {self.package} ended it for a reason of its own: {piece.ended}.")
                if self._running.get(entry.id) is not entry:
                    break
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._break(error, entry)
        finally:
            await stream.aclose()

    def _break(self, error: Exception, entry: Request) -> None:
        """A request that the package refuses ends alone; an engine that has died ends all."""
        if self._has_died():
            self._die(error)
        elif self._running.get(entry.id) is entry:
            self._finish(entry, "error", f"request '{entry.id}': {type(error).__name__}: {error.__cause__ or error}")

    def _die(self, error: Exception) -> None:
        """Nothing more comes from the package's processes."""
        reason = WorkerError(f"the {self.package} engine stopped: {type(error).__name__}: {error}")
        reason.__cause__ = error
        self._desk.stop(reason, broken=True)

    def _note_work(self) -> None:
        """Keep count of the time in which the package has something to do."""
        is_busy, now = bool(self._running) and not self._frozen, time.perf_counter()
        if is_busy and self._busy_since is None:
            self._busy_since = now
        elif not is_busy and self._busy_since is not None:
            self._busy_s, self._busy_since = self._busy_s + now - self._busy_since, None

    # -- What `update`, `pause` and the others do, one at a time

    async def _update(self, version: Version, buckets: Iterator[Bucket], cache: Literal["keep", "recompute"]) -> Checksums:
        async with self._one_at_a_time:
            if self._asleep:
                raise WeightSyncError(f"version {version} was refused: the engine is asleep. Wake it first.")
            if version < self._version:
                raise WeightSyncError(f"version {version} was refused: it is older than {self._version}, which the engine serves.")
            await self._freeze()
            self._weights_complete = False
            if cache == "recompute":
                await self._forget()
            sums = await self._relay(buckets)
            self._version = version
            self._weights_complete = True
            if not self._paused:
                await self._thaw()
        self._admit()
        return sums

    async def _relay(self, buckets: Iterator[Bucket]) -> Checksums:
        """Hand buckets on to the package's processes, through memory that they share with this one."""
        import torch

        from drumroll.backends.buckets import Outbox
        from drumroll.backends.infer.checklist import Checklist
        from drumroll.backends.offload import settle

        on_gpu = self._device.startswith("cuda")
        outbox = Outbox(self._num_devices, None, BUCKET_BYTES if on_gpu else BUCKET_BYTES // 4, DEADLINE_S, self._device if on_gpu else "")
        checklist = Checklist(self._targets)

        def feed() -> None:
            try:
                for bucket in buckets:
                    for name, tensor in bucket:
                        checklist.tick(name, tensor)
                        outbox.add(name, tensor)
                checklist.complete()
                outbox.finish()
            except BaseException:
                outbox.fail()
                raise

        taking = asyncio.create_task(self._take_weights(outbox.lent()))
        taking.add_done_callback(lambda task: outbox.fail() if not task.cancelled() and task.exception() else None)
        try:
            await asyncio.to_thread(feed)
            peak = await taking
        except Exception as error:
            with suppress(Exception):
                await taking
            if taking.done() and not taking.cancelled() and taking.exception() and "given up" in str(error):
                raise WeightSyncError(f"{self.package} did not take the weights: {taking.exception()}") from error
            raise
        finally:
            outbox.close()
            settle(torch.device(self._device))  # this process needs no memory of the GPU before the next one
        self._peak_bytes = max(self._peak_bytes, peak)
        return dict(outbox.sums)

    async def _pause(self) -> None:
        async with self._one_at_a_time:
            self._paused = True
            await self._freeze()

    async def _resume(self) -> None:
        async with self._one_at_a_time:
            if self._asleep or not self._weights_complete:
                raise WeightSyncError(
                    "resume was refused: the engine is asleep, or has no complete weights (none yet, or a failed update). "
                    "Wake or update it."
                )
            self._paused = False
            await self._thaw()
        self._admit()

    async def _sleep(self) -> None:
        async with self._one_at_a_time:
            if self._asleep:
                return
            self._paused = self._asleep = True
            await self._freeze()
            await self._forget()
            if self._device.startswith("cuda"):
                await self._release()
                self._cache_asleep = True

    async def _wake(self) -> None:
        async with self._one_at_a_time:
            if self._asleep and self._cache_asleep:
                await self._take_back("weights")
            self._asleep = False

    async def _freeze(self) -> None:
        if not self._frozen:
            self._frozen = True
            await self._stand_still()
            self._note_work()

    async def _thaw(self) -> None:
        if self._cache_asleep:
            await self._take_back("cache")
            self._cache_asleep = False
        if self._frozen:
            await self._go_on()
        self._frozen = False
        self._note_work()

    # -- What each package does in its own way, on the engine's thread

    async def _take_peak(self) -> int:
        """The most GPU memory that one of its processes had in use since the last time, or where it tells that at updates alone, until the
        last one."""
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak

    @abstractmethod
    async def _open(self) -> None:
        """Start the package's processes, with random weights; they end with this process, however it ends."""

    @abstractmethod
    async def _shut(self) -> None:
        """End them."""

    @abstractmethod
    def _has_died(self) -> bool:
        """Whether one of them has ended by itself."""

    @abstractmethod
    def _generate(self, entry: Request) -> AsyncGenerator[Piece, None]:
        """What is left of a request, piece by piece. Closing the stream ends the request there."""

    @abstractmethod
    async def _take_weights(self, lent: Lent) -> int:
        """Have every process read the buckets into its model; the most GPU memory that one had in use since the last time, if nobody else
        tells it. A tensor that arrives damaged is an error."""

    @abstractmethod
    async def _stand_still(self) -> None:
        """Compute nothing more. Requests stay, and all of their tokens have come when this returns."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Undo `_stand_still`."""

    @abstractmethod
    async def _forget(self) -> None:
        """While standing still: keys and values are computed anew, also those of requests that are not at their end."""

    @abstractmethod
    async def _release(self) -> None:
        """While standing still, and after `_forget`: give the GPU's memory back; weights go to the host."""

    @abstractmethod
    async def _take_back(self, part: Literal["weights", "cache"]) -> None:
        """Have memory of the GPU again."""


def check_version(kind: str, distributions: Sequence[str], supported: tuple[tuple[int, ...], tuple[int, ...]], hint: str = "") -> None:
    """Raise a `PluginError` unless one of the distributions is installed, in a version from the first up to, and not with, the second."""
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            text = importlib.metadata.version(name)
            break
    else:
        raise PluginError(f"`engine.kind: {kind}`: {distributions[0]} is not installed: pip install 'drumroll[{kind}]'{hint}.")
    digits = len(supported[0])
    parts = [int(number) for number in re.findall(r"\d+", text.split("+")[0])[:digits]]
    found = (*parts, *[0] * (digits - len(parts)))
    if not supported[0] <= found < supported[1]:
        first, end = (".".join(map(str, version)) for version in supported)
        raise PluginError(
            f"`engine.kind: {kind}`: {name} {text} is installed, expected at least {first} and below {end}: pip install 'drumroll[{kind}]'."
        )


def _describe(folder: Path, config: EngineConfig, *, trust_remote_code: bool) -> tuple[Limits, dict[str, Tensor]]:
    """What the model can be asked, and its tensors by all of their names in files, without their memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    model_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    generation_config = None
    with suppress(OSError):
        generation_config = GenerationConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
    limits = limits_of(model_config, generation_config, config.context_tokens, folder)
    return limits, as_in_files(model, dict(model.named_parameters(remove_duplicate=False)))
