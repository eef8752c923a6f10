"""Which network interface collectives are to use: the libraries choose by themselves, and not always the one that Ray uses."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915
"""The `ioctl` that asks a network interface for its IPv4 address. Linux only."""


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where none says so."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def address_towards(host: str, port: int) -> str | None:
    """This machine's own address on the way to another; None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # a datagram socket: nothing is sent
        except OSError:
            return None
        return str(probe.getsockname()[0])
