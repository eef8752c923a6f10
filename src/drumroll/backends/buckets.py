"""Tensors on their way from one process to others, bucket by bucket: two buckets that are filled and read in turn.

    shared memory   anonymous files (memfd) that processes of the same node open through the sender's process. They have no
                    name, so nothing can be left behind whichever process dies, and no size limit of /dev/shm applies.
    device memory   of a GPU that sender and readers share (CUDA IPC); only what stands in the buckets' `meta` takes the way above
    broadcast       a collective group, for readers on other nodes

    control block   [published, state, key, _, data bytes 0, meta bytes 0, data bytes 1, meta bytes 1, consumed by reader 0, 1, ...]

A bucket's `meta` is JSON: name, dtype, shape, offset and checksum of each tensor. A bucket is filled again when every reader
has consumed it, so host memory grows by two buckets (or by twice the largest tensor, if that is larger), not by a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumroll.backends.checksum import begin_checksum, checksums
from drumroll.backends.infer.base import Bucket, Checksums
from drumroll.backends.lent import Lent
from drumroll.errors import WeightSyncError

CPU = torch.device("cpu")
NUM_BUCKETS = 2
FIRST_BYTES = 2 * 2**20
"""Of the first bucket in shared memory; each later one may be twice as large as the one before. Readers begin early, and read on while
more is written."""
ALIGNMENT = 64
POLL_S = 0.0005

PUBLISHED, STATE, KEY, SIZES, CONSUMED = 0, 1, 2, 4, 8
OPEN, FINISHED, FAILED = 0, 1, 2
END, GONE = -1, 2**62
"""Data bytes that end a broadcast; consumed by an engine that reads no more."""


class Collective(Protocol):
    """A group of processes: member 0 sends, the others receive."""

    def connect(self) -> None: ...

    def send(self, *tensors: Tensor) -> list[Any]: ...

    def receive(self, count: int, dtype: torch.dtype) -> Tensor: ...

    def close(self) -> None: ...


Loan = list[Any]
"""GPU memory of another process, as JSON holds it."""


def lend(tensor: Tensor) -> Loan:
    """The memory of a tensor on a GPU, for a process on the same GPU."""
    return [part.hex() if isinstance(part, bytes) else part for part in tensor.untyped_storage()._share_cuda_()]  # type: ignore[no-untyped-call]


def borrow(loan: Loan, device: torch.device) -> Tensor:
    """The bytes of such a tensor, which must not be freed meanwhile."""
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in loan]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def digest(sums: Checksums) -> str:
    """One short text for all names and checksums, whatever their order."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def compare(expected: Checksums, received: Checksums, where: str) -> None:
    """Raise unless every tensor arrived as it was sent."""
    for name, value in expected.items():
        if name not in received:
            raise WeightSyncError(f"{where}: tensor '{name}' was sent and the engine did not take it.")
        if received[name] != value:
            raise WeightSyncError(f"{where}: tensor '{name}' arrived damaged: checksum {received[name]}, sent {value}. Push again.")
    for name in received:
        if name not in expected:
            raise WeightSyncError(f"{where}: the engine reports a tensor '{name}' that was not sent.")


