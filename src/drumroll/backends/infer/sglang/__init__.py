"""SGLang's engine behind drumroll's contract (see `remote`).

Tokens are sampled by drumroll's own function inside SGLang (`worker.Sampler`), so that engine and trainer speak of one distribution, and
a token's noise depends on its request's seed and its position alone. A version's requests share prefixes with one another and with no
older ones (`cache_salt`). Importing this loads neither torch nor SGLang: `setup` does.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import itertools
import json
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from drumroll.backends.infer.remote import Piece, RemoteEngine, check_version
from drumroll.backends.infer.request import Request
from drumroll.backends.lent import Lent
from drumroll.config.models import EngineConfig
from drumroll.errors import WeightSyncError, WorkerError
from drumroll.registry import register

SUPPORTED = ((0, 5, 21), (0, 5, 24))
"""Versions of SGLang from the first up to, and not with, the second."""

LOADER = "drumroll.backends.infer.sglang.worker.take_weights"
SAMPLES_HERE = "DRUMROLL_SGLANG"
"""The environment variable that tells SGLang's processes to sample by drumroll's function."""

SPARE_TOKENS = 8
"""SGLang keeps a few tokens of its context for itself."""
WATCH_S = 0.5
END_S = 60.0


def check_installed() -> None:
    """Raise a `PluginError` unless a supported SGLang is here."""
    check_version("sglang", ("sglang",), SUPPORTED)


@register.infer_backend("sglang")
class Sglang(RemoteEngine):
    """SGLang in processes of its own, which this one feeds."""

    class Config(EngineConfig):
        """Options of the SGLang engine."""

        kind: str = "sglang"
        memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.85
        """Share of the GPU's memory that SGLang may use for weights, keys and values (its `mem_fraction_static`)."""
        cache_tokens: PositiveInt | None = None
        """Tokens whose keys and values have room, in place of what `memory_share` leaves; on the CPU `num_slots` × `context_tokens`."""
        eager: bool = False
        """No CUDA graphs: starts sooner, generates slower."""
        deterministic: bool = False
        """Kernels whose rounding does not depend on a request's neighbours, on a GPU: slower, and the same seed gives the same tokens."""
        options: dict[str, Any] = {}
        """More of SGLang's `ServerArgs`, such as `{chunked_prefill_size: 8192}`."""

        @model_validator(mode="after")
        def sglang_is_installed(self) -> Self:
            check_installed()
            return self

    config: Config
    package: ClassVar[str] = "SGLang"
    exact_resume: ClassVar[bool] = False
    with_experts: ClassVar[frozenset[str]] = frozenset({"qwen3_moe"})

    def __init__(self, config: Config, model_folder: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
        super().__init__(config, model_folder, dtype, trust_remote_code=trust_remote_code)
        self._engine: Any = None
        self._names = itertools.count()
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def refusal(cls, config: EngineConfig, facts: Mapping[str, Any]) -> str:
        window, context = facts.get("sliding_window"), config.context_tokens or facts.get("max_position_embeddings") or 0
        if facts.get("model_type") == "mistral" and window and window < context:
            return (
                f"SGLang attends to all tokens of a Mistral model, and this one was made to see {window} of them. Set "
                f"`engine.context_tokens` to {window} at most"
            )
        return super().refusal(config, facts)

    async def _open(self) -> None:
        os.environ[SAMPLES_HERE] = "1"
        # The context has room for what SGLang keeps for itself, which the model never sees.
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if not self._device.startswith("cuda"):
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        # A process of SGLang's that fails sends its parent a SIGQUIT, which would end it; `_keep_watch` notices its end in another way.
        ctypes.CDLL(None).signal(int(signal.SIGQUIT), 1)  # 1: ignore. Python's own `signal` works in a process's main thread alone
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(**self._arguments())
        atexit.unregister(self._engine.shutdown)  # it would end every child of this process, whoever started it
        self._watch = asyncio.create_task(self._keep_watch())

    def _arguments(self) -> dict[str, Any]:
        assert self._limits is not None
        config, on_gpu = self.config, self._device.startswith("cuda")
        num_tokens = config.cache_tokens
        if not on_gpu:
            num_tokens = num_tokens or config.num_slots * (self._limits.context + SPARE_TOKENS)
        arguments: dict[str, Any] = {
            "model_path": str(self.model_folder),
            "dtype": self.dtype,
            "device": "cuda" if on_gpu else "cpu",
            "load_format": "dummy",  # whatever is served comes by `update`
            "skip_tokenizer_init": True,
            "trust_remote_code": self.trust_remote_code,
            "context_length": self._limits.context + SPARE_TOKENS,
            "max_running_requests": config.num_slots,
            "max_total_tokens": num_tokens,
            "tp_size": self._num_devices,
            "mem_fraction_static": config.memory_share,
            "enable_deterministic_inference": config.deterministic and on_gpu,
            "sampling_backend": "pytorch",  # the name that drumroll's sampler takes the place of
            "incremental_streaming_output": True,
            "disable_overlap_schedule": True,  # or the tokens of a step that an update interrupts would come after it
            "disable_cuda_graph": config.eager or not on_gpu,
            "enable_memory_saver": on_gpu,
            "custom_weight_loader": [LOADER],
            "grammar_backend": "none",
            "random_seed": 0,
        }
        if not on_gpu:
            arguments |= {"attention_backend": "torch_native", "disable_radix_cache": True}
        return arguments | config.options

    async def _keep_watch(self) -> None:
        """Notice the end of a process that nobody asked to end."""
        while not self._has_died():
            await asyncio.sleep(WATCH_S)
        self._die(WorkerError("one of its processes has ended. What it wrote tells why."))

    def _has_died(self) -> bool:
        import psutil

        def runs(pid: int) -> bool:
            with suppress(psutil.NoSuchProcess):
                return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
            return False

        return not all(runs(pid) for pid in self._engine.get_all_child_pids())

    async def _shut(self) -> None:
        import psutil

        if self._watch is not None:
            self._watch.cancel()
        manager = self._engine.tokenizer_manager
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        for task in [*manager.asyncio_tasks]:
            task.cancel()
        processes: list[Any] = []
        for pid in self._engine.get_all_child_pids():
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                processes += [parent, *parent.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, processes, END_S)
        self._engine = None

    async def _generate(self, entry: Request) -> AsyncGenerator[Piece, None]:
        stream = await self._engine.async_generate(
            input_ids=list(entry.tokens),
            sampling_params=_sampling(entry),
            return_logprob=True,
            stream=True,
            rid=f"{id(self)}-{next(self._names)}",
            cache_salt=str(self._version),
        )
        try:
            async for output in stream:
                facts = output["meta_info"]
                logp = [value for value, _, _ in facts["output_token_logprobs"]]
                reason = facts["finish_reason"]
                yield Piece(list(output["output_ids"]), logp, json.dumps(reason) if reason is not None else "")
        finally:
            await stream.aclose()

    async def _take_weights(self, lent: Lent) -> int:
        import torch
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput, UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        from drumroll.backends.infer.sglang.worker import Answers

        manager = self._engine.tokenizer_manager
        with Answers(self._num_devices) as answers:
            letter = [(answers.address(lent), torch.zeros(1))]  # SGLang passes names and tensors on; this name says where the tensors are
            payload = [MultiprocessingSerializer.serialize(letter) for _ in range(self._num_devices)]
            outcomes = [
                await manager.begin_weight_update(BeginWeightUpdateReqInput(), None),
                await manager.update_weights_from_tensor(
                    UpdateWeightsFromTensorReqInput(serialized_named_tensors=payload, load_format=LOADER, flush_cache=False), None
                ),
                await manager.end_weight_update(EndWeightUpdateReqInput(), None),
            ]
            for success, message in outcomes:
                if not success:
                    raise WeightSyncError(f"SGLang refused the weights: {message}")
            return answers.peak_bytes()

    async def _stand_still(self) -> None:
        await self._halt("in_place")

    async def _forget(self) -> None:
        await self._halt("retract")
        if not (await self._engine.tokenizer_manager.flush_cache()).success:
            raise WorkerError("SGLang did not give up its keys and values.")

    async def _halt(self, mode: Literal["in_place", "retract"]) -> None:
        """Returns when SGLang has heard of it, and everything that it said before has come here."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
        await self._engine.tokenizer_manager.get_internal_state()
        for _ in range(8):  # until the requests' own tasks have taken what arrived for them
            await asyncio.sleep(0)

    async def _go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())

    async def _release(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._engine.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"]), None)

    async def _take_back(self, part: Literal["weights", "cache"]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        tags = ["weights" if part == "weights" else "kv_cache"]
        await self._engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)


def _sampling(entry: Request) -> dict[str, Any]:
    """SGLang's parameters for what is left of a request."""
    sampling = entry.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "sampling_seed": entry.seed & (2**63 - 1),
        "max_new_tokens": entry.num_left,
        "stop_token_ids": sorted(entry.stop_ids),
        "no_stop_trim": True,
    }
