"""Whatever ends a run, nothing of it is left ten seconds later: no process, listening port, shared memory or temporary folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_cli import endless, num_steps, processes, session_folder, wait_until

pytestmark = pytest.mark.timeout(180)

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


def starting(mark: str) -> bool:
    """Whether the first workers' processes are there; they import for seconds before they can be told anything."""
    # The raylet has the name too, inside of an argument.
    return any("/default_worker.py\0" in command_line(pid) for pid in processes(mark))


def opened(mark: str) -> set[str]:
    """What the run's processes have open or mapped, as /proc names it: paths, `socket:[inode]`."""
    found: set[str] = set()
    for pid in processes(mark):
        folder = Path("/proc") / str(pid)
        try:
            found |= {os.readlink(entry) for entry in (folder / "fd").iterdir()}
            found |= set(re.findall(r"/dev/shm/\S+", (folder / "maps").read_text()))
        except OSError:  # ended meanwhile
            continue
    return found


def listening() -> set[str]:
    """Sockets of this machine that accept connections."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING}


def left(mark: str, before: set[str], folder: Path) -> list[str]:
    """What is still there of a run, and of what it had open `before`."""
    memory = [name for name in before if name.startswith("/dev/shm/") and os.path.exists(name)]
    return [*map(command_line, processes(mark)), *(before & listening()), *memory, *([str(folder)] if folder.exists() else [])]


def command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode()
    except OSError:
        return f"process {pid}, which has ended"


def expect_nothing(mark: str, before: set[str], folder: Path) -> None:
    """Of the run nothing is left ten seconds after its end."""
    patience = time.monotonic() + 10
    while (things := left(mark, before, folder)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert things == []


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_a_killed_controller_leaves_nothing(tmp_path: Path, moment: str) -> None:
    mark = f"{os.getpid()}-killed-{moment}"
    with endless(tmp_path, mark) as run:
        there = (lambda: num_steps(tmp_path) > 0) if moment == "training" else (lambda: starting(mark))
        wait_until(lambda: there() or run.poll() is not None, 120, moment)
        assert run.poll() is None, run.stderr and run.stderr.read()
        folder, before = session_folder(mark), opened(mark)
        assert folder.is_dir()
        assert before & listening()
        run.kill()  # the controller alone
        expect_nothing(mark, before, folder)


def test_a_second_sigterm_ends_a_run_at_once_that_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-twice"
    with endless(tmp_path, mark) as run:
        wait_until(lambda: num_steps(tmp_path) > 0 or run.poll() is not None, 120, "the first step")
        folder, before = session_folder(mark), opened(mark)
        for pid in processes(mark):
            if b"ray::" in (Path("/proc") / str(pid) / "cmdline").read_bytes():
                os.kill(pid, signal.SIGSTOP)  # no trainer answers any more
        run.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(2)
        run.terminate()
        assert run.wait(2) == 143
        expect_nothing(mark, before, folder)


def test_ctrl_c_while_workers_start_leaves_nothing(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-interrupted"
    with endless(tmp_path, mark) as run:
        wait_until(lambda: starting(mark) or run.poll() is not None, 120, "the start of workers")
        folder, before = session_folder(mark), opened(mark)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        _, err = run.communicate(timeout=60)
        assert run.returncode == 130
        assert err == "drumroll: interrupted\n"
        expect_nothing(mark, before, folder)
