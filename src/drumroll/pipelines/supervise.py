"""A parent process that starts a run again when it dies, from where it left off.

supervisor ── starts ──► run ── fails ──► pause ──► resumed run ── fails ──► ...
    └── SIGTERM, SIGINT are passed on, and then nothing is started any more

The supervisor holds no state of the run: what a resumed run needs is on disk.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

FINAL = (0, 2, 130, 143)
"""Exit codes that a restart would not change: done, something for the user to put right, Ctrl-C, SIGTERM."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

PR_SET_PDEATHSIG = 1


def supervise(
    command: Callable[[], Sequence[str]], progress: Callable[[], object], *, max_failures: int = 3, say: Callable[[str], None]
) -> int:
    """Run what `command` says, and for as long as the run fails what it says then; returns the last exit code, 128 + n after signal n.

    A failure is an end by a signal or with a code that is not in `FINAL`. `progress()` returns something that differs after a
    run that got further, for example its last checkpoint: then the pause before the next start is short again. After
    `max_failures` failures in a row without progress nothing is started any more. A signal for the supervisor is the run's:
    it is passed on, as is a second one, and the run's answer to it is final. Only for the main thread.

        code = supervise(lambda: resume if Path("runs/x").exists() else train, last_checkpoint, say=print)
    """
    failures, pause_s = 0, FIRST_PAUSE_S
    with _Signals.caught() as signals:
        while True:
            reached = progress()
            status = signals.run(command())
            code = status if status >= 0 else 128 - status
            if status in FINAL or signals.came:
                return code
            if progress() != reached:
                failures, pause_s = 0, FIRST_PAUSE_S
            else:
                failures += 1
            ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with exit code {code}"
            if failures >= max_failures:
                say(f"The run {ended}. After {failures} failures in a row without progress it is not started again.")
                return code
            say(f"The run {ended}. It goes on in {pause_s:g} s.")
            number = signals.rest(pause_s)
            if number is not None:
                return 128 + number
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Signals:
    """Passes SIGTERM and SIGINT on to the child process, or keeps them for whoever rests."""

    def __init__(self) -> None:
        self.came = False
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()  # may be used in a signal handler
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator[_Signals]:
        signals = cls()
        before = {number: signal.signal(number, signals._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Run a child process to its end; returns its exit code, or -n after signal n.

        It has a session of its own, so that Ctrl-C in a terminal reaches it only from here.
        """
        self._child = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent())
        self._pass_on()
        status = self._child.wait()
        self._child = None
        return status

    def rest(self, seconds: float) -> int | None:
        """Until the time is over or a signal comes, which is returned."""
        try:
            return self._waiting.get(timeout=seconds)
        except queue.Empty:
            return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self._waiting.put(number)
        self._pass_on()

    def _pass_on(self) -> None:
        with suppress(queue.Empty):
            while self._child is not None:
                self._child.send_signal(self._waiting.get_nowait())


def _end_with_parent() -> Callable[[], None] | None:
    """What a child process does before it starts: ask for SIGTERM when its parent dies. Linux only."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os.kill(os.getpid(), signal.SIGTERM)

    return ask
