"""The guardian of a private session: ends what belongs to it and nothing else, whether or not there is somebody to tell it to."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumroll.cluster.session import GUARD, KEEP, MARK, REMOVE, _Guardian

SLEEP = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "session" / "logs").mkdir(parents=True)
    return tmp_path / "session"


@pytest.fixture
def own(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the session."""
    with subprocess.Popen(SLEEP, env={**os.environ, MARK: str(folder)}) as process:
        yield process
        process.kill()


@pytest.fixture
def foreign(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of another session, whose folder has a longer name."""
    with subprocess.Popen(SLEEP, env={**os.environ, MARK: f"{folder}2"}) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("order", [KEEP, REMOVE])
def test_an_orderly_end(folder: Path, own: subprocess.Popen[bytes], foreign: subprocess.Popen[bytes], order: str) -> None:
    guardian = _Guardian()
    guardian.tell(GUARD, str(folder))
    guardian.dismiss(order, str(folder))
    assert own.wait(10) == -signal.SIGKILL
    assert foreign.poll() is None
    assert folder.exists() == (order == KEEP)


def test_signals_do_not_end_it(folder: Path, own: subprocess.Popen[bytes]) -> None:
    guardian = _Guardian()
    guardian.tell(GUARD, str(folder))
    assert os.getsid(guardian._process.pid) != os.getsid(0)  # neither the terminal nor a signal to this group reaches it
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    while not all(ignored(guardian._process.pid) >> (number - 1) & 1 for number in numbers):
        assert guardian._process.poll() is None
    for number in numbers:
        guardian._process.send_signal(number)
    guardian.dismiss(REMOVE, str(folder))
    assert own.wait(10) == -signal.SIGKILL


def ignored(pid: int) -> int:
    """The signals that a process ignores, one bit each."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return int(line.split()[1], 16)


def test_one_that_was_ended_is_no_reason_to_fail(folder: Path) -> None:
    guardian = _Guardian()
    guardian.tell(GUARD, str(folder))
    guardian._process.kill()
    guardian._process.wait()
    guardian.dismiss(REMOVE, str(folder))


CONTROLLER = """
    import subprocess, sys, time
    from drumroll.cluster.session import GUARD, MARK, _Guardian

    folder, sleep = sys.argv[1], sys.argv[2:]
    guardian = _Guardian()
    guardian.tell(GUARD, folder)
    subprocess.Popen(sleep, env={MARK: folder})
    bystander = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, close_fds=False)
    print(guardian._process.pid, bystander.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_controller(folder: Path) -> None:
    """The session's processes end; the controller's others live on, and do not keep the guardian waiting."""
    command = [sys.executable, "-c", textwrap.dedent(CONTROLLER), str(folder), *SLEEP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        guardian, bystander = map(os.pidfd_open, map(int, controller.stdout.readline().split()))
        controller.kill()
        try:
            controller.communicate(timeout=10)  # the session's process has the other end of this pipe, and so must have ended
            assert select.select([guardian, bystander], [], [], 10)[0] == [guardian]
            assert not folder.exists()
        finally:
            signal.pidfd_send_signal(bystander, signal.SIGKILL)
            os.close(guardian)
            os.close(bystander)


def test_a_session_that_ends_before_it_has_a_folder() -> None:
    guardian = _Guardian()
    guardian.dismiss(REMOVE, None)
    assert guardian._process.returncode == 0
