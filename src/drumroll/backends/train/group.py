"""How the ranks of a role find and hear each other: torch process groups over gloo (CPU) or NCCL (CUDA)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from drumroll.backends.network import address_towards, interface_of
from drumroll.types import RankInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class RankGroup:
    """This rank's membership. One rank alone needs no network."""

    def __init__(self, rank: RankInfo, timeout_s: float) -> None:
        self.rank = rank.rank
        self.world = rank.world
        self._device = torch.device(rank.device)
        self._joined = rank.world > 1
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        if self._joined:
            store = _meet(rank, self._timeout)
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world, timeout=self._timeout)

    def of(self, ranks: Sequence[int]) -> ProcessGroup:
        """Collective among these ranks, of which this is one: they can now have collectives of their own. However many groups there are in
        all, a rank joins its own only; all ranks of a group ask for it at the same point of their lives."""
        if len(ranks) == self.world:
            group = dist.group.WORLD
            assert group is not None, "a group needs ranks that are connected"
            return group
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(key, timeout=self._timeout, use_local_synchronization=True)
        return self._groups[key]

    def mesh(self, groups: Sequence[ProcessGroup], ranks: Tensor) -> DeviceMesh:
        """These ranks as torch's `DeviceMesh`, with this rank's group along each axis."""
        from torch.distributed.device_mesh import DeviceMesh

        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self._device.type)
        return DeviceMesh.from_group(list(groups), self._device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))

    def gather(self, value: T) -> list[T]:
        """Collective: every rank's small value, in the order of the ranks."""
        if self.world == 1:
            return [value]
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def total(self, value: Tensor) -> float:
        """Collective: the sum of every rank's number."""
        if self.world > 1:
            dist.all_reduce(value)
        return float(value)

    def leave(self) -> None:
        if self._joined:
            self._groups.clear()
            dist.destroy_process_group()
            self._joined = False


def _meet(rank: RankInfo, timeout: timedelta) -> Store:
    """The ranks' shared store at `rank.rendezvous`, and collectives on the interface that leads there.

    Rank 0 listens on the rendezvous address alone: torch by itself would listen on every interface of the machine.
    """
    host, _, port_text = rank.rendezvous.rpartition(":")
    assert port_text.isdigit(), f"{rank.world} ranks need a rendezvous 'host:port', got '{rank.rendezvous}'"
    port = int(port_text)
    listener = socket.create_server((host, port), backlog=rank.world) if rank.rank == 0 else None
    store = TCPStore(
        host,
        port,
        rank.world,
        is_master=rank.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    own = address_towards(host, port)
    interface = None if own is None else interface_of(own)
    if interface is not None:
        # The only way to tell either library; what the user has set wins.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return store
