"""Whatever ends a run, nothing of it is left ten seconds later: no process, listening port, shared memory or temporary folder."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import endless, num_steps, processes, session_folder, wait_until

pytestmark = pytest.mark.timeout(180)

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


def starting(mark: str) -> bool:
    """Whether the first workers' processes are there; they import for seconds before they can be told anything."""
    lines = [(Path("/proc") / str(pid) / "cmdline").read_bytes() for pid in processes(mark)]
    return any(b"/default_worker.py\0" in line for line in lines)  # the raylet has the name too, inside of an argument


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


def nothing_left(mark: str, before: set[str], folder: Path) -> Callable[[], bool]:
    """A condition: of the run and of what it had `before`, nothing is there any more."""

    def check() -> bool:
        memory = [name for name in before if name.startswith("/dev/shm/") and os.path.exists(name)]
        return not (processes(mark) or before & listening() or memory or folder.exists())

    return check


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
        wait_until(nothing_left(mark, before, folder), 10, "the end of everything after SIGKILL")


def test_ctrl_c_while_workers_start_leaves_nothing(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-interrupted"
    with endless(tmp_path, mark) as run:
        wait_until(lambda: starting(mark) or run.poll() is not None, 120, "the start of workers")
        folder, before = session_folder(mark), opened(mark)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        _, err = run.communicate(timeout=60)
        assert run.returncode == 130
        assert err == "drumroll: interrupted\n"
        wait_until(nothing_left(mark, before, folder), 10, "the end of everything after Ctrl-C")
