"""The walls: what a guest cannot do, that a missing wall is noticed, and that nothing is run where one cannot be had."""

import asyncio
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from walled import Walled

from drumroll.errors import SandboxError
from drumroll.sandbox import Sandbox, selftest, walls

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run('id', shell=True)",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.create_connection(('127.0.0.1', 22))",
        "import urllib.request as u; u.urlopen('http://127.0.0.1')",
        "import os; os.kill(HOST, 9)",
        "import os; os.setuid(0)",
        "import os; os.chroot('/tmp')",
        "import os; os.memfd_create('a')",
        "import os; os.listdir('/proc')",
        "import os; os.listdir('/sys')",
        "import os; os.listdir('/home')",
        "import os; os.listdir('/etc')",
        "open('SOURCE')",
        "open('/dev/kmsg')",
        "open('/usr/lib/written', 'w')",
        "open('/written', 'w')",
        "import os; open(os.__file__, 'a')",
        "import os; os.chmod(os.__file__, 0o777)",
        "import os; os.remove(os.__file__)",
        "import os; os.mknod('/tmp/null', 0o20666, os.makedev(1, 3))",
        "import os; os.mkdir('/tmp/../new')",
        "import os; os.link(os.__file__, '/tmp/os.py')",
        "import os; os.setpriority(os.PRIO_PROCESS, 0, -5)",
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))",
        "import resource as r; r.prlimit(HOST, r.RLIMIT_CPU, (1, 1))",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'a')",
        "import numpy",
        "import drumroll",
    ],
)
def test_a_guest_cannot(walled: Walled, program: str) -> None:
    program = program.replace("HOST", str(os.getpid())).replace("SOURCE", selftest.__file__)
    run = walled.run(program + "\nprint('it worked')")
    assert run.exit_code == 1
    assert run.stdout == ""
    assert "Error" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)", "setns(0, 0)", "mount(b'proc', b'/tmp', b'proc', 0, None)", "umount2(b'/tmp', 2)", "ptrace(16, 1, 0, 0)",
        "prctl(22, 2, 0, 0, 0)", "prctl(1, 0, 0, 0, 0)", "syscall(56, 17, 0, 0, 0, 0)", "syscall(435, 0, 0)", "syscall(425, 8, 0)",
        "syscall(321, 0, 0, 0)", "syscall(250, 0, 0)", "syscall(323, 0)", "syscall(298, 0, 0, -1, -1, 0)", "syscall(310, 1, 0, 0, 0, 0, 0)",
        "syscall(434, 1, 0)", "syscall(317, 1, 0, 0)", "sethostname(b'a', 1)", "personality(0x40000)", "swapoff(b'/')", "reboot(0)",
    ],
)  # fmt: skip
def test_the_kernel_refuses(walled: Walled, call: str) -> None:
    """Numbers are those of x86_64: a process, clone3, io_uring, bpf, keyctl, userfaultfd, perf, another's memory, pidfd, seccomp."""
    if call.startswith("syscall") and os.uname().machine != "x86_64":
        pytest.skip("the number is that of another call here")
    program = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, os.strerror(ctypes.get_errno()))"
    assert walled.run(program).stdout in ("-1 Operation not permitted\n", "-1 Function not implemented\n")


def test_another_numbering_of_calls_is_deadly(walled: Walled) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("only x86_64 has a second numbering")
    assert walled.run("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)").ending == "killed"


def test_a_guest_sees_little(walled: Walled) -> None:
    program = "import os\nprint(os.getpid(), os.getppid(), os.getuid(), dict(os.environ), sorted(os.listdir('/dev')), os.listdir('/tmp'))"
    assert walled.run(program).stdout == "1 0 65534 {} ['null', 'random', 'urandom', 'zero'] []\n"
    folders = set(walled.run("import os\nprint(*os.listdir('/'))").stdout.split())
    assert folders <= {"dev", "lib", "lib64", "tmp", "usr", Path(sys.base_prefix).parts[1]}


def test_packages_are_hidden(walled: Walled) -> None:
    program = "import os, sys\nfor folder in sys.path:\n  p = folder + '/site-packages'\n  if os.path.isdir(p): print(os.listdir(p))"
    assert set(walled.run(program).stdout.split("\n")) <= {"[]", ""}


