"""Scripts in the sandbox: what they print, how they end, and what they may use."""

import asyncio
import os
import random
from pathlib import Path

import pytest
from walled import Walled

from drumroll.errors import SandboxError
from drumroll.sandbox import Limits, Sandbox
from drumroll.sandbox.host import run_script, run_tests


def test_a_script_reads_and_prints(walled: Walled) -> None:
    run = walled.run("import sys\nprint(int(input()) + 1, 'ü')\nprint(__name__, file=sys.stderr)", stdin="4\n")
    assert (run.stdout, run.stderr, run.ending, run.exit_code) == ("5 ü\n", "__main__\n", "exited", 0)
    assert 0 < run.seconds < 10


def test_a_large_input_and_output_pass_through(walled: Walled) -> None:
    text = "".join(random.Random(0).choices("abc\n", k=700_000))
    assert walled.run("import sys\nsys.stdout.write(sys.stdin.read())", stdin=text).stdout == text
    assert walled.run("print('not read')", stdin=text).stdout == "not read\n"


@pytest.mark.parametrize(
    ("program", "ending", "code", "stdout", "complaint"),
    [
        ("raise SystemExit", "exited", 0, "", ""),
        ("exit(3)", "exited", 3, "", ""),
        ("import sys; sys.exit('sorry')", "exited", 1, "", "sorry"),
        ("print(1)\n1 / 0", "exited", 1, "1\n", 'line 2, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero'),
        ("print(", "exited", 1, "", "SyntaxError: '(' was never closed"),
        ("raise KeyboardInterrupt", "exited", 1, "", "KeyboardInterrupt"),
        ("import os; os._exit(0)\nprint('never')", "exited", 0, "", ""),
        ("import os; os.abort()", "killed", None, "", ""),
        ("import ctypes; ctypes.string_at(0)", "killed", None, "", ""),
        ("import atexit; atexit.register(print, 'last')", "exited", 0, "last\n", ""),
        ("class A:\n  def __del__(self): print('gone')\na = A()", "exited", 0, "gone\n", ""),
        ("import threading; threading.Thread(target=print, args=['thread']).start()", "exited", 0, "thread\n", ""),
        ("from concurrent.futures import ThreadPoolExecutor as T\nprint(*T(4).map(abs, [-1, 2]))", "exited", 0, "1 2\n", ""),
        ("\ud800", "exited", 1, "", "UnicodeEncodeError"),
    ],
)  # fmt: skip
def test_endings(walled: Walled, program: str, ending: str, code: int | None, stdout: str, complaint: str) -> None:
    run = walled.run(program)
    assert (run.ending, run.exit_code, run.stdout) == (ending, code, stdout)
    assert complaint in run.stderr


