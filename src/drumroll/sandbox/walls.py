"""The kernel's walls around a guest, called through ctypes: namespaces, a root of its own, identity, limits, privileges, system calls.

Used by the zygote only, in processes with one thread. Nothing here decides in which order the walls go up (`zygote` does) or checks
that they hold (`selftest` does). A call that the kernel refuses raises an OSError, which says what was being done.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator

from drumroll.sandbox import seccomp

NOBODY = 65534
"""Who the guest is, inside and, when drumroll was started by root, outside."""

NAMESPACES = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}

READ_ONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
KEPT_OPTIONS = {"noexec": NOEXEC, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
DETACH = 2

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
TIME_ZONES = "/usr/share/zoneinfo"

NEW_ROOT = "/sys"
"""Where the new root is put together, in a mount namespace of its own: every Linux has this folder, and the guest needs nothing of it."""

SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, DROP_BOUNDING, SET_SECUREBITS, SET_NO_NEW_PRIVILEGES = 1, 4, 22, 24, 28, 38
SECUREBITS = 0xEF  # root means nothing, capabilities do not follow user ids, none may be raised; all of it locked

MEBIBYTE = 1 << 20
STACK_BYTES = 64 * MEBIBYTE
NUM_FILES = 64
NUM_INODES = 4096

libc = ctypes.CDLL(None, use_errno=True)


class FilterProgram(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def check(result: int, doing: str) -> None:
    """An OSError with the text of what was being done, where a call of the C library has failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


def unshare(names: Iterable[str]) -> None:
    flags = sum(NAMESPACES[name] for name in names)
    check(libc.unshare(flags), f"new namespaces ({', '.join(names)})")


def prctl(option: int, value: int, doing: str) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)), doing)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(libc.mount(*arguments), f"mount of {source} on {target}")


def die_with_parent() -> None:
    """A SIGKILL as soon as the parent ends. A change of user or capabilities undoes this."""
    prctl(SET_DEATH_SIGNAL, 9, "the signal at the parent's death")


# Identity.


def write_at(folder: int, path: str, text: str) -> None:
    """Writes a file of /proc, of which `folder` is an open descriptor."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"/proc/{path}: {os.strerror(error.errno or 0)}") from None
    finally:
        os.close(file)


def become_root_within(names: Iterable[str], guest: int) -> None:
    """Enters new namespaces as the root of the user namespace among them.

    Inside, user 0 is who this process was, and nothing else of the host has a name, apart from `guest` where that is another user:
    mapping a second user takes privileges over the host, which a child that stays behind has.
    """
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    uid, gid = os.geteuid(), os.getegid()
    if guest == uid:
        unshare(names)
        map_one_user(proc, 0, uid, gid)
    else:
        os.setgroups([])
        second = f"\n{guest} {guest} 1"
        with mapped_by_child(proc, f"0 {uid} 1{second}", f"0 {gid} 1{second}"):
            unshare(names)
    os.close(proc)


def map_one_user(proc: int, inside: int, uid: int, gid: int) -> None:
    """Names the only user and group of the user namespace that this process has just made. Anyone may do that for itself."""
    write_at(proc, "self/setgroups", "deny")
    write_at(proc, "self/uid_map", f"{inside} {uid} 1")
    write_at(proc, "self/gid_map", f"{inside} {gid} 1")


@contextlib.contextmanager
def mapped_by_child(proc: int, users: str, groups: str) -> Iterator[None]:
    """Has a child write the maps of this process, after the body has put it into a new user namespace."""
    read, write = os.pipe()
    owner = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(write)
            if os.read(read, 1):
                write_at(proc, f"{owner}/uid_map", users)
                write_at(proc, f"{owner}/gid_map", groups)
                status = 0
        finally:
            os._exit(status)
    os.close(read)
    try:
        yield
        os.write(write, b"m")
    finally:
        os.close(write)
        _, status = os.waitpid(child, 0)
    if status != 0:
        raise PermissionError(1, "the user map of a new namespace could not be written")


# The root.


def folders_needed() -> list[str]:
    """What Python reads at run time, outer folders first: its library, and wherever the libraries are that this process has loaded."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line}
    folders = {*sys.path, *(os.path.dirname(path) for path in loaded if path.startswith("/")), TIME_ZONES}
    return sorted(folder for folder in folders if os.path.isdir(folder))


