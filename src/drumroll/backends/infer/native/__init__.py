"""The embedded engine: continuous batching of Hugging Face causal LMs in plain torch, on the CPU and on CUDA.

    event loop                          compute thread
    submit, abort ── inbox ───────────▶ between two steps: empty the inbox, end what is due
    update, pause, ... ── inbox ──────▶ then one step: a prefill call while any request needs one, else decode steps
    poll ◀── tokens under a lock, finished requests wake it ──┘

This module schedules; the desk takes requests in and hands tokens out; a request knows when it is over; a `runner` computes, and
knows what lies where. Decode steps are *flights*: where the runner wants it, the next ones are launched before the last ones are read,
and whoever ends in between has computed a little too much.
Importing this loads neither torch nor transformers: `setup` does.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, PositiveInt

from drumroll.backends.infer.base import Bucket, Checksums, InferBackend
from drumroll.backends.infer.desk import Desk, Limits
from drumroll.backends.infer.request import Request
from drumroll.config.models import EngineConfig
from drumroll.errors import WeightSyncError, WorkerError
from drumroll.registry import register
from drumroll.types import Chunk, EngineLoad, FinishReason, GenRequest, RankInfo, Version

if TYPE_CHECKING:
    from drumroll.backends.infer.native.runner import Flight, Runner

T = TypeVar("T")


@register.infer_backend("native")
class Native(InferBackend):
    """The embedded engine: any causal LM of transformers, torch alone."""

    class Config(EngineConfig):
        """Options of the native engine."""

        prefill_tokens: Annotated[int, Field(ge=64)] | None = None
        """Tokens in one prefill call; 256 on the CPU and 8192 on a GPU otherwise. Longer prompts take several calls."""
        cache_tokens: PositiveInt | None = None
        """Tokens whose keys and values have room on a GPU; `num_slots` × `context_tokens` otherwise, or as many as fit beside the model.
        When they are all in use, the latest requests wait."""
        threads: PositiveInt = 1
        """On the CPU. More than one pays where an engine has several cores to itself: where it is the only one (`devices`), and updates
        wait for it (`rollout.max_staleness: 0`)."""
        compiles: bool = True
        """On the CPU in float32, draw tokens and decode models of the Llama family by functions in C, which the machine's compiler
        (`cc`) compiles once, in a second. Without a compiler torch computes the same, up to rounding, and more slowly."""

    config: Config

    def __init__(self, config: Config, model_folder: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
        super().__init__(config, model_folder, dtype, trust_remote_code=trust_remote_code)
        self._runner: Runner | None = None
        self._limits: Limits | None = None
        self._thread: threading.Thread | None = None
        # Shared between threads, under the desk's lock.
        self._desk = Desk(model_folder, trust_remote_code=trust_remote_code)
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: set[Future[Any]] = set()
        # The compute thread's own; other threads at most read a number.
        self._version = Version(0, -1)
        self._paused = True
        self._asleep = False
        self._weights_complete = False
        self._waiting: deque[Request] = deque()
        self._filling: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._lanes = list(range(config.num_slots))
        self._flights: deque[tuple[Flight, dict[int, Request]]] = deque()
        """Decode steps that were launched and not read yet, the oldest first, with those who took part."""
        self._deadlines: list[tuple[float, str]] = []
        self._num_tokens = 0
        self._busy_s = 0.0

    # -- The contract, called from the event loop

    def setup(self, rank: RankInfo) -> None:
        from drumroll.backends.infer.native.runner import open_runner

        self._runner = open_runner(self.config, self.model_folder, self.dtype, rank.device, trust_remote_code=self.trust_remote_code)
        self._limits = self._runner.limits
        self._thread = threading.Thread(target=self._compute, name="native-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenRequest]) -> None:
        assert self._limits is not None, "the engine is used before setup"
        with self._desk.changed:
            accepted = self._desk.accept(requests, self._limits)
            if accepted:
                self._inbox.append(lambda: self._accept(accepted))
                self._desk.changed.notify()

    async def poll(self, wait_s: float) -> list[Chunk]:
        return await self._desk.poll(wait_s)

    def abort(self, ids: Sequence[str]) -> None:
        unwanted = list(ids)
        with self._desk.changed:
            self._inbox.append(lambda: self._abort(unwanted))
            self._desk.changed.notify()

    async def update(self, version: Version, buckets: Iterator[Bucket], cache: Literal["keep", "recompute"]) -> Checksums:
        return await self._call(lambda: self._update(version, buckets, cache))

    async def pause(self) -> None:
        await self._call(self._pause)

    async def resume(self) -> None:
        await self._call(self._resume)

    async def sleep(self) -> None:
        await self._call(self._sleep)

    async def wake(self) -> None:
        await self._call(self._wake)

    def load(self) -> EngineLoad:
        with self._desk.changed:
            num_running = len(self._running) + len(self._filling)
            return EngineLoad(
                num_running=num_running,
                num_waiting=len(self._desk.open) - num_running,
                num_slots=self.config.num_slots,
                version=self._version,
                paused=self._paused or not self._weights_complete,
                num_tokens_total=self._num_tokens,
                busy_s_total=self._busy_s,
            )

    async def take_peak_bytes(self) -> int:
        from drumroll.backends.offload import take_peak_bytes

        return take_peak_bytes(str(self._ready_runner.device))

    async def close(self) -> None:
        with self._desk.changed:
            self._desk.stop(WorkerError("the native engine is closed."), broken=False)
            self._desk.changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._runner = None

    # -- Between the threads

    @property
    def _ready_runner(self) -> Runner:
        assert self._runner is not None, "the engine is used before setup or after close"
        return self._runner

    async def _call(self, function: Callable[[], T]) -> T:
        """Have the compute thread do something between two steps, and wait for its result."""
        assert self._thread is not None, "the engine is used before setup"
        future: Future[T] = Future()
        with self._desk.changed:
            if self._desk.stopped is not None:
                raise self._desk.stopped
            self._calls.add(future)
            self._inbox.append(lambda: _settle(future, function))
            self._desk.changed.notify()
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    # -- The compute thread

    def _compute(self) -> None:
        """Steps as long as there is something to do; waits for the inbox or the next deadline otherwise."""
        import torch

        runner = self._ready_runner
        if runner.device.type == "cpu":
            torch.set_num_threads(self.config.threads)
        try:
            with torch.inference_mode():
                while self._next_actions():
                    self._expire()
                    if self._can_compute():
                        self._step(runner)
        except BaseException as error:  # whatever it is, nobody may wait for this thread any more
            reason = WorkerError(f"the native engine stopped: {type(error).__name__}: {error}")
            reason.__cause__ = error
            self._desk.stop(reason, broken=True)
        with self._desk.changed:
            for call in list(self._calls):
                if not call.done():
                    call.set_exception(self._desk.stopped or WorkerError("the native engine stopped."))

    def _step(self, runner: Runner) -> None:
        """Whoever can comes in; then a prefill call while any request needs one, else decode steps."""
        started = time.perf_counter()
        self._admit(runner)
        if self._filling:
            self._prefill(runner)
        else:
            self._decode(runner)
        self._busy_s += time.perf_counter() - started

    def _next_actions(self) -> bool:
        """Do what the inbox holds, after waiting for it when there is nothing to compute. False when the engine has stopped."""
        with self._desk.changed:
            while not self._inbox and self._desk.stopped is None and not self._can_compute() and not self._is_due():
                self._desk.changed.wait(self._deadlines[0][0] - time.monotonic() if self._deadlines else None)
            actions, self._inbox = self._inbox, deque()
        for action in actions:
            action()
        return self._desk.stopped is None

    def _can_compute(self) -> bool:
        return not self._paused and self._weights_complete and bool(self._running or self._filling or self._waiting or self._flights)

    def _is_due(self) -> bool:
        return bool(self._deadlines) and self._deadlines[0][0] <= time.monotonic()

    def _accept(self, entries: list[Request]) -> None:
        for entry in entries:
            self._waiting.append(entry)
            if entry.deadline is not None:
                heapq.heappush(self._deadlines, (entry.deadline, entry.id))

    def _abort(self, ids: list[str]) -> None:
        for unwanted in ids:
            entry = self._desk.open.get(unwanted)
            if entry is not None:
                self._finish(entry, "aborted")

    def _expire(self) -> None:
        while self._is_due():
            deadline, request_id = heapq.heappop(self._deadlines)
            entry = self._desk.open.get(request_id)
            if entry is not None and entry.deadline == deadline:
                self._finish(entry, "deadline")

    def _finish(self, entry: Request, reason: FinishReason, error: str = "") -> None:
        """The request leaves, wherever it stands; its last chunk waits for the next poll."""
        with self._desk.changed:
            if entry.slot < 0:
                self._waiting.remove(entry)
            else:
                was_running = self._running.pop(entry.slot, None) is not None
                if not was_running:
                    self._filling.remove(entry)
                self._ready_runner.leave(entry, keep=was_running and reason in ("stop", "length"))
            if entry.lane >= 0:
                heapq.heappush(self._lanes, entry.lane)
            self._desk.finish(entry, reason, error)

    def _admit(self, runner: Runner) -> None:
        """Waiting requests take slots, in their order, as long as there is room."""
        with self._desk.changed:
            while self._waiting and runner.admit(self._waiting[0]):
                entry = self._waiting.popleft()
                self._filling.append(entry)
                if entry.lane < 0:
                    entry.lane, entry.started = heapq.heappop(self._lanes), time.time()

    def _prefill(self, runner: Runner) -> None:
        """One call; whoever needs no further one starts to run."""
        runner.fill(self._filling)
        with self._desk.changed:
            full = [entry for entry in self._filling if not entry.num_to_fill]
            self._filling = deque(entry for entry in self._filling if entry.num_to_fill)
            self._running.update({entry.slot: entry for entry in full})
        runner.enter(full)

    def _decode(self, runner: Runner) -> None:
        """The next tokens of every running request."""
        if self._running:
            self._make_room(runner)
        flight = None
        if self._running:
            if runner.tidy(self._running):
                with self._desk.changed:
                    self._running = {entry.slot: entry for entry in self._running.values()}
            flight = runner.launch(self._running)
        if flight is not None:
            self._flights.append((flight, dict(self._running)))
        if self._flights and (flight is None or len(self._flights) > runner.num_ahead):
            self._land(runner)

    def _make_room(self, runner: Runner) -> None:
        """Requests whose next tokens have no place go back to the queue, the latest first, and are computed again from their tokens."""
        while runner.make_room(list(self._running.values())):
            self._drain()  # what is under way may end requests, and their tokens count
            for entry in runner.make_room(list(self._running.values())):
                with self._desk.changed:
                    del self._running[entry.slot]
                    runner.leave(entry, keep=True)
                    self._send_back(entry)

    def _drain(self) -> None:
        """Read everything that is under way."""
        while self._flights:
            self._land(self._ready_runner)

    def _land(self, runner: Runner) -> None:
        """Read the oldest steps; tokens of whoever has left meanwhile, and behind the end of a reply, count for nothing."""
        flight, took_part = self._flights.popleft()
        sampled = runner.read(flight)
        step = self._version.step
        done: list[tuple[Request, FinishReason, str]] = []
        with self._desk.changed:
            for slot, entry in took_part.items():
                if self._running.get(slot) is not entry:
                    continue
                num_before = len(entry.tokens)
                outcome = entry.extend(sampled.ids[slot], sampled.logp[slot], step)
                self._num_tokens += len(entry.tokens) - num_before
                if outcome == "error":
                    runner.wipe(entry)
                    done.append((entry, "error", f"request '{entry.id}': the model's logits are not finite. Are its weights?"))
                elif outcome is not None:
                    done.append((entry, outcome, ""))
            for entry, reason, error in done:
                self._finish(entry, reason, error)

    # -- What `update`, `pause` and the others do in the compute thread

    def _update(self, version: Version, buckets: Iterator[Bucket], cache: Literal["keep", "recompute"]) -> Checksums:
        if self._asleep:
            raise WeightSyncError(f"version {version} was refused: the engine is asleep. Wake it first.")
        if version < self._version:
            raise WeightSyncError(f"version {version} was refused: it is older than {self._version}, which the engine serves.")
        self._drain()
        self._weights_complete = False
        sums = self._ready_runner.take_weights(buckets)
        if cache == "recompute":
            self._refill()
        self._ready_runner.forget(sessions=cache == "recompute")
        self._version = version
        self._weights_complete = True
        return sums

    def _refill(self) -> None:
        """Compute the keys and values of every request anew, from its tokens."""
        with self._desk.changed:
            for entry in (*self._running.values(), *self._filling):
                self._ready_runner.leave(entry, keep=False)
                self._send_back(entry)
            self._running.clear()
            self._filling.clear()

    def _send_back(self, entry: Request) -> None:
        """To the head of the queue, without what it held. Called with the lock held."""
        heapq.heappush(self._lanes, entry.lane)
        entry.lose_slot()
        self._waiting.appendleft(entry)

    def _pause(self) -> None:
        self._drain()
        self._paused = True

    def _resume(self) -> None:
        if self._asleep or not self._weights_complete:
            raise WeightSyncError(
                "resume was refused: the engine is asleep, or has no complete weights (none yet, or a failed update). Wake or update it."
            )
        self._paused = False

    def _sleep(self) -> None:
        if self._asleep:
            return
        self._drain()
        self._paused = True
        self._asleep = True
        self._refill()
        self._ready_runner.forget(sessions=True)
        self._ready_runner.sleep()

    def _wake(self) -> None:
        if self._asleep:
            self._ready_runner.wake()
            self._asleep = False


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """Run it for whoever waits on the future; what it raises is theirs."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
