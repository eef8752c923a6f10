"""How weights travel between workers: the trainer's and the engine's halves of `weights`. Runs in workers; needs torch.

Rank 0 of the trainers fills buckets, two of them in turn:

    shared memory   anonymous files (memfd) that engines of the same node open through the sender's process. They have no
                    name, so nothing can be left behind whichever process dies, and no size limit of /dev/shm applies.
    device memory   of a GPU that trainer and engines share (CUDA IPC); only what stands in the buckets' `meta` takes the way above
    broadcast       a collective group of rank 0 and the engines of other nodes, apart from the trainers' own

    control block   [published, state, key, _, data bytes 0, meta bytes 0, data bytes 1, meta bytes 1, consumed by engine 0, 1, ...]

A bucket's `meta` is JSON: name, dtype, shape, offset and checksum of each tensor. A bucket is filled again when every engine
has consumed it, so host memory grows by two buckets (or by twice the largest tensor, if that is larger), not by a model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import ray
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from drumroll.backends.checksum import begin_checksum, checksum, checksums
from drumroll.backends.infer.base import Bucket, Checksums
from drumroll.cluster.host import seat
from drumroll.cluster.weights import Cache, Offer, Receipt, Sent, Transport
from drumroll.errors import WeightSyncError
from drumroll.types import RankInfo, Version

dist: Any = torch.distributed
"""Its type stubs lack the stores and groups used here."""

CPU = torch.device("cpu")
NUM_BUCKETS = 2
ALIGNMENT = 64
POLL_S = 0.0005
JOIN_S = 30.0
"""Members of a group must meet within this time."""

PUBLISHED, STATE, KEY, SIZES, CONSUMED = 0, 1, 2, 4, 8
OPEN, FINISHED, FAILED = 0, 1, 2
END, GONE = -1, 2**62
"""Data bytes that end a broadcast; consumed by an engine that reads no more."""


class SendsWeights:
    """For the trainer's worker class.

    class TrainWorker(SendsWeights):
        def __init__(self, rank: RankInfo, ...) -> None:
            self.rank = rank
            self.backend = ...     # its `weights()` is collective: every rank iterates, rank 0 sends
    """

    rank: RankInfo
    backend: _HasWeights
    _outbox: _Outbox | None = None
    _group: _Group | None = None
    _sample: Tensor | None = None

    def lend_sample(self) -> Sample | None:
        """Rank 0: a few bytes of its GPU for others to read, if it has one."""
        device = torch.device(self.rank.device)
        if device.type != "cuda":
            return None
        self._sample = torch.randint(256, (64,), dtype=torch.uint8, device=device)
        return Sample(str(torch.cuda.get_device_properties(device).uuid), lend(self._sample), checksum(self._sample))

    def open_weights(
        self, version: Version, *, num_shared: int, on_device: bool, group: str, group_size: int, bucket_bytes: int, patience_s: float
    ) -> Offer:
        """Rank 0: make room for one version."""
        self._close_weights()
        if self._group is not None and group not in ("", self._group.name):
            self._group.close()
            self._group = None
        if group and self._group is None:
            self._group = _Group.listen(group, group_size, self.rank.device, patience_s)
        self._outbox = _Outbox(num_shared, self._group if group else None, bucket_bytes, patience_s, self.rank.device if on_device else "")
        return self._outbox.offer(version, self.rank.node)

    def send_weights(self, offer: Offer) -> Sent | None:
        """Every rank: iterate over the weights. Rank 0 sends them and returns when every engine is through."""
        if self.rank.rank > 0:
            for _ in self.backend.weights():
                pass
            return None
        outbox = self._outbox
        assert outbox is not None, "open_weights comes first"
        try:
            outbox.connect()
            for name, tensor in self.backend.weights():
                outbox.add(name, tensor)
            sent = replace(outbox.finish(), peak_bytes=_take_peak_bytes(self.rank.device))
        except BaseException:
            outbox.fail()
            raise
        finally:
            self._close_weights()
        if sent.broadcast_error:
            self._group = None
        return sent

    def digest(self) -> str:
        """Every rank: what `Sent.digest` would be, without sending anything."""
        return digest({name: checksum(tensor) for name, tensor in self.backend.weights()})

    async def release_weights(self, index: int) -> None:
        """Wait no longer for an engine that reads shared memory. On the event loop: the compute thread is sending."""
        if self._outbox is not None:
            self._outbox.release(index)

    async def abort_weights(self) -> None:
        """Make the engines give up, while the compute thread may be stuck in a collective of the trainers."""
        if self._outbox is not None:
            self._outbox.fail()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _close_weights(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None


class ReceivesWeights:
    """For the engine's worker class.

    class InferWorker(ReceivesWeights):
        def __init__(self, rank: RankInfo, ...) -> None:
            self.rank = rank
            self.backend = ...     # an InferBackend
    """

    rank: RankInfo
    backend: _TakesWeights
    _group: _Group | None = None

    async def can_borrow(self, sample: Sample) -> bool:
        """Whether this engine is on the GPU that the sample is on, and reads it as it is."""
        device = torch.device(self.rank.device)
        if device.type != "cuda" or str(torch.cuda.get_device_properties(device).uuid) != sample.gpu:
            return False
        try:
            return checksum(borrow(sample.loan, device)) == sample.checksum
        except RuntimeError:  # drivers, containers and virtual machines that do not share memory between processes
            return False

    async def receive_weights(self, offer: Offer, index: int, transport: Transport, cache: Cache) -> Receipt:
        """Take one version; on any doubt about what arrived, pause the engine and say which tensor."""
        where = seat(self.rank.role, self.rank.rank, self.rank.node)
        inbox = _Inbox()
        if transport != "broadcast":
            if offer.node != self.rank.node:
                raise WeightSyncError(
                    f"shared memory of node {offer.node[:8]} cannot be read on node {self.rank.node[:8]}: use the broadcast transport."
                )
            buckets = inbox.shared(offer, index, torch.device(self.rank.device))
        else:
            if self._group is None or self._group.name != offer.group:
                self._leave_group()
                self._group = await asyncio.to_thread(_Group.join, offer, index, self.rank.device)
            buckets = inbox.broadcast(self._group)
        try:
            with closing(buckets):
                received = await self.backend.update(offer.version, buckets, cache)
            compare(inbox.expected, received, where)
        except BaseException:
            self._leave_group()
            with suppress(Exception):
                await self.backend.pause()
            raise
        return Receipt(offer.version, digest(received), _take_peak_bytes(self.rank.device))

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


Loan = list[Any]
"""GPU memory of another process, as JSON holds it."""


class Sample(NamedTuple):
    """Whose GPU memory it is, and what stands there."""

    gpu: str
    loan: Loan
    checksum: int


def lend(tensor: Tensor) -> Loan:
    """The memory of a tensor on a GPU, for a process on the same GPU."""
    return [part.hex() if isinstance(part, bytes) else part for part in tensor.untyped_storage()._share_cuda_()]  # type: ignore[no-untyped-call]


def borrow(loan: Loan, device: torch.device) -> Tensor:
    """The bytes of such a tensor, which must not be freed meanwhile."""
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in loan]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class _HasWeights(Protocol):
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


class _TakesWeights(Protocol):
    async def update(self, version: Version, buckets: Iterator[Bucket], cache: Literal["keep", "recompute"]) -> Checksums: ...

    async def pause(self) -> None: ...


def _take_peak_bytes(device: str) -> int:
    """The most GPU memory that this process had in use since the last time; 0 without a GPU."""
    if not device.startswith("cuda"):
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


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


class _Outbox:
    """Buckets on their way out, on trainer rank 0, for one version."""

    def __init__(self, num_shared: int, group: _Group | None, bucket_bytes: int, deadline_s: float, device: str = "") -> None:
        """With a `device`, buckets stay there."""
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

    def offer(self, version: Version, node: str) -> Offer:
        return Offer(
            version=version,
            node=node,
            pid=os.getpid(),
            key=self._key,
            files=tuple(self._fds),
            on_device=bool(self.device),
            group=self.group.name if self.group else "",
            group_size=self.group.size if self.group else 0,
            group_address=self.group.address if self.group else "",
            backend=self.group.backend if self.group else "gloo",
            deadline_s=self.deadline_s,
        )

    def connect(self) -> None:
        self._guarded(_Group.connect)

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the bucket that is being filled, after sending that if it is full."""
        data = tensor.detach().reshape(-1)
        offset = math.ceil(self._used / ALIGNMENT) * ALIGNMENT
        if self._entries and offset + data.nbytes > self.bucket_bytes:
            self._flush()
            offset = 0
        if not self._entries:
            self._claim(max(self.bucket_bytes, data.nbytes))
        buffer = self._buffers[self._count % NUM_BUCKETS]
        assert buffer is not None
        buffer[offset : offset + data.nbytes].copy_(data.view(torch.uint8))
        self.num_bytes += data.nbytes
        self._entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        self._begun.append(begin_checksum(tensor))
        self._used = offset + data.nbytes

    def finish(self) -> Sent:
        """Send what is left and wait until every engine has read everything."""
        if self._entries:
            self._flush()
        self._wait_for_engines(0)
        self._control[STATE] = FINISHED
        self._guarded(lambda group: group.send(torch.tensor([END, 0]))[0].wait())
        self._wait_for_engines(self._count)
        return Sent(len(self.sums), self.num_bytes, digest(self.sums), self.broadcast_error)

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

    def _claim(self, num_bytes: int) -> None:
        """Wait until the bucket before last is free, and make its room large enough."""
        number, place = self._count, self._count % NUM_BUCKETS
        self._wait_for_engines(number - NUM_BUCKETS + 1)
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

    def _wait_for_engines(self, count: int) -> None:
        consumed = self._control[CONSUMED : CONSUMED + self.num_shared]

        def ready() -> bool:
            if self._given_up:
                raise WeightSyncError("the weight sync was given up.")
            return bool((consumed >= count).all())

        if not _wait_until(ready, self.deadline):
            slow = [int(index) for index in np.flatnonzero(consumed < count)]
            raise WeightSyncError(f"engines {slow} on this node did not read bucket {count - 1} within {self.deadline_s:g} s.")

    def _guarded(self, action: Callable[[_Group], Any]) -> None:
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


