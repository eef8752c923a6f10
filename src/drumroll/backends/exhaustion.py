"""Errors of devices, as people need them: who ran out of memory, at which stage, what was in it, and the setting to change; or which device
is gone. Imports no torch: where nobody has, no device can have failed.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from drumroll.errors import DeviceLost, DeviceMemoryError, WorkerError

if TYPE_CHECKING:
    from torch import Tensor

STAGE_OF = {
    **dict.fromkeys(("submit", "poll", "resume", "pause", "wake", "abort"), "rollout"),
    **dict.fromkeys(("logprobs", "values", "teach", "teach_each", "logprobs_of_each", "judge", "judge_imitation"), "score"),
    **dict.fromkeys(("train", "imitate"), "update"),
    **dict.fromkeys(("open_weights", "send_weights", "receive_weights", "digest"), "sync"),
}
"""The stage of a step that a worker's method belongs to."""

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "No available memory for the cache", "Not enough memory")
"""What torch, CUDA, vLLM and SGLang say, also where only their words arrive."""

FAILED_DEVICE = ("CUDA error", "CUDA driver error", "NCCL Error 1: unhandled cuda error")

NUM_TENSORS = 5


def stage_of(method: str) -> str:
    """`update` for `train`; a worker is built at the `start`; another method is a stage of its own."""
    return "start" if ":" in method else STAGE_OF.get(method, method)


def device_error(error: BaseException, role: str, rank: int, where: str, method: str) -> WorkerError | None:
    """What a worker's error says of its device; None where it says nothing of it."""
    for link in _chain(error):
        if _is_out_of_memory(link):
            return out_of_memory(link, role, rank, where, stage_of(method), largest_tensors())
        if _is_lost(link):
            device = os.environ.get("CUDA_VISIBLE_DEVICES") or "of its own"
            return DeviceLost(
                f"{where}: its device (GPU {device}) failed during {stage_of(method)} ({method}): {_first_line(link)}. A process cannot "
                f"use a GPU after such an error. Look at `nvidia-smi` and the kernel's log (dmesg, Xid) on that node; if the GPU is well, "
                f"resume the run."
            )
    return None


def out_of_memory(error: BaseException, role: str, rank: int, where: str, stage: str, largest: str) -> DeviceMemoryError:
    """The whole message, with the remote traceback behind it."""
    trace = "".join(traceback.format_exception(error)).strip()
    tensors = f" Largest tensors: {largest}." if largest else ""
    wrapped = DeviceMemoryError(
        f"{where}: out of device memory at the stage '{stage}'. {_first_line(error)}.{tensors} {advice(role, stage)} `drumroll plan` shows "
        f"what each role takes at each stage.\n\nRemote traceback:\n{trace}"
    )
    wrapped.role, wrapped.rank, wrapped.stage = role, rank, stage
    return wrapped


def advice(role: str, stage: str) -> str:
    """The settings that change how much memory a role takes at a stage, the most telling one first."""
    if role == "actor_infer":
        if stage == "sync":
            return "Set `trainer.offload: true` and `engine.offload: true`, or lower `engine.cache_tokens` (or `engine.memory_share`)."
        return (
            "Lower `engine.cache_tokens` (or `engine.memory_share`) or `engine.num_slots`, set `trainer.offload: true` if a trainer shares "
            "the device, or spread the model with `parallel.actor_infer.tp`."
        )
    if stage == "start":
        return (
            "Give the role more devices (`devices`), set `trainer.offload: true` and `engine.offload: true` if it shares them, or learn "
            "adapters alone (`trainer.lora`)."
        )
    if stage == "score":
        return "Lower `trainer.micro_batch_tokens`, or set `engine.offload: true` and `trainer.offload: true` if others share the device."
    return (
        "Lower `trainer.micro_batch_tokens`, set `trainer.gradient_checkpointing: true`, and `engine.offload: true` if an engine shares "
        "the device; or use more devices (`devices`)."
    )


def largest_tensors() -> str:
    """The tensors that take most of the device's memory (of the host's, where none is on a device), those of one kind together."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    gc.unfreeze()  # a worker hides from the collector what it began with, and that is most of it
    alive = [thing for thing in gc.get_objects() if _is_tensor(thing, torch)]
    on_device = [tensor for tensor in alive if tensor.device.type != "cpu"]
    text = summarise(on_device or alive)
    del alive, on_device
    gc.freeze()
    return text


def summarise(tensors: Iterable[Tensor]) -> str:
    """`8.0 GiB in 24 of bfloat16 [4864, 896], ...`: storages count once, whoever looks at them."""
    seen: set[int] = set()
    kinds: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or not storage.nbytes():
            continue
        seen.add(storage.data_ptr())
        kinds.setdefault((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), []).append(storage.nbytes())
    ordered = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:NUM_TENSORS]
    return ", ".join(f"{_size(sum(sizes))} in {len(sizes)} of {dtype} {list(shape)}" for (dtype, shape), sizes in ordered)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"


def _is_tensor(thing: object, torch: Any) -> bool:
    try:
        return type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_meta and thing.layout is torch.strided  # type: ignore[attr-defined]
    except Exception:  # something half built or half gone, which the collector knows all the same
        return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | ValueError | WorkerError) and any(words in str(error) for words in OUT_OF_MEMORY)


def _is_lost(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(
        ("CUDA error", "CUDA driver error", "NCCL Error 1: unhandled cuda error")
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
