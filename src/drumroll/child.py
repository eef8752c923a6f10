"""A child process that answers questions, one at a time, and can be ended when it hangs.

    this process (event loop)                child process (main thread)
      start(hello) ─── socket ───────────────► open(hello) → answer
      ask(question) ─────────────────────────► answer(question)
             ▲                                     │
             └───────────────────────────────◄─────┘

What the child is for is said by the import path of a function: it gets the first message and returns the function that answers all others.
A child ends when its parent hangs up or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
from typing import Any

HEAD = struct.Struct(">Q")
START_S = 120.0
"""How long a child may take to import what it needs."""
DYING_S = 2.0
"""How long a child that has hung up may take to end."""
PR_SET_PDEATHSIG = 1


class ChildDied(Exception):
    """A child that has ended, or could not begin; the message says how, for example `exit code 3`."""


class Child:
    """One process. Example: `child = await Child.start("drumroll.rewards.process:open_rewards", hello)`, `await child.ask(question)`.

    Questions wait for each other nowhere: whoever asks sees to it that the one before has been answered.
    """

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, opener: str, hello: Any) -> Child:
        """A child whose `opener` has accepted the first message; `ChildDied` with the reason where it did not."""
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from drumroll.child import serve; serve({theirs.fileno()}, {opener!r})"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        child = cls(process, reader, writer)
        try:
            async with asyncio.timeout(START_S):
                problem = await child.ask(hello)
        except TimeoutError:
            await child.end()
            raise ChildDied(f"it took longer than {START_S:g} s") from None
        except BaseException:
            await asyncio.shield(child.end())
            raise
        if problem:
            await child.end()
            raise ChildDied(problem)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, question: Any) -> Any:
        """The answer; `ChildDied` when the child ends before it has given one."""
        try:
            body = pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.write(HEAD.pack(len(body)) + body)
            await self._writer.drain()
            (length,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            return pickle.loads(await self._reader.readexactly(length))  # from our own child
        except (OSError, EOFError, asyncio.IncompleteReadError):
            raise ChildDied(await self.end(DYING_S)) from None

    async def end(self, grace_s: float = 0.0) -> str:
        """Kill the child where it does not end by itself; how it ended."""
        self._writer.close()
        await asyncio.wait({ended := asyncio.ensure_future(self._process.wait())}, timeout=grace_s)
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # the process's own `kill` would reap it, and nobody would learn how it ended
        code = await ended
        if code == -signal.SIGKILL:
            return "killed, perhaps for want of memory"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve(fd: int, opener: str) -> None:
    """The child: answer questions until the parent hangs up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # what hangs must not outlive its parent
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as pipe, contextlib.suppress(EOFError):
        try:
            module, _, name = opener.partition(":")
            answer = getattr(importlib.import_module(module), name)(_read(pipe))
        except Exception as error:
            _write(pipe, f"{type(error).__name__}: {error}")
            return
        _write(pipe, "")
        while True:
            _write(pipe, answer(_read(pipe)))


def _read(pipe: Any) -> Any:
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        raise EOFError
    (length,) = HEAD.unpack(head)
    return pickle.loads(pipe.read(length))


def _write(pipe: Any, message: Any) -> None:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(HEAD.pack(len(body)) + body)
    pipe.flush()