def build_root() -> None:
    """Puts a root together that holds the standard library, shared libraries, four devices and an empty /tmp, and moves into it.

    Everything but the /tmp that each guest gets is read-only, without set-user-id programs, and gone with the mount namespace.
    """
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", NEW_ROOT, "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    shown: list[str] = []
    for path in LIBRARIES:
        if os.path.islink(path):
            os.makedirs(NEW_ROOT + os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(path), NEW_ROOT + path)
            shown.append(path)
        elif os.path.isdir(path):
            show(path, shown)
    for path in folders_needed():
        show(path, shown)
    for path in (f"{folder}/{packages}" for folder in sys.path for packages in ("site-packages", "dist-packages")):
        if os.path.isdir(path):
            mount("tmpfs", NEW_ROOT + path, "tmpfs", NOSUID | NODEV, "mode=755,size=4k")
    os.mkdir(f"{NEW_ROOT}/dev")
    for device in DEVICES:
        os.close(os.open(NEW_ROOT + device, os.O_CREAT | os.O_WRONLY, 0o444))
        mount(device, NEW_ROOT + device, "", BIND)
    os.mkdir(f"{NEW_ROOT}/tmp")
    make_read_only()
    os.chdir(NEW_ROOT)
    check(libc.pivot_root(b".", b"."), "change of the root")
    check(libc.umount2(b".", DETACH), "removal of the host's root")
    os.chdir("/")


def show(path: str, shown: list[str]) -> None:
    """Makes a folder of the host visible under its own name, unless one of `shown` above it is already."""
    if any(path == other or path.startswith(other + "/") for other in shown):
        return
    os.makedirs(NEW_ROOT + path, exist_ok=True)
    mount(path, NEW_ROOT + path, "", BIND | RECURSIVE)
    shown.append(path)


def make_read_only() -> None:
    """Closes every mount of the new root for writing. Options that the host has set on a mount stay, or the kernel refuses."""
    with open("/proc/self/mountinfo") as mounts:
        rows = [line.split()[:6] for line in mounts]
    ours = {next(row[0] for row in reversed(rows) if row[4] == NEW_ROOT)}
    for number, parent, _, _, raw, options in rows:
        if number in ours or parent in ours:
            ours.add(number)
            path = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), raw)
            kept = sum(flag for option, flag in KEPT_OPTIONS.items() if option in options.split(","))
            device = 0 if path.removeprefix(NEW_ROOT) in DEVICES else NODEV
            mount("none", path, "", REMOUNT | BIND | READ_ONLY | NOSUID | device | kept)


def mount_scratch(disk_mib: int) -> None:
    """A fresh /tmp in memory, of bounded size, as the working directory."""
    options = f"mode=700,size={disk_mib * MEBIBYTE},nr_inodes={NUM_INODES}"
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV | NOEXEC, options)
    os.chdir("/tmp")


# The process.


def set_limits(wall_s: float, memory_mib: int, disk_mib: int, num_threads: int) -> None:
    """Bounds on memory, processor time, file sizes, open files and threads. There is one process, so that they bound the whole run."""
    limits = {
        resource.RLIMIT_AS: memory_mib * MEBIBYTE,
        resource.RLIMIT_CPU: math.ceil(wall_s) + 1,
        resource.RLIMIT_FSIZE: disk_mib * MEBIBYTE,
        resource.RLIMIT_NOFILE: NUM_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if kernel() >= (5, 14):  # before, this counts all processes of the user on the host
        limits[resource.RLIMIT_NPROC] = num_threads + 1  # the process that watches the guest is in the same user namespace
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))


def drop_privileges() -> None:
    """Gives up every capability, and with them every way to get one back."""
    prctl(SET_SECUREBITS, SECUREBITS, "secure bits")
    for capability in range(64):
        if libc.prctl(DROP_BOUNDING, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break  # the kernel knows no more of them
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "giving up capabilities")
    prctl(SET_NO_NEW_PRIVILEGES, 1, "no new privileges")
    prctl(SET_DUMPABLE, 0, "hiding the process's memory")


def call_filter() -> bytes:
    """The filter of system calls for this machine."""
    machine = os.uname().machine
    if machine not in seccomp.MACHINES:
        raise OSError(errno.ENOSYS, f"a filter of system calls: none is written for {machine}, only for {' and '.join(seccomp.MACHINES)}")
    return seccomp.program(machine)


def filter_calls(code: bytes) -> None:
    """From here on, this process makes only the system calls of `seccomp.ALLOWED`."""
    arguments = (ctypes.c_ulong(2), ctypes.byref(FilterProgram(len(code) // 8, code)))
    check(libc.prctl(SET_SECCOMP, *arguments, ctypes.c_ulong(0), ctypes.c_ulong(0)), "a filter of system calls (seccomp)")