class Outbox:
    """Buckets on their way out, on trainer rank 0, for one version."""

    def __init__(self, num_shared: int, group: Collective | None, bucket_bytes: int, deadline_s: float, device: str = "") -> None:
        """With a `device`, buckets stay there. `bucket_bytes` is the most that one holds, unless a single tensor is larger."""
        self.num_shared = num_shared
        self.device = device
        self.group = group
        self.bucket_bytes = bucket_bytes
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.sums: Checksums = {}
        self.num_bytes = 0
        self.broadcast_error = ""
        self._given_up = False
        self._key = secrets.randbits(62)
        self._fds: list[int] = []
        """The control block and the buckets, where engines share memory."""
        self._control = np.zeros(CONSUMED, dtype=np.int64)
        if num_shared:
            self._fds = [os.memfd_create("drumroll-weights", os.MFD_CLOEXEC) for _ in range(1 + NUM_BUCKETS)]
            os.ftruncate(self._fds[0], 8 * (CONSUMED + num_shared))
            self._control = _control_block(self._fds[0])
        self._control[KEY] = self._key
        self._buffers: list[Tensor | None] = [None] * NUM_BUCKETS
        self._works: list[list[Any]] = [[] for _ in range(NUM_BUCKETS)]
        self._count = 0
        """Buckets published so far; the one being filled has this number."""
        self._entries: list[tuple[str, str, list[int], int]] = []
        """Name, dtype, shape and offset of what the bucket holds that is being filled."""
        self._begun: list[Tensor] = []
        """Their checksums, which the device may still be computing."""
        self._used = 0

    def lent(self) -> Lent:
        """For whoever reads them through shared memory."""
        return Lent(os.getpid(), self._key, tuple(self._fds), bool(self.device), self.deadline_s)

    def connect(self) -> None:
        self._guarded(lambda group: group.connect())

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the bucket that is being filled, after sending that if it is full."""
        data = tensor.detach().reshape(-1)
        offset = math.ceil(self._used / ALIGNMENT) * ALIGNMENT
        if self._entries and offset + data.nbytes > self._room_bytes():
            self._flush()
            offset = 0
        if not self._entries:
            self._claim(max(self._room_bytes(), data.nbytes))
        buffer = self._buffers[self._count % NUM_BUCKETS]
        assert buffer is not None
        buffer[offset : offset + data.nbytes].copy_(data.view(torch.uint8))
        self.num_bytes += data.nbytes
        self._entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        self._begun.append(begin_checksum(tensor))
        self._used = offset + data.nbytes

    def finish(self) -> None:
        """Send what is left and wait until every reader has read everything."""
        if self._entries:
            self._flush()
        self._wait_for_readers(0)
        self._control[STATE] = FINISHED
        self._guarded(lambda group: group.send(torch.tensor([END, 0]))[0].wait())
        self._wait_for_readers(self._count)

    def release(self, index: int) -> None:
        self._control[CONSUMED + index] = GONE

    def fail(self) -> None:
        """Engines that read shared memory see the state; those in the group see the connection close."""
        self._given_up = True
        self._control[STATE] = FAILED
        self._drop_group()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        self._buffers = [None] * NUM_BUCKETS

    def _room_bytes(self) -> int:
        """Of the bucket that is being filled."""
        return self.bucket_bytes if self.device else min(self.bucket_bytes, FIRST_BYTES << min(self._count, 32))

    def _claim(self, num_bytes: int) -> None:
        """Wait until the bucket before last is free, and make its room large enough."""
        number, place = self._count, self._count % NUM_BUCKETS
        self._wait_for_readers(number - NUM_BUCKETS + 1)
        self._guarded(lambda group: [work.wait() for work in self._works[place]])
        self._works[place] = []
        buffer = self._buffers[place]
        if buffer is None or buffer.nbytes < num_bytes:
            self._buffers[place] = self._room(place, num_bytes)

    def _room(self, place: int, num_bytes: int) -> Tensor:
        if not self.num_shared or self.device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device or "cpu")
        fd = self._fds[1 + place]
        os.ftruncate(fd, num_bytes)
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)

    def _flush(self) -> None:
        place = self._count % NUM_BUCKETS
        buffer = self._buffers[place]
        assert buffer is not None
        sums = checksums(self._begun)  # waits for what was copied into the bucket, too
        self.sums.update({entry[0]: value for entry, value in zip(self._entries, sums, strict=True)})
        meta = json.dumps([self._loan(buffer), [(*entry, value) for entry, value in zip(self._entries, sums, strict=True)]]).encode()
        if self.num_shared:
            os.pwrite(self._fds[1 + place], meta, 0 if self.device else self._used)
            self._control[SIZES + 2 * place : SIZES + 2 * place + 2] = self._used, len(meta)
            self._control[PUBLISHED] = self._count + 1
        data = buffer[: self._used]
        header = torch.tensor([self._used, len(meta)])
        self._guarded(
            lambda group: self._works[place].extend(group.send(header, torch.frombuffer(bytearray(meta), dtype=torch.uint8), data))
        )
        self._count += 1
        self._entries, self._begun, self._used = [], [], 0

    def _loan(self, buffer: Tensor) -> Loan | None:
        """A bucket on a GPU for whoever reads it."""
        return lend(buffer) if self.device else None

    def _wait_for_readers(self, count: int) -> None:
        consumed = self._control[CONSUMED : CONSUMED + self.num_shared]

        def ready() -> bool:
            if self._given_up:
                raise WeightSyncError("the weight sync was given up.")
            return bool((consumed >= count).all())

        if not _wait_until(ready, self.deadline):
            slow = [int(index) for index in np.flatnonzero(consumed < count)]
            raise WeightSyncError(f"readers {slow} on this node did not read bucket {count - 1} within {self.deadline_s:g} s.")

    def _guarded(self, action: Callable[[Collective], Any]) -> None:
        """Do something with the group; a failure ends the broadcast and not the shared memory."""
        if self.group is None:
            return
        try:
            action(self.group)
        except Exception as error:
            self.broadcast_error = f"{type(error).__name__}: {error}"
            self._drop_group()

    def _drop_group(self) -> None:
        if self.group is not None:
            self._works = [[] for _ in range(NUM_BUCKETS)]
            self.group.close()
            self.group = None


class Inbox:
    """Buckets as they arrive, on an engine, and what the sender says they hold."""

    def __init__(self) -> None:
        self.expected: Checksums = {}

    def shared(self, lent: Lent, index: int, device: torch.device = CPU) -> Generator[Bucket, None, None]:
        """Views of the sender's memory; each is given back when the next is asked for."""
        try:
            files = [os.open(f"/proc/{lent.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC) for fd in lent.files]
        except OSError as error:
            raise WeightSyncError(f"shared memory of process {lent.pid} cannot be opened: {error}. Has it ended?") from error
        try:
            control = _control_block(files[0])
            if control[KEY] != lent.key:
                raise WeightSyncError(f"process {lent.pid} holds other shared memory than it offered.")
            try:
                yield from self._published(lent, control, files[1:], index, device)
            finally:
                control[CONSUMED + index] = GONE
        finally:
            for fd in files:
                os.close(fd)

    def _published(
        self, lent: Lent, control: NDArray[np.int64], files: list[int], index: int, device: torch.device
    ) -> Generator[Bucket, None, None]:
        deadline = time.monotonic() + lent.deadline_s
        count = 0
        while True:

            def ready(count: int = count) -> bool:
                if not os.path.exists(f"/proc/{lent.pid}"):
                    raise WeightSyncError("the sender's process is gone.")
                return bool(control[PUBLISHED] > count or control[STATE] != OPEN)

            if not _wait_until(ready, deadline):
                raise WeightSyncError(f"bucket {count} did not come within {lent.deadline_s:g} s.")
            if control[STATE] == FAILED:
                raise WeightSyncError("the sender gave up.")
            if control[PUBLISHED] <= count:
                return
            place = count % NUM_BUCKETS
            data_bytes, meta_bytes = control[SIZES + 2 * place : SIZES + 2 * place + 2].tolist()
            meta = os.pread(files[place], meta_bytes, 0 if lent.on_device else data_bytes)
            data = torch.empty(0, dtype=torch.uint8)
            if lent.on_device:
                data = borrow(json.loads(meta)[0], device)[:data_bytes]
            elif data_bytes:  # a private mapping: an engine that writes into it changes nobody else's
                data = torch.frombuffer(mmap.mmap(files[place], data_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
            yield self._unpack(meta, data)
            count += 1
            control[CONSUMED + index] = count

    def broadcast(self, group: Collective) -> Generator[Bucket, None, None]:
        """Buckets from the collective group."""
        while True:
            data_bytes, meta_bytes = group.receive(2, torch.int64).tolist()
            if data_bytes == END:
                return
            meta = group.receive(meta_bytes, torch.uint8).cpu().numpy().tobytes()
            yield self._unpack(meta, group.receive(data_bytes, torch.uint8))

    def _unpack(self, meta: bytes, data: Tensor) -> Bucket:
        bucket: Bucket = []
        for name, dtype_name, shape, offset, value in json.loads(meta)[1]:
            dtype: torch.dtype = getattr(torch, dtype_name)
            self.expected[name] = value
            bucket.append((name, data[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)))
        return bucket


def _control_block(fd: int) -> NDArray[np.int64]:
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=np.int64)


def _wait_until(ready: Callable[[], bool], deadline: float) -> bool:
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
