"""What may be asked of a sandbox, and what comes back: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["exited", "killed", "timeout", "output"]
"""How a program ended: by itself; by a signal (memory, a forbidden call, a crash); out of time; printed more than allowed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. The wall clock also bounds processor time. Example: `Limits(wall_s=2.0, memory_mib=256)`."""

    wall_s: float = 10.0
    memory_mib: int = 1024
    disk_mib: int = 64
    output_bytes: int = 1 << 20
    num_threads: int = 16


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What a program printed and how it ended. Example: `ScriptRun("3\\n", "", "exited", 0, 0.01)`.

    `exit_code` is None unless the program ended by itself. Nothing in here is a verdict: the program made all of it.
    """

    stdout: str
    stderr: str
    ending: Ending
    exit_code: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Examination:
    """The verdict of tests on a program, test by test. Example: `Examination((True, False), ("", "AssertionError"), "", 0.02)`.

    `problems` has "" where a test passed. `broken` is "", or says why the tests themselves cannot be judged by; then none has passed.
    """

    passed: tuple[bool, ...]
    problems: tuple[str, ...]
    broken: str
    seconds: float
