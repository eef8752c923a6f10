"""The process from which every guest is forked. It runs by itself, with the standard library and this room only, and starts with
nothing: no environment, no thread, no file.

    drumroll ──plan, requests──▶ zygote ──fork──▶ warden ──fork──▶ guest
        ▲                        (own root,       (own user, mount   (process 1 of a process namespace,
        │                         no network)      namespace; clock)  no privileges, few system calls)
        └────────── ready, ending ──────────────────┘

The zygote enters namespaces and a root of its own once, imports what programs often need, and then waits for requests. A request is a
role, limits and open files; the program itself goes through one of these files, so that the zygote, whose memory every later guest
begins with, never sees it. The warden makes what is fresh for each guest, keeps the wall clock, and says how the guest ended.

Who ends when: a guest with its warden, a warden with the zygote (by the kernel's signal at the parent's death), the zygote when drumroll
ends or closes its socket. All that a guest can make lives in its namespaces, and goes with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import resource
import select
import signal
import site
import socket
import time
from collections.abc import Callable
from typing import Any

from drumroll.sandbox import guests, walls

MAX_REQUEST_BYTES = 1 << 16
MAX_REQUEST_FILES = 8
NUM_FILES = 512

FILES = {"script": (3, 0, 1, 2), "candidate": (3, 4, 5), "examiner": (3, 4, 5, 6)}
"""Role: which descriptors its files become. The first is always the payload."""

COMMON_MODULES = """
    abc array ast bisect calendar cmath collections collections.abc contextlib copy dataclasses datetime decimal enum fractions functools
    hashlib heapq io itertools json math numbers operator queue random re statistics string struct textwrap threading time traceback
    types typing unicodedata uuid zlib
"""
"""Imported before the guests are forked: no program has to wait for them."""

Job = Callable[[], None]
"""What a guest runs, once it is walled in."""


def main(descriptor: int) -> None:
    """Obeys drumroll, which is at the other end of a socket, until it ends. In a guest, this is the guest's job."""
    control = socket.socket(fileno=descriptor)
    plan = json.loads(control.recv(MAX_REQUEST_BYTES))
    drumroll = os.pidfd_open(plan["parent"])
    if os.getppid() != plan["parent"]:
        return
    plan["owner"] = os.geteuid()
    try:
        proc, code = prepare(plan)
    except OSError as error:
        control.send(json.dumps({"error": error.strerror, "errno": error.errno}).encode())
        return
    control.send(b"{}")
    job = serve(control, drumroll, plan, proc, code)
    if job is not None:
        job()


def prepare(plan: dict[str, Any]) -> tuple[int, bytes]:
    """Puts this process behind the walls that all guests share. Returns what the others take: /proc, opened, and the filter of calls."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
    for name in COMMON_MODULES.split():
        importlib.import_module(name)
    code = walls.call_filter()
    site.setquit()
    os.environ.clear()
    os.umask(0o022)
    walls.become_root_within([name for name in plan["walls"] if name in walls.NAMESPACES and name != "pid"], plan["guest"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens that have ended need no one to wait for them
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    if "root" in plan["walls"]:
        walls.build_root()
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    gc.collect()
    gc.freeze()
    return proc, code


def serve(control: socket.socket, drumroll: int, plan: dict[str, Any], proc: int, code: bytes) -> Job | None:
    """Forks a warden for each request. Returns None when drumroll has gone, and a job in the guests."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(drumroll, select.POLLIN)
    while True:
        if any(file == drumroll for file, _ in poller.poll()):
            return None
        text, files, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, MAX_REQUEST_FILES)
        if not text:
            return None
        request = json.loads(text) | plan
        zygote = os.getpid()
        try:
            child = os.fork()
        except OSError as error:
            tell(files[0], error=f"a new process: {error.strerror}", errno=error.errno)
            child = -1
        if child == 0:
            control.close()
            os.close(drumroll)
            return guard(request, files, zygote, proc, code)
        for file in files:
            os.close(file)


def tell(status: int, **message: Any) -> None:
    """A message to drumroll; one that has stopped listening is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(message).encode())


def guard(request: dict[str, Any], files: list[int], zygote: int, proc: int, code: bytes) -> Job:
    """The warden: makes a guest, which returns from here with its job, and watches it to its end."""
    status, *guest_files = files
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        outer = os.geteuid()
        if request["guest"] != request["owner"]:
            outer = request["guest"]
            os.setresgid(outer, outer, outer)
            os.setresuid(outer, outer, outer)
            walls.prctl(walls.SET_DUMPABLE, 1, "access to /proc/self")
        walls.die_with_parent()
        if os.getppid() != zygote:
            os._exit(1)
        walls.unshare([name for name in ("user", "mount", "pid") if name in request["walls"]])
        walls.map_one_user(proc, walls.NOBODY, outer, outer)
        walls.write_at(proc, "self/oom_score_adj", "1000")
        os.close(proc)
        walls.mount_scratch(request["limits"]["disk_mib"])
        listen, say = os.pipe()
        guest = os.fork()
    except OSError as error:
        tell(status, error=error.strerror, errno=error.errno)
        os._exit(1)
    if guest == 0:
        os.close(listen)
        os.close(status)
        return confine(request, guest_files, say, code)
    for file in (say, *guest_files):
        os.close(file)
    try:
        watch(guest, listen, status, request["limits"]["wall_s"])
    finally:
        os._exit(0)


def confine(request: dict[str, Any], files: list[int], say: int, code: bytes) -> Job:
    """The guest: puts up the last walls around itself, tells the warden, and returns what it is to run."""
    try:
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in (*files, say)]
        targets = (*FILES[request["role"]], 9)
        for file, target in zip(high, targets, strict=True):
            os.dup2(file, target, inheritable=False)
        say = 9
        kept = sorted({0, 1, 2, *targets, NUM_FILES})
        for file, following in itertools.pairwise(kept):
            os.closerange(file + 1, following)
        os.setsid()
        limits = request["limits"]
        if "limits" in request["walls"]:
            walls.set_limits(limits["wall_s"], limits["memory_mib"], limits["disk_mib"], limits["num_threads"])
        if "privileges" in request["walls"]:
            walls.drop_privileges()
        walls.die_with_parent()
        if "calls" in request["walls"]:
            walls.filter_calls(code)
        os.write(say, b"ready")
    except OSError as error:
        tell(say, error=error.strerror, errno=error.errno)
        os._exit(1)
    os.close(say)
    return guests.job(request["role"])


def watch(guest: int, listen: int, status: int, wall_s: float) -> None:
    """Waits until the guest ends, its time is up, or drumroll wants no more of it; then makes sure that it has ended, and says how."""
    word = os.read(listen, 4096)
    if word != b"ready":
        os.kill(guest, signal.SIGKILL)
        tell(status, **json.loads(word or b'{"error": "the walls of a guest, which ended meanwhile"}'))
        return
    started = time.monotonic()
    tell(status, pid=guest)
    handle = os.pidfd_open(guest)
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.register(status, select.POLLIN)
    happened = {file for file, _ in poller.poll(wall_s * 1000)}
    seconds = time.monotonic() - started
    if handle not in happened:
        os.kill(guest, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(guest, 0)[1])
    ending = "timeout" if not happened else "exited" if code >= 0 else "killed"
    tell(status, ending=ending, code=code, seconds=seconds)
