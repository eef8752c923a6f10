"""How the ranks of a role find and hear each other: torch process groups over gloo (CPU) or NCCL (CUDA)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from drumroll.types import RankInfo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class RankGroup:
    """This rank's membership. One rank alone needs no network."""

    def __init__(self, rank: RankInfo, timeout_s: float) -> None:
        self.rank = rank.rank
        self.world = rank.world
        self._device = torch.device(rank.device)
        self._joined = rank.world > 1
        if self._joined:
            timeout = timedelta(seconds=timeout_s)
            store = _meet(rank, timeout)
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world, timeout=timeout)

    def mesh(self) -> DeviceMesh:
        """All ranks as one data-parallel axis."""
        from torch.distributed.device_mesh import DeviceMesh

        group = dist.group.WORLD
        assert group is not None, "a mesh needs a connected group"
        return DeviceMesh.from_group(group, self._device.type)

    def gather(self, value: T) -> list[T]:
        """Collective: every rank's small value, in the order of the ranks."""
        if self.world == 1:
            return [value]
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def leave(self) -> None:
        if self._joined:
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
    interface = _interface_towards(host, port)
    if interface is not None:
        # The only way to tell either library; what the user has set wins.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return store


def _interface_towards(host: str, port: int) -> str | None:
    """Name of the network interface whose address this machine uses to reach `host`; None where Linux does not say."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # a datagram socket: nothing is sent
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue  # an interface without an IPv4 address
                if answer[20:24] == own:
                    return name
        except OSError:
            pass
    return None


_SIOCGIFADDR = 0x8915
