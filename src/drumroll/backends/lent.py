"""What a process must know to read memory that another one on its node lends. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lent:
    """Buckets of another process (see `buckets`)."""

    pid: int
    key: int
    """Stands in the shared memory too, so that a wrong one is noticed."""
    files: tuple[int, ...]
    """File descriptors in the sender's process: the control block and the buckets."""
    on_device: bool
    """Whether the buckets' data stays on the sender's GPU."""
    deadline_s: float
