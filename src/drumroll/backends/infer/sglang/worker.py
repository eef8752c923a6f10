"""What drumroll adds to SGLang's own processes: a sampler, and a loader that takes weights from the memory of the process that feeds them.

SGLang calls `plug_in` in each of its processes (an entry point of the group `sglang.srt.plugins`), and `take_weights` by its name.
A loader that raises would end SGLang's process; so this one writes down what became of the weights, for its feeder to read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from drumroll.backends import sampling
from drumroll.backends.infer.intake import Intake
from drumroll.backends.infer.sglang import SAMPLES_HERE
from drumroll.backends.lent import Lent
from drumroll.backends.offload import take_peak_bytes
from drumroll.errors import WeightSyncError

ANSWER_BYTES = 4096


def plug_in() -> None:
    """Take the place of SGLang's sampler, in processes of a drumroll engine."""
    if os.environ.get(SAMPLES_HERE) != "1":
        return
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_sampler_backend("pytorch", make_sampler)
    HookRegistry.register("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", with_seeds, HookType.AFTER)


def with_seeds(info: Any, *args: Any, **kwargs: Any) -> Any:
    """What SGLang knows of a batch's sampling, with the requests' seeds, which it leaves out unless all of it is deterministic."""
    batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "reqs"))
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor([seed or 0 for seed in seeds], dtype=torch.int64).to(info.temperatures.device, non_blocking=True)
    return info


def make_sampler() -> Any:
    """SGLang's sampler with drumroll's distribution and noise."""
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    class DrumrollSampler(Sampler):  # type: ignore[misc]
        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int]],
            positions: Tensor,
            **_: Any,
        ) -> Tensor:
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            top_k = torch.where(sampling_info.top_ks >= TOP_K_ALL, 0, sampling_info.top_ks)
            temperature = sampling_info.temperatures.view(-1)
            greedy = (top_k == 1) & (temperature == 1)  # what SGLang makes of a temperature of 0
            temperature = torch.where(greedy, 0.0, temperature)
            truncates = sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling
            logp = sampling.processed_logp(logits, temperature, sampling_info.top_ps, top_k, truncates=truncates)
            ids = sampling.sample(logp, sampling.uniform(sampling_info.sampling_seed, positions.long()), greedy)
            if return_logprob:
                found = self.output_logprob_processor.compute_logprobs(logp, top_logprobs_nums, token_ids_logprobs, ids)
                found.write_output_to(logits_output)
            ids = ids.to(torch.int32)
            self._sync_token_ids_across_tp(ids, sampling_info)
            return ids

    return DrumrollSampler()


def take_weights(model: Any, letter: Sequence[tuple[str, Tensor]]) -> None:
    """Read the buckets that the letter's one name speaks of into the model."""
    from sglang.srt.runtime_context import get_parallel

    address = json.loads(letter[0][0])
    rank, device = get_parallel().tp_rank, next(model.parameters()).device
    answer: dict[str, Any] = {"error": "", "peak_bytes": 0}
    try:
        fields = address["lent"]
        intake = Intake(Lent(**{**fields, "files": tuple(fields["files"])}), rank, device)
        model.load_weights(intake.tensors())
        intake.check(f"SGLang's process {rank}")
        answer["peak_bytes"] = take_peak_bytes(str(device))
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"[: ANSWER_BYTES // 4]
    fd = os.open(f"/proc/{address['pid']}/fd/{address['file']}", os.O_RDWR | os.O_CLOEXEC)
    os.pwrite(fd, json.dumps(answer).encode(), rank * ANSWER_BYTES)
    os.close(fd)


class Answers:
    """Memory that each of an engine's processes writes into what became of an update."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes

    def __enter__(self) -> Self:
        self._file = os.memfd_create("drumroll-answers", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self._num_processes * ANSWER_BYTES)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._file)

    def address(self, lent: Lent) -> str:
        """What a process must know to take weights, and to answer."""
        fields = {"pid": lent.pid, "key": lent.key, "files": lent.files, "on_device": lent.on_device, "deadline_s": lent.deadline_s}
        return json.dumps({"lent": fields, "pid": os.getpid(), "file": self._file})

    def peak_bytes(self) -> int:
        """The most of any process; raises what went wrong in one."""
        most = 0
        for rank in range(self._num_processes):
            text = os.pread(self._file, ANSWER_BYTES, rank * ANSWER_BYTES).rstrip(b"\0")
            answer = json.loads(text) if text else {"error": "no answer"}
            if answer["error"]:
                raise WeightSyncError(f"SGLang's process {rank}: {answer['error']}")
            most = max(most, int(answer["peak_bytes"]))
        return most
