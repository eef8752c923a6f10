"""Weight sync as the controller sees it: trainers publish a version, engines acknowledge it. Imports no torch.

    open    trainer rank 0 makes room: two buckets of shared memory, and a collective group where engines are elsewhere
    send    every trainer rank gathers tensor by tensor; rank 0 fills a bucket while the engines read the one before
    receive every engine takes the buckets in place, sums what it got, and acknowledges the version

Engines on rank 0's node read shared memory, or where they all are on its GPU the GPU's own; the others get the same buckets by broadcast.
Both halves are mixins for worker classes, in `transport`.
"""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from drumroll.backends.lent import Lent
from drumroll.cluster.cluster import Cluster
from drumroll.errors import WorkerError
from drumroll.types import Version

Transport = Literal["shared_memory", "device_memory", "broadcast"]
Cache = Literal["keep", "recompute"]

BUCKET_BYTES = 64 * 2**20
DEVICE_BUCKET_BYTES = 256 * 2**20
"""Buckets that stay on the GPU cost no time to fill, and each costs a few calls."""
DEADLINE_S = 600.0
ABORT_S = 5.0
"""How long the engines may take to give up a version that will not come."""

SHARED_MEMORY = hasattr(os, "memfd_create")
"""Linux has it; elsewhere every engine is served by broadcast."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective group."""

    name: str
    size: int
    address: str
    """`host:port` of the store."""
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What an engine needs to know to receive one version."""

    version: Version
    node: str
    """Ray's id of the node whose shared memory this is."""
    lent: Lent
    meeting: Meeting | None
    """Where engines of other nodes come together; None when there are none."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What trainer rank 0 sent."""

    num_tensors: int
    num_bytes: int
    digest: str
    """Of all names and checksums."""
    broadcast_error: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's acknowledgement."""

    version: Version
    digest: str


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One version, delivered and verified. `seconds` includes checksums and acknowledgements."""

    version: Version
    seconds: float
    num_bytes: int
    num_tensors: int
    digest: str
    """Of all names and checksums: two versions with the same digest have the same weights."""
    transports: dict[int, Transport] = field(default_factory=dict)
    """By engine rank."""
    failed: dict[int, str] = field(default_factory=dict)
    """Engine rank → why it lacks the version. It must serve no traffic."""

    @property
    def metrics(self) -> dict[str, float]:
        return {"sync/seconds": self.seconds, "sync/bytes": float(self.num_bytes)}


class WeightSync:
    """Hands the trainers' weights to the engines.

        sync = WeightSync(trainers, engines)     # workers made with `transport.SendsWeights` and `transport.ReceivesWeights`
        report = sync.push(Version(0, step))

    An engine that fails stands in the report, and in `failed` until a push reaches it; the others have the new version.
    """

    def __init__(
        self,
        trainers: Cluster,
        engines: Cluster,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        deadline_s: float = DEADLINE_S,
        shared_memory: bool = SHARED_MEMORY,
    ) -> None:
        self.trainers = trainers
        self.engines = engines
        self.bucket_bytes = bucket_bytes
        self.deadline_s = deadline_s
        self.shared_memory = shared_memory
        self.failed: dict[int, str] = {}
        """Engine rank → why it lacks the last version pushed to it. It must serve no traffic."""
        self._group = ""
        self._members: tuple[int, ...] = ()
        self._on_device: dict[tuple[int, ...], bool] = {}
        """Whether these engines can read what rank 0 leaves on its GPU."""

    def push(self, version: Version, *, ranks: Sequence[int] | None = None, cache: Cache = "recompute") -> SyncReport:
        """Deliver the trainers' present weights as `version` to the engines (`ranks`, or all) and wait for their word.

        Consumes one call of every trainer rank's compute thread and one update of each engine; ends when every engine has
        acknowledged or failed. Raises a trainer's own error; engines that failed stand in the report.
        """
        started = time.monotonic()
        targets = tuple(range(self.engines.world)) if ranks is None else tuple(ranks)
        home = self.trainers.handles[0].node
        shared = tuple(rank for rank in targets if self.shared_memory and self.engines.handles[rank].node == home)
        remote = tuple(rank for rank in targets if rank not in shared)
        self.failed.update({rank: f"{self.engines.handles[rank].where}: no word of version {version}" for rank in targets})
        if remote and (remote != self._members or not self._group):
            self._group, self._members = f"weights-{secrets.token_hex(4)}", remote
        on_device = not remote and self._can_stay_on_device(shared)
        offer: Offer = self.trainers.on(
            0,
            "open_weights",
            version,
            num_shared=len(shared),
            on_device=on_device,
            group=self._group if remote else "",
            group_size=len(remote) + 1,
            bucket_bytes=DEVICE_BUCKET_BYTES if on_device else self.bucket_bytes,
            patience_s=self.deadline_s,
        )
        sends = [self.trainers.submit(rank, "send_weights", offer) for rank in range(self.trainers.world)]
        near: Transport = "device_memory" if on_device else "shared_memory"
        transports: dict[int, Transport] = {rank: near if rank in shared else "broadcast" for rank in targets}
        receipts: dict[Future[Any], int] = {}
        for rank in targets:
            index = shared.index(rank) if rank in shared else remote.index(rank) + 1  # member 0 is the sender
            receipts[self.engines.submit(rank, "receive_weights", offer, index, transports[rank], cache)] = rank
        sent = self._wait(version, sends, receipts, shared, started + self.deadline_s)
        if sent.broadcast_error or any(rank in self.failed for rank in remote):
            self._group = ""  # broken collectives are never used again
        failed = {rank: self.failed[rank] for rank in targets if rank in self.failed}
        return SyncReport(
            version,
            time.monotonic() - started,
            sent.num_bytes,
            sent.num_tensors,
            sent.digest,
            transports,
            failed,
        )

    def _can_stay_on_device(self, ranks: tuple[int, ...]) -> bool:
        """Whether all of these engines are on rank 0's GPU, and can really read a sample of its memory."""
        if ranks not in self._on_device:
            sample = self.trainers.on(0, "lend_sample")
            try:
                self._on_device[ranks] = sample is not None and all(self.engines.on(rank, "can_borrow", sample) for rank in ranks)
            except WorkerError:  # an engine that is lost; the others can be asked again
                return False
        return self._on_device[ranks]

    def forget_trainers(self) -> None:
        """The trainers are others than those of the last push: nobody of them is in a collective group with the engines."""
        self._group, self._members = "", ()

    def _wait(
        self,
        version: Version,
        sends: list[Future[Any]],
        receipts: dict[Future[Any], int],
        shared: tuple[int, ...],
        deadline: float,
    ) -> Sent:
        """Watch senders and receivers. A receiver that fails is let go of, so that the sender does not wait for it; a sender
        that fails ends everything."""
        pending: set[Future[Any]] = {*sends, *receipts}
        answers: dict[int, Receipt] = {}
        while pending:
            done, pending = concurrent.futures.wait(
                pending, timeout=max(0.0, deadline - time.monotonic()), return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                error = future.exception()
                if future in receipts:
                    rank = receipts[future]
                    if error is None:
                        answers[rank] = future.result()
                    else:
                        self.failed[rank] = str(error)
                        if rank in shared:
                            self.trainers.submit(0, "release_weights", shared.index(rank))
                elif error is not None:
                    self._abort(receipts)
                    raise error
                elif future is sends[0] and future.result().broadcast_error:
                    deadline = min(deadline, time.monotonic() + ABORT_S)
            if not done:
                break
        if not sends[0].done():
            self._abort(receipts)
            raise WorkerError(f"{self.trainers.handles[0].where}: version {version} was not sent within {self.deadline_s:g} s.")
        sent: Sent = sends[0].result()
        for rank, receipt in answers.items():
            if (receipt.version, receipt.digest) == (version, sent.digest):
                del self.failed[rank]
            else:
                self.failed[rank] += f": it acknowledged {receipt.version} with digest {receipt.digest} instead of {sent.digest}"
        if sent.broadcast_error:
            for rank in self.failed.keys() & set(receipts.values()) - set(shared):
                self.failed[rank] += f" (the sender's end: {sent.broadcast_error})"
        return sent

    def _abort(self, receipts: dict[Future[Any], int]) -> None:
        """Tell rank 0, and through it the engines, to give up; then give them a moment, so that none is left inside an update."""
        self._group = ""
        with suppress(WorkerError):
            self.trainers.on(0, "abort_weights", deadline_s=ABORT_S)
        concurrent.futures.wait(receipts, timeout=ABORT_S)
