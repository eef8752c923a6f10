"""The zygote and its guests as drumroll holds them: a child process, and for each guest a socket to its warden."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from drumroll.errors import SandboxError
from drumroll.sandbox import selftest
from drumroll.sandbox.outcome import Limits

BOOT = """
import os, sys, types
package, control = sys.argv[1:]
for name, folder in (("drumroll", package), ("drumroll.sandbox", package + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from drumroll.sandbox.zygote import main
main(int(control))
"""
"""Runs the zygote with empty packages in place of drumroll's, so that nothing of drumroll but this room is imported."""

OPTIONS = ("-s", "-S", "-P", "-B", "-X", "utf8")
"""No packages, no folder of the caller on the path, no bytecode files, UTF-8."""

START_S = 60.0
GRACE_S = 20.0
"""How much later than its limit a run may be reported as ended, before the zygote is ended with all that it has started."""

STARTS_AT_ONCE = 4
MAX_STATUS_BYTES = 1 << 16
GONE = "the sandbox's own process has ended; the next run starts a new one"


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How a guest ended, by its warden. `code` is its exit status, or minus the number of the signal that ended it."""

    ending: Literal["exited", "killed", "timeout"]
    code: int
    seconds: float

    def __str__(self) -> str:
        if self.ending == "timeout":
            return "out of time"
        return f"it exited with status {self.code}" if self.code >= 0 else f"killed by {signal.Signals(-self.code).name}"


class Zygote:
    """The process from which guests are forked. It ends when it is told to, and when this process ends."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.starting = asyncio.Semaphore(STARTS_AT_ONCE)
        with theirs:
            package = str(Path(__file__).parents[1])
            self.process = subprocess.Popen(
                [sys.executable, *OPTIONS, "-c", BOOT, package, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0"},  # sets print in the same order in every run
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    async def greet(self, plan: dict[str, Any]) -> None:
        """Hands the plan over and waits until the zygote is behind its walls."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_S):
                await loop.sock_sendall(self.control, json.dumps(plan).encode())
                reply = await loop.sock_recv(self.control, MAX_STATUS_BYTES)
        except (TimeoutError, ConnectionError):
            reply = b""
        if not reply:
            raise SandboxError(selftest.refusal(f"its process did not start: {self.last_words()}", None))
        answer = json.loads(reply)
        if answer:
            raise SandboxError(selftest.refusal(answer["error"], answer["errno"]))

    def last_words(self) -> str:
        """Ends a zygote that did not start, and returns what it printed."""
        self.process.kill()
        assert self.process.stderr is not None
        return self.process.stderr.read().decode(errors="replace").strip()[-1000:] or "it printed nothing"

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        """Ends the zygote and, by the kernel's signal at the parent's death, all that it has started."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        assert self.process.stderr is not None
        self.process.stderr.close()

    @contextlib.asynccontextmanager
    async def guest(self, role: str, limits: Limits, files: list[int]) -> AsyncIterator[Guest]:
        """A guest that is walled in and waits for its payload, of which `files[0]` is the end to read. It ends with the body."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with ours:
            async with self.starting:
                with theirs:
                    request = json.dumps({"role": role, "limits": dataclasses.asdict(limits)}).encode()
                    try:
                        socket.send_fds(self.control, [request], [theirs.fileno(), *files])
                    except OSError as error:
                        raise SandboxError(f"{GONE} ({error})") from None
                guest = Guest(self, ours)
                guest.pid = (await guest.hear(START_S))["pid"]
            yield guest


class Guest:
    """One guest, through its warden."""

    def __init__(self, zygote: Zygote, status: socket.socket) -> None:
        self.zygote = zygote
        self.status = status
        self.pid = 0

    def stop(self) -> None:
        """Has the warden end the guest; `end` still says how it ended."""
        with contextlib.suppress(OSError):
            self.status.shutdown(socket.SHUT_WR)

    async def end(self, limits: Limits) -> End:
        """Waits until the guest has ended."""
        message = await self.hear(limits.wall_s + GRACE_S)
        return End(message["ending"], message["code"], message["seconds"])

    async def hear(self, within_s: float) -> dict[str, Any]:
        """The warden's next message. SandboxError where it has none to send."""
        try:
            async with asyncio.timeout(within_s):
                reply = await asyncio.get_running_loop().sock_recv(self.status, MAX_STATUS_BYTES)
        except TimeoutError:
            self.zygote.end()
            raise SandboxError(f"the sandbox did not report within {within_s:g} s, and was ended; the next run starts a new one") from None
        except ConnectionError:
            reply = b""
        if not reply:
            raise SandboxError(GONE)
        message = json.loads(reply)
        assert isinstance(message, dict)
        if "error" in message:
            raise SandboxError(selftest.refusal(message["error"], message.get("errno")))
        return message
