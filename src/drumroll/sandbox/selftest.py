"""Whether the walls hold: what the first guest tries, what the kernel says of it, and what to do where they do not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from drumroll.sandbox.walls import NOBODY

HELD = "all walls hold"

PROBE = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, threading

facts = json.loads(input())
worked = []

def attempt(name, action):
    try:
        result = action()
    except BaseException:
        return
    if result is not False:
        worked.append(name)

def raw(call, *arguments):
    return getattr(ctypes.CDLL(None), call)(*arguments) == 0

for path in [*facts["files"], "/etc/passwd", "/proc/self/status", "/sys/kernel", "/home", "/root/.ssh", "/var"]:
    attempt("seeing " + path, lambda: os.stat(path))
for folder in ["/", "/dev", "/usr/lib", os.path.dirname(os.__file__)]:
    attempt("writing in " + folder, lambda: open(folder + "/written_by_probe", "w"))
attempt("a socket", lambda: socket.socket())
attempt("a socket pair", lambda: socket.socketpair())
attempt("a second process", lambda: os.fork() or os._exit(0))
attempt("another program", lambda: subprocess.run(["/bin/true"]))
attempt("a signal to drumroll", lambda: os.kill(facts["parent"], 0))
attempt("seeing other processes", lambda: os.getpid() != 1 or os.getppid() != 0)
attempt("being another user", lambda: os.getuid() != facts["nobody"] or os.getgid() != facts["nobody"])
attempt("becoming root", lambda: os.setuid(0))
attempt("a new namespace", lambda: raw("unshare", 0x10000000))
attempt("a mount", lambda: raw("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None))
attempt("a change of the root", lambda: os.chroot("/tmp"))
attempt("the host's environment", lambda: len(os.environ) > 0)
for file in range(3, 512):
    attempt("open file %d" % file, lambda: os.fstat(file))
for name in ["AS", "CPU", "FSIZE", "NOFILE", "CORE"]:
    attempt("no limit on " + name, lambda: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1] == resource.RLIM_INFINITY)

with open("/tmp/own", "w") as file:
    file.write("a guest may write here")
thread = threading.Thread(target=int)
thread.start()
thread.join()
print("\\n".join(worked) or "HELD")
""".replace("HELD", HELD)
"""Tries what must not work, and what must. Prints what worked though it must not."""

ADVICE = {
    errno.EPERM: (
        "The kernel or a container does not allow unprivileged user namespaces. On a host: `sysctl -w kernel.unprivileged_userns_clone=1`"
        " (Debian), `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu 23.10 and later). In Docker: start the container"
        " with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`."
    ),
    errno.ENOSPC: (
        "The kernel allows no more namespaces: raise `sysctl user.max_user_namespaces` and its neighbours `user.max_*_namespaces`;"
        " 0 switches them off."
    ),
    errno.EINVAL: (
        "The kernel lacks a feature: Linux 5.10 or later is needed, built with CONFIG_USER_NS, CONFIG_PID_NS, CONFIG_NET_NS,"
        " CONFIG_IPC_NS, CONFIG_UTS_NS, CONFIG_CGROUPS and CONFIG_SECCOMP_FILTER."
    ),
    errno.ENOSYS: "The kernel lacks a feature: Linux 5.10 or later is needed, on x86_64 or aarch64, built with CONFIG_SECCOMP_FILTER.",
}
ADVICE[errno.EACCES] = ADVICE[errno.EPERM]
OTHER_ADVICE = "Run `drumroll` where Linux namespaces and seccomp can be used."


def refusal(doing: str, code: int | None) -> str:
    """What is said where a sandbox cannot be made."""
    advice = ADVICE.get(code or 0, OTHER_ADVICE)
    return f"No sandbox can be made here, so that no untrusted code is run: {doing}. {advice}"


def outside_view(pid: int, guest: int) -> list[str]:
    """What the kernel reports of a guest and should not. Empty where /proc hides other processes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return []
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}
    expected = {"Uid": [str(guest)] * 4, "NoNewPrivs": ["1"], "Seccomp": ["2"]}
    expected |= {name: ["0" * 16] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    return [f"{name} is {' '.join(fields.get(name, ['unknown']))}" for name, value in expected.items() if fields.get(name) != value]


def shared_namespaces(zygote: int) -> list[str]:
    """The namespaces that the zygote shares with this process, and should not."""
    names = ("user", "mnt", "net", "ipc", "uts", "cgroup")
    return [f"the {name} namespace is the host's" for name in names if namespace(zygote, name) == namespace(os.getpid(), name)]


def namespace(pid: int, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def guest_user() -> int:
    """Who a guest is on the host: nobody where drumroll runs as root, otherwise the user who started drumroll."""
    mapped = all(maps_nobody(Path(f"/proc/self/{kind}_map").read_text()) for kind in ("uid", "gid"))
    return NOBODY if os.geteuid() == 0 and mapped else os.geteuid()


def maps_nobody(rows: str) -> bool:
    """Whether a user map has the user nobody. In a container of a single user it has not."""
    return any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in (row.split() for row in rows.splitlines()))
