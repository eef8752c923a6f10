"""The filter of system calls, run by a small interpreter of its instructions."""

import errno
import platform
import re
import struct
from pathlib import Path

import pytest

from drumroll.sandbox import seccomp

MACHINES = sorted(seccomp.MACHINES)
HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "aarch64": Path("/usr/include/asm-generic/unistd.h")}


def decide(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the kernel would answer to a call."""
    data = struct.pack("=IIQ6Q", number, audit or seccomp.MACHINES[machine][1], 0, *arguments, *(0,) * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    at, value = 0, 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        at += 1
        if operation == seccomp.LOAD:
            value = struct.unpack_from("=I", data, operand)[0]
        elif operation == seccomp.RETURN:
            return operand
        else:
            truth = {
                seccomp.JUMP_EQUAL: value == operand,
                seccomp.JUMP_AT_LEAST: value >= operand,
                seccomp.JUMP_ANY_BIT: value & operand != 0,
            }[operation]
            at += if_true if truth else if_false


def number(machine: str, name: str) -> int:
    tables = f"{seccomp.ALLOWED},{seccomp.REFUSED},{seccomp.CHECKED}"
    return seccomp.numbers(tables, seccomp.MACHINES[machine][0])[name]


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_in_the_list_are_allowed_and_no_others(machine: str) -> None:
    column = seccomp.MACHINES[machine][0]
    allowed = set(seccomp.numbers(seccomp.ALLOWED, column).values())
    refused = set(seccomp.numbers(seccomp.REFUSED, column).values())
    checked = set(seccomp.numbers(seccomp.CHECKED, column).values())
    assert not allowed & refused
    assert not allowed & checked
    for call in range(512):
        if call not in checked:
            expected = seccomp.ALLOW if call in allowed else seccomp.ERROR | (errno.EPERM if call in refused else errno.ENOSYS)
            assert decide(machine, call) == expected, call


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "argument", "good", "bad"),
    [
        ("clone", 0, 0x3D0F00, 0x1200011),  # what the C library asks for a thread, and for a process
        ("clone", 0, 0x10000, 0x10000 | 0x10000000),  # a thread, and one in a new user namespace
        ("ioctl", 1, 0x5401, 0x5412),  # is it a terminal; type into it
        ("fcntl", 1, 1030, 1031),  # a duplicate; a larger pipe
        ("prctl", 0, 15, 22),  # a thread's name; another filter
        ("prlimit64", 0, 0, 17),  # its own limits; those of another process
    ],
)
def test_some_calls_depend_on_an_argument(machine: str, name: str, argument: int, good: int, bad: int) -> None:
    call = number(machine, name)
    before = [0] * argument
    assert decide(machine, call, *before, good) == seccomp.ALLOW
    assert decide(machine, call, *before, bad) & seccomp.ERROR == seccomp.ERROR


def test_calls_in_another_numbering_end_the_process() -> None:
    assert decide("x86_64", number("x86_64", "read"), audit=0x40000003) == seccomp.KILL
    assert decide("x86_64", seccomp.X32_BIT | 1) == seccomp.KILL
    assert decide("aarch64", 1, audit=seccomp.MACHINES["x86_64"][1]) == seccomp.KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"no kernel headers at {HEADERS[machine]}")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    official = {name: int(value) for name, value in found}
    official.setdefault("newfstatat", official.get("fstatat", -1))
    tables = f"{seccomp.ALLOWED},{seccomp.REFUSED},{seccomp.CHECKED}"
    for name, value in seccomp.numbers(tables, seccomp.MACHINES[machine][0]).items():
        assert official[name] == value, name


def test_this_machine_has_a_filter() -> None:
    assert platform.machine() in seccomp.MACHINES