class _Inbox:
    """Buckets as they arrive, on an engine, and what the sender says they hold."""

    def __init__(self) -> None:
        self.expected: Checksums = {}

    def shared(self, offer: Offer, index: int, device: torch.device = CPU) -> Generator[Bucket, None, None]:
        """Views of the sender's memory; each is given back when the next is asked for."""
        try:
            files = [os.open(f"/proc/{offer.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC) for fd in offer.files]
        except OSError as error:
            raise WeightSyncError(f"shared memory of process {offer.pid} cannot be opened: {error}. Has the trainer ended?") from error
        try:
            control = _control_block(files[0])
            if control[KEY] != offer.key:
                raise WeightSyncError(f"process {offer.pid} holds other shared memory than it offered.")
            try:
                yield from self._published(offer, control, files[1:], index, device)
            finally:
                control[CONSUMED + index] = GONE
        finally:
            for fd in files:
                os.close(fd)

    def _published(
        self, offer: Offer, control: NDArray[np.int64], files: list[int], index: int, device: torch.device
    ) -> Generator[Bucket, None, None]:
        deadline = time.monotonic() + offer.deadline_s
        count = 0
        while True:

            def ready(count: int = count) -> bool:
                if not os.path.exists(f"/proc/{offer.pid}"):
                    raise WeightSyncError("the sending trainer's process is gone.")
                return bool(control[PUBLISHED] > count or control[STATE] != OPEN)

            if not _wait_until(ready, deadline):
                raise WeightSyncError(f"bucket {count} did not come within {offer.deadline_s:g} s.")
            if control[STATE] == FAILED:
                raise WeightSyncError("the sending trainer gave up.")
            if control[PUBLISHED] <= count:
                return
            place = count % NUM_BUCKETS
            data_bytes, meta_bytes = control[SIZES + 2 * place : SIZES + 2 * place + 2].tolist()
            meta = os.pread(files[place], meta_bytes, 0 if offer.on_device else data_bytes)
            data = torch.empty(0, dtype=torch.uint8)
            if offer.on_device:
                data = borrow(json.loads(meta)[0], device)[:data_bytes]
            elif data_bytes:  # a private mapping: an engine that writes into it changes nobody else's
                data = torch.frombuffer(mmap.mmap(files[place], data_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
            yield self._unpack(meta, data)
            count += 1
            control[CONSUMED + index] = count

    def broadcast(self, group: _Group) -> Generator[Bucket, None, None]:
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


class _Group:
    """A collective group of its own: member 0 sends, the others receive."""

    def __init__(
        self, name: str, rank: int, size: int, address: str, backend: Literal["gloo", "nccl"], device: str, deadline_s: float
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.address = address
        self.backend = backend
        self.device = device if backend == "nccl" else "cpu"
        self._timeout = timedelta(seconds=deadline_s)
        self._store: Any = None
        self._members: Any = None

    @classmethod
    def listen(cls, name: str, size: int, device: str, deadline_s: float) -> _Group:
        """The sender's end: the store that members meet at listens on the address that Ray uses, and only there."""
        address = ray.util.get_node_ip_address()
        server = socket.socket()
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        backend: Literal["gloo", "nccl"] = "nccl" if device.startswith("cuda") else "gloo"
        group = cls(name, 0, size, f"{address}:{port}", backend, device, deadline_s)
        group._store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach(), timeout=group._timeout
        )
        return group

    @classmethod
    def join(cls, offer: Offer, rank: int, device: str) -> _Group:
        """A receiver's end; returns when all members are there."""
        host, _, port = offer.group_address.rpartition(":")
        group = cls(offer.group, rank, offer.group_size, offer.group_address, offer.backend, device, offer.deadline_s)
        group._store = dist.TCPStore(host, int(port), is_master=False, timeout=min(group._timeout, timedelta(seconds=JOIN_S)))
        group.connect()
        return group

    def connect(self) -> None:
        """Meet the other members; once."""
        if self._members is not None:
            return
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._members = dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = self._timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=ray.util.get_node_ip_address())]
            self._members = dist.ProcessGroupGloo(self._store, self.rank, self.size, options)

    def send(self, *tensors: Tensor) -> list[Any]:
        """Start one broadcast for each tensor; they must not change before their work is done."""
        return [self._broadcast(tensor.to(self.device)) for tensor in tensors]

    def receive(self, count: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(count, dtype=dtype, device=self.device)
        self._broadcast(tensor).wait()
        return tensor

    def _broadcast(self, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        members = self._members
        if members is None:
            raise WeightSyncError(f"group {self.name} is closed.")
        return members.broadcast([tensor], options)

    def close(self) -> None:
        """Leave: peers that wait see the connection close."""
        members, self._members, self._store = self._members, None, None
        if members is not None:
            members.abort()


def _control_block(fd: int) -> NDArray[np.int64]:
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=np.int64)


def _wait_until(ready: Callable[[], bool], deadline: float) -> bool:
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