def test_time_is_bounded(walled: Walled) -> None:
    for program in ("while True: pass", "import time; time.sleep(1000)", "input()\nimport signal\nsignal.pause()"):
        run = walled.run("print('began', flush=True)\n" + program, stdin="\n", wall_s=0.5)
        assert (run.ending, run.exit_code, run.stdout) == ("timeout", None, "began\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_bounded(walled: Walled, stream: str) -> None:
    run = walled.run(f"import sys\nwhile True: sys.{stream}.write('x' * 10_000)", output_bytes=25_000)
    assert run.ending == "output"
    assert run.exit_code is None
    assert len(getattr(run, stream)) == 25_000
    assert walled.run("print('x' * 99)", output_bytes=100).ending == "exited"
    assert walled.run("print('x' * 100)", output_bytes=100).ending == "output"


def test_memory_is_bounded(walled: Walled) -> None:
    fill = "kept = []\ntry:\n  while True: kept.append(bytearray(1 << 20))\nexcept MemoryError: n = len(kept); kept = None; print(n)"
    assert 100 < int(walled.run(fill, memory_mib=256).stdout) < 256
    assert walled.run("import mmap; mmap.mmap(-1, 1 << 29)", memory_mib=256).exit_code == 1


def test_disk_is_bounded_and_fresh(walled: Walled) -> None:
    fill = "n = 0\ntry:\n  while True: open(str(n), 'wb').write(bytes(1 << 20)); n += 1\nexcept OSError as error: print(n, error.strerror)"
    assert walled.run(fill, disk_mib=5).stdout == "5 No space left on device\n"
    assert walled.run("open('a', 'wb').write(bytes(6 << 20))", disk_mib=5).exit_code == 1
    assert walled.run("import os\nprint(os.listdir('.'), os.getcwd())").stdout == "[] /tmp\n"
    names = "import os\nn = 0\ntry:\n  while True: os.mkdir(str(n)); n += 1\nexcept OSError as error: print(error.strerror)"
    assert walled.run(names).stdout == "No space left on device\n"


def test_threads_are_bounded(walled: Walled) -> None:
    many = """
import threading
wait, number = threading.Event(), 1
try:
    while True:
        threading.Thread(target=wait.wait, daemon=True).start()
        number += 1
except RuntimeError: print(number)
"""
    assert walled.run(many, num_threads=5).stdout == "5\n"


def test_the_standard_library_works(walled: Walled) -> None:
    program = """
import array, bisect, collections, csv, dataclasses, datetime, decimal, hashlib, heapq, itertools, json, lzma, pathlib, random, re
import shutil, sqlite3, statistics, string, tempfile, time, typing, unicodedata, uuid, zlib, zoneinfo
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "a.txt"
    path.write_text("text")
    shutil.copy2(path, folder + "/b.txt")
    shutil.copytree(folder, "/tmp/copy")
print(sorted(path.name for path in pathlib.Path("/tmp/copy").iterdir()), sqlite3.connect(":memory:").execute("select 1 + 1").fetchone())
print(hashlib.sha256(b"").hexdigest()[:6], re.sub("a+", "b", "caat"), json.dumps([1]), zoneinfo.ZoneInfo("UTC"))
"""
    run = walled.run(program)
    assert run.stdout == "['a.txt', 'b.txt'] (2,)\ne3b0c4 cbt [1] UTC\n", run.stderr


def test_sets_have_the_same_order_in_every_run_and_random_numbers_do_not(walled: Walled) -> None:
    order = {walled.run("print({str(n) for n in range(50)})").stdout for _ in range(3)}
    assert len(order) == 1
    assert len({walled.run("import random\nprint(random.random())").stdout for _ in range(3)}) == 3


def test_many_runs_at_once_do_not_mix() -> None:
    async def go() -> None:
        async with Sandbox() as sandbox:
            runs = [sandbox.run(f"open('/tmp/a', 'w').write(input())\nprint(open('/tmp/a').read(), {n})", stdin=str(n)) for n in range(40)]
            exams = [sandbox.examine(f"def f(): return {n}", [f"assert f() == {n}", "assert f() == -1"]) for n in range(20)]
            for n, run in enumerate(await asyncio.gather(*runs)):
                assert run.stdout == f"{n} {n}\n"
            for exam in await asyncio.gather(*exams):
                assert exam.passed == (True, False)

    asyncio.run(go())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


async def ended(pid: int) -> None:
    """Waits until a process is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(handle, gone.set)
    await asyncio.wait_for(gone.wait(), 30)
    asyncio.get_running_loop().remove_reader(handle)
    os.close(handle)


async def endless(sandbox: Sandbox) -> tuple[asyncio.Task[object], int]:
    """A run that goes on, and its guest's process id."""
    begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    zygote = await sandbox._ready()
    task: asyncio.Task[object] = asyncio.create_task(run_script(zygote, "while True: pass", "", Limits(wall_s=100), begun.set_result))
    return task, await begun


def test_nothing_is_left_behind() -> None:
    async def go() -> None:
        async with Sandbox() as sandbox:
            before = open_files()
            await sandbox.run("open('/tmp/a', 'w')")
            await sandbox.examine("def f(): pass", ["assert f() is None"])
            task, pid = await endless(sandbox)
            task.cancel()
            await ended(pid)
            await asyncio.gather(task, return_exceptions=True)
            assert open_files() == before
            _, pid = await endless(sandbox)
        await ended(pid)

    asyncio.run(go())
    before = open_files(), children(), mounts()
    asyncio.run(go())
    assert (open_files(), children(), mounts()) == before


def test_a_killed_zygote_fails_its_runs_and_the_next_call_starts_another() -> None:
    async def go() -> None:
        async with Sandbox() as sandbox:
            task, pid = await endless(sandbox)
            zygote = await sandbox._ready()
            exam = asyncio.create_task(run_tests(zygote, "while True: pass", ["assert f()"], Limits()))
            zygote.process.kill()
            with pytest.raises(SandboxError, match="has ended"):
                await task
            with pytest.raises(SandboxError, match="has ended"):
                await exam
            await ended(pid)
            assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(go())


def test_a_warden_that_does_not_report_ends_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with Sandbox() as sandbox:
            monkeypatch.setattr("drumroll.sandbox.process.GRACE_S", -99.9)
            task, pid = await endless(sandbox)
            with pytest.raises(SandboxError, match="did not report within"):
                await task
            await ended(pid)
            monkeypatch.undo()
            assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(go())


def test_a_closed_sandbox_opens_again() -> None:
    async def go() -> None:
        sandbox = Sandbox()
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        await sandbox.close()
        await sandbox.close()
        assert (await sandbox.run("print(2)")).stdout == "2\n"
        await sandbox.close()

    asyncio.run(go())
