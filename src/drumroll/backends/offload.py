"""Moving tensors between a GPU and host memory, fast enough to do so in every step."""

from __future__ import annotations

import torch
from torch import Tensor

from drumroll.backends.sharded import is_sharded


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device. A copy that is under way when this returns is over when `torch.cuda.synchronize` has returned.

    Host memory is page-locked, which makes copies several times as fast; torch keeps it for the next time."""
    if device.type == "cpu" and tensor.is_cuda and not is_sharded(tensor):
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait for what was moved from or to a GPU, and give the memory that it no longer needs back to others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def take_peak_bytes(device: str) -> int:
    """The most GPU memory that this process had in use since the last time; 0 without a GPU."""
    if not device.startswith("cuda"):
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
