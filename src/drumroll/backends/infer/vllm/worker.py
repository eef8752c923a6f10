"""What drumroll adds to vLLM's own workers: they take weights from the memory of the process that feeds them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from drumroll.backends.infer.intake import Intake
from drumroll.backends.lent import Lent
from drumroll.backends.offload import take_peak_bytes

WATCH_S = 0.5


class DrumrollWorker:
    """Mixed into vLLM's worker class by `worker_extension_cls`; its methods are called through `collective_rpc`."""

    rank: int
    device: torch.device
    model_runner: Any

    def drumroll_take_weights(self, pid: int, key: int, files: list[int], on_device: bool, deadline_s: float) -> None:
        intake = Intake(Lent(pid, key, tuple(files), on_device, deadline_s), self.rank, self.device)
        tied = self._tied()
        self.model_runner.reload_weights(weights_iterator=intake.tensors())
        if self.device.type == "cpu":
            self._pack(tied)
        intake.check(f"vLLM's worker {self.rank}")

    def drumroll_take_peak(self) -> int:
        """The most GPU memory that was in use since the last time, without what sleeps: torch counts that as if it were there."""
        return max(0, take_peak_bytes(str(self.device)) - _asleep_bytes()) if self.device.type == "cuda" else 0

    def drumroll_stay_with(self, owner: int) -> None:
        """End with the process that owns the engine, however that ends: vLLM by itself would stay, and keep the GPU."""
        own, parent = os.getpid(), os.getppid()
        doomed = [own] if parent == owner else [parent, own]  # several workers are children of vLLM's core, a single one is the core itself

        def watch() -> None:
            while os.path.exists(f"/proc/{owner}"):
                time.sleep(WATCH_S)
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        threading.Thread(target=watch, name="drumroll-watch", daemon=True).start()

    def _pack(self, tied: tuple[Any, Any] | None) -> None:
        """On the CPU, heads that are tied and experts compute with packed weights, which a reload leaves as they were, or does not pack."""
        if tied is not None:
            head, embeddings = tied
            head.weight = embeddings.weight
            head.quant_method.process_weights_after_loading(head)
        for module in self.model_runner.get_model().modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def _tied(self) -> tuple[Any, Any] | None:
        """The model's head and the embeddings that it shares its weights with."""
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        weight = getattr(head, "weight", None)
        others = (module for module in model.modules() if module is not head and getattr(module, "weight", None) is weight)
        embeddings = None if weight is None else next(others, None)
        return None if embeddings is None else (head, embeddings)


def _asleep_bytes() -> int:
    """Of this process's memory, what vLLM has given back to the GPU for the time being."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    pieces = [] if allocator is None else list(allocator.pointer_to_data.values())
    return sum(piece.handle[1] for piece in pieces if piece.is_asleep)