@pytest.mark.parametrize("missing", Sandbox.walls)
def test_a_missing_wall_is_noticed(missing: str) -> None:
    class Weak(Sandbox):
        walls = tuple(wall for wall in Sandbox.walls if wall != missing)

    async def go() -> None:
        with pytest.raises(SandboxError, match="No sandbox can be made here"):
            await Weak().run("print(1)")

    asyncio.run(go())


def test_elsewhere_than_on_linux_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="the system is darwin"):
        asyncio.run(Sandbox().start())


def test_an_interpreter_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(SandboxError, match="no such library"):
        asyncio.run(Sandbox().start())


def test_where_the_kernel_gives_no_namespaces_nothing_is_run(alone: Callable[[str], Path]) -> None:
    """In a user namespace of its own, a process may forbid further ones."""
    body = """
uid, gid = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
    open(f"/proc/self/{name}", "w").write(text)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
try:
    asyncio.run(Sandbox().run("print(1)"))
except SandboxError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, alone(body)], capture_output=True, text=True, check=True)
    assert "new namespaces (user, mount, net, ipc, uts, cgroup): No space left on device" in done.stdout
    assert "sysctl user.max_user_namespaces" in done.stdout


@pytest.mark.parametrize(
    ("code", "advice"), [(1, "unprivileged_userns_clone"), (13, "apparmor"), (22, "CONFIG_USER_NS"), (38, "CONFIG_SECCOMP_FILTER")]
)
def test_a_refusal_says_what_to_do(code: int, advice: str) -> None:
    assert advice in selftest.refusal("new namespaces", code)


def test_a_filter_that_the_kernel_does_not_take_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"a filter of system calls \(seccomp\)"):
        walls.filter_calls(b"")
    monkeypatch.setattr("drumroll.sandbox.seccomp.MACHINES", {"abacus": (0, 0)})
    with pytest.raises(OSError, match="only for abacus"):
        walls.call_filter()


def test_who_the_guest_is_on_the_host() -> None:
    assert selftest.maps_nobody("         0          0 4294967295\n")
    assert not selftest.maps_nobody("         0       1000          1\n")
    assert selftest.guest_user() == (65534 if os.geteuid() == 0 else os.geteuid())


def test_an_ordinary_user_has_a_sandbox(alone: Callable[[str], Path]) -> None:
    if os.geteuid() != 0:
        pytest.skip("all tests run as an ordinary user already")
    version = subprocess.run(
        [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True, check=False
    )
    if version.stdout != "True\n":
        pytest.skip(f"{SYSTEM_PYTHON}, which every user can run, is not there or is older than 3.11")
    body = """
async def go():
    async with Sandbox() as sandbox:
        print((await sandbox.run("import os; print(os.getuid()); os.fork()")).stdout.strip(), os.getuid())
        print((await sandbox.examine("def f(x): return x", ["assert f(1) == 1", "assert f(1) == 2"])).passed)
asyncio.run(go())
"""
    program = alone(body).read_text()
    ordinary = {"user": 12345, "group": 12345, "extra_groups": []}
    done = subprocess.run([SYSTEM_PYTHON, "-B", "-"], input=program, capture_output=True, text=True, check=False, cwd="/", **ordinary)
    assert done.stdout == "65534 12345\n(True, False)\n", done.stderr


def test_all_ends_with_drumroll(alone: Callable[[str], Path]) -> None:
    body = """
async def go():
    zygote = await launch(Sandbox.walls)
    print(zygote.process.pid)
    await run_script(zygote, "while True: pass", "", Limits(wall_s=100), lambda pid: print(pid, flush=True))
asyncio.run(go())
"""
    with subprocess.Popen([sys.executable, alone(body)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        warden = int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pids[1]}/status").read_text())[0])
        handles = [os.pidfd_open(pid) for pid in (*pids, warden)]
        process.kill()
    for handle in handles:
        assert select.select([handle], [], [], 30)[0], "a process outlived drumroll"
        os.close(handle)
