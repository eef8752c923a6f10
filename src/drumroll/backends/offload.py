"""Moving tensors between a GPU and host memory, fast enough to do so in every step."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor

from drumroll.backends.sharded import is_sharded

SLAB_BYTES = 2**30
"""Memory is taken in so large pieces, for tensors of up to an eighth of that."""
ALIGNMENT = 512


class Shelf:
    """Page-locked host memory in which the tensors of a GPU wait: small ones end to end, each large one in a piece of its own size.

        shelf = Shelf()
        shelf.clear()
        waiting = [shelf.moved(tensor, cpu) for tensor in tensors]
        settle(gpu)
        ...
        tensors = [shelf.moved(tensor, gpu) for tensor in waiting]
        settle(gpu)

    Copies from and to page-locked memory are several times as fast. torch's own would take up to twice as much, because it rounds the
    memory of every tensor up to a power of two. What was taken once is kept for the next time.
    """

    def __init__(self) -> None:
        self._slabs: dict[int, list[Tensor]] = defaultdict(list)
        """By their size."""
        self._num_taken: Counter[int] = Counter()
        """How many of each size are in use."""
        self._rest: Tensor | None = None
        """What is left of the last one that small tensors share."""

    def clear(self) -> None:
        """Nothing waits here any more: the next tensors take the places of these."""
        self._num_taken.clear()
        self._rest = None

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on that device. A copy that is under way when this returns is over when `settle` has returned."""
        if device.type == "cpu" and tensor.is_cuda and not is_sharded(tensor) and tensor.is_contiguous() and tensor.numel():
            return self._place(tensor).copy_(tensor, non_blocking=True)
        return tensor.to(device, non_blocking=True)

    def _place(self, tensor: Tensor) -> Tensor:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > SLAB_BYTES // 8:
            place = self._take(num_bytes)
        else:
            if self._rest is None or len(self._rest) < num_bytes:
                self._rest = self._take(SLAB_BYTES)
            place, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return place.view(tensor.dtype).view(tensor.shape)

    def _take(self, num_bytes: int) -> Tensor:
        """A piece of this size that nothing waits in."""
        slabs = self._slabs[num_bytes]
        if self._num_taken[num_bytes] == len(slabs):
            slabs.append(_page_locked(num_bytes))
        self._num_taken[num_bytes] += 1
        return slabs[self._num_taken[num_bytes] - 1]


def _page_locked(num_bytes: int) -> Tensor:
    slab = torch.empty(num_bytes, dtype=torch.uint8)
    outcome = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
    if int(outcome):
        raise MemoryError(f"{num_bytes / 2**30:.1f} GiB of host memory could not be page-locked: {outcome}. Is so much of it free?")
    return slab


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
