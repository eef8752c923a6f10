"""How weights travel between workers: the trainer's and the engine's halves of `weights`. Runs in workers; needs torch.

Rank 0 of the trainers fills buckets (`backends.buckets`). Engines of its node read them through shared memory, or where the GPU is the
same, from its memory; those of other nodes get them by broadcast, in a collective group of rank 0 and them, apart from the trainers' own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import ray
import torch
import torch.distributed
from torch import Tensor

from drumroll.backends.buckets import Inbox, Loan, Outbox, borrow, compare, digest, lend
from drumroll.backends.checksum import checksum
from drumroll.backends.infer.base import Bucket, Checksums
from drumroll.backends.offload import settle, take_peak_bytes
from drumroll.cluster.host import seat
from drumroll.cluster.weights import Cache, Meeting, Offer, Receipt, Sent, Transport
from drumroll.errors import WeightSyncError
from drumroll.types import RankInfo, Version

dist: Any = torch.distributed
"""Its type stubs lack the stores and groups used here."""

JOIN_S = 30.0
"""Members of a group must meet within this time."""


class SendsWeights:
    """For the trainer's worker class.

    class TrainWorker(SendsWeights):
        def __init__(self, rank: RankInfo, ...) -> None:
            self.rank = rank
            self.backend = ...     # its `weights()` is collective: every rank iterates, rank 0 sends
    """

    rank: RankInfo
    backend: _HasWeights
    _outbox: Outbox | None = None
    _group: _Group | None = None
    _sample: Tensor | None = None

    def lend_sample(self) -> Sample | None:
        """Rank 0: a few bytes of its GPU for others to read, if it has one."""
        device = torch.device(self.rank.device)
        if device.type != "cuda":
            return None
        self._sample = torch.randint(256, (64,), dtype=torch.uint8, device=device)
        return Sample(str(torch.cuda.get_device_properties(device).uuid), lend(self._sample), checksum(self._sample))

    def make_room(self) -> None:
        """Every rank: give memory of its GPU that it keeps for itself, and does not need now, back to others."""
        settle(torch.device(self.rank.device))

    def open_weights(
        self, version: Version, *, num_shared: int, on_device: bool, group: str, group_size: int, bucket_bytes: int, patience_s: float
    ) -> Offer:
        """Rank 0: make room for one version."""
        self._close_weights()
        if self._group is not None and group not in ("", self._group.meeting.name):
            self._group.close()
            self._group = None
        if group and self._group is None:
            self._group = _Group.listen(group, group_size, self.rank.device, patience_s)
        self._outbox = Outbox(num_shared, self._group if group else None, bucket_bytes, patience_s, self.rank.device if on_device else "")
        meeting = self._group.meeting if group and self._group is not None else None
        return Offer(version, self.rank.node, self._outbox.lent(), meeting)

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
            outbox.finish()
            sent = Sent(len(outbox.sums), outbox.num_bytes, digest(outbox.sums), outbox.broadcast_error)
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

    def take_peak_bytes(self) -> int:
        """Every rank: the most GPU memory that it had in use since the last time."""
        return take_peak_bytes(self.rank.device)

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
        inbox = Inbox()
        if transport != "broadcast":
            if offer.node != self.rank.node:
                raise WeightSyncError(
                    f"shared memory of node {offer.node[:8]} cannot be read on node {self.rank.node[:8]}: use the broadcast transport."
                )
            buckets = inbox.shared(offer.lent, index, torch.device(self.rank.device))
        else:
            assert offer.meeting is not None, "a broadcast needs a group"
            if self._group is None or self._group.meeting != offer.meeting:
                self._leave_group()
                self._group = await asyncio.to_thread(_Group.join, offer.meeting, index, self.rank.device, offer.lent.deadline_s)
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
        return Receipt(offer.version, digest(received))

    async def take_peak_bytes(self) -> int:
        """The most GPU memory that this engine had in use since the last time."""
        return await self.backend.take_peak_bytes()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class Sample(NamedTuple):
    """Whose GPU memory it is, and what stands there."""

    gpu: str
    loan: Loan
    checksum: int


class _HasWeights(Protocol):
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


class _TakesWeights(Protocol):
    async def update(self, version: Version, buckets: Iterator[Bucket], cache: Literal["keep", "recompute"]) -> Checksums: ...

    async def pause(self) -> None: ...

    async def take_peak_bytes(self) -> int: ...


class _Group:
    """A collective group of its own: member 0 sends, the others receive."""

    def __init__(self, meeting: Meeting, rank: int, device: str, deadline_s: float) -> None:
        self.meeting = meeting
        self.rank = rank
        self.device = device if meeting.backend == "nccl" else "cpu"
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
        group = cls(Meeting(name, size, f"{address}:{port}", backend), 0, device, deadline_s)
        group._store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach(), timeout=group._timeout
        )
        return group

    @classmethod
    def join(cls, meeting: Meeting, rank: int, device: str, deadline_s: float) -> _Group:
        """A receiver's end; returns when all members are there."""
        host, _, port = meeting.address.rpartition(":")
        group = cls(meeting, rank, device, deadline_s)
        group._store = dist.TCPStore(host, int(port), is_master=False, timeout=min(group._timeout, timedelta(seconds=JOIN_S)))
        group.connect()
        return group

    def connect(self) -> None:
        """Meet the other members; once."""
        if self._members is not None:
            return
        if self.meeting.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._members = dist.ProcessGroupNCCL(self._store, self.rank, self.meeting.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = self._timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=ray.util.get_node_ip_address())]
            self._members = dist.ProcessGroupGloo(self._store, self.rank, self.meeting.size, options)

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
            raise WeightSyncError(f"group {self.meeting.name} is closed.")
        return members.broadcast([tensor], options)

    def close(self) -> None:
        """Leave: peers that wait see the connection close."""
        members, self._members, self._store = self._members, None, None
        if members is not None:
            members.abort()
