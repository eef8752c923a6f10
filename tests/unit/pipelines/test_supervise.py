"""Runs that die are started again, but not for ever, and not after a signal. The runs are small shell scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from drumroll.pipelines import supervise as module
from drumroll.pipelines.supervise import supervise


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were asked for; none is made."""
    asked: list[float] = []
    monkeypatch.setattr(module._Signals, "rest", lambda self, seconds: asked.append(seconds))
    return asked


class Runs:
    """Child processes that write their name into a file and end as the next entry of a list says."""

    def __init__(self, folder: Path, *ends: str) -> None:
        self.log = folder / "log"
        self.said: list[str] = []
        self._ends = folder / "ends"
        self._ends.write_text("".join(f"{end}\n" for end in ends))
        self.log.touch()

    def script(self, name: str) -> list[str]:
        take = f"end=$(head -n 1 '{self._ends}'); sed -i 1d '{self._ends}'"
        return ["sh", "-c", f"echo {name} >> '{self.log}'; {take}; eval \"$end\""]

    @property
    def names(self) -> list[str]:
        return self.log.read_text().split()

    def supervise(self, progress: object = None, **options: int) -> int:
        def reached() -> object:
            return progress() if callable(progress) else None

        return supervise(self.command, reached, say=self.said.append, **options)

    def command(self) -> list[str]:
        return self.script("resume" if self.names else "train")


@pytest.mark.parametrize("code", [0, 2, 130, 143])
def test_some_ends_are_final(tmp_path: Path, pauses: list[float], code: int) -> None:
    runs = Runs(tmp_path, f"exit {code}")
    assert runs.supervise() == code
    assert (runs.names, runs.said, pauses) == (["train"], [], [])


def test_a_run_that_died_is_resumed(tmp_path: Path, pauses: list[float]) -> None:
    runs = Runs(tmp_path, "kill -KILL $$", "exit 1", "exit 0")
    assert runs.supervise() == 0
    assert runs.names == ["train", "resume", "resume"]
    assert pauses == [1.0, 2.0]
    assert runs.said == ["The run was ended by SIGKILL. It goes on in 1 s.", "The run failed with exit code 1. It goes on in 2 s."]


@pytest.mark.parametrize(("end", "code"), [("exit 1", 1), ("exit 255", 255), ("kill -SEGV $$", 139), ("kill -TERM $$", 143)])
def test_failures_without_progress_come_to_an_end(tmp_path: Path, pauses: list[float], end: str, code: int) -> None:
    runs = Runs(tmp_path, *[end] * 5)
    assert runs.supervise(max_failures=4) == code
    assert len(runs.names) == 4
    assert pauses == [1.0, 2.0, 4.0]
    assert runs.said[-1].endswith("After 4 failures in a row without progress it is not started again.")


def test_progress_makes_the_pause_short_again_and_forgives_failures(tmp_path: Path, pauses: list[float]) -> None:
    """Starts 3 and 4 get further; the others do not."""
    runs = Runs(tmp_path, *["exit 1"] * 9)
    assert runs.supervise(lambda: min(max(len(runs.names), 2), 4)) == 1
    assert len(runs.names) == 7
    assert pauses == [1.0, 2.0, 1.0, 1.0, 2.0, 4.0]


def test_the_pause_has_a_limit(tmp_path: Path, pauses: list[float]) -> None:
    runs = Runs(tmp_path, *["exit 1"] * 9)
    runs.supervise(max_failures=9)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    Runs(tmp_path, "exit 0").supervise()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


CHILD = """
    import os, signal, sys
    count = 0
    def on_signal(number, frame):
        global count
        count += 1
        print(signal.Signals(number).name, flush=True)
        if count == int(sys.argv[1]):
            sys.exit(7)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    print("child", os.getpid(), os.getppid(), flush=True)
    while True:
        signal.pause()
"""

SUPERVISOR = """
    import sys
    from drumroll.pipelines.supervise import supervise
    code = supervise(lambda: [sys.executable, *sys.argv[1:]], lambda: None, say=lambda text: print(text, flush=True))
    print("code", code)
"""


class Supervisor:
    """A supervisor in a process of its own, with a child that ends with code 7 at its n-th signal."""

    def __init__(self, folder: Path, num_signals: int) -> None:
        script = folder / "child.py"
        script.write_text(textwrap.dedent(CHILD))
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(script), str(num_signals)], stdout=subprocess.PIPE, text=True
        )
        _, child, parent = self.line().split()
        assert int(parent) == self.process.pid
        self.child = int(child)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self) -> list[str]:
        """Everything else that supervisor and child print; ends when both have ended."""
        return self.process.communicate(timeout=20)[0].splitlines()


def test_signals_are_passed_on_and_nothing_is_resumed(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 2)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.line() == "SIGTERM"
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.rest() == ["SIGINT", "code 7"]


def test_the_child_does_not_outlive_the_supervisor(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 1)
    supervisor.process.kill()
    assert supervisor.rest() == ["SIGTERM"]  # its end closes the pipe that is read here


def test_a_signal_during_the_pause_ends_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path, *["exit 1"] * 3)
    later = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM])
    assert supervise(runs.command, lambda: None, say=lambda text: later.start()) == 143
    assert runs.names == ["train"]
