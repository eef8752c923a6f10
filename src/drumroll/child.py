"""Child processes that answer questions, one at a time, and can be ended when they hang.

    this process (event loop)                child process (main thread)
      Child.start(hello) ── socket ──────────► open(hello) → answer
      child.ask(question) ───────────────────► answer(question)
             ▲                                     │
             └───────────────────────────────◄─────┘

    this process                             nursery                        child
      Nursery.start(hello) ── socket ────────► open(hello) → begin
      nursery.child() ───────────────────────► fork ────────────────────────► begin() → answer
      child.ask(question) ───────────────────────────────────────────────────► answer(question)

What a process is for is said by the import path of a function, its opener, which gets the first message. A nursery does once what takes
long, which is importing, and its children are there in milliseconds. Everybody ends when their parent hangs up or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Self

from drumroll.imports import begin_importing, have_imported

HEAD = struct.Struct(">Q")
NEWS = struct.Struct(">ii")
"""What a nursery says of a child: its process, and how it ended or `BORN`."""
BORN = -1000
START_S = 120.0
"""How long a process may take to import what it needs."""
DYING_S = 2.0
"""How long a child that has hung up may take to end."""
PR_SET_PDEATHSIG = 1

Answer = Callable[[Any], Any]


class ChildDied(Exception):
    """A child that has ended, or could not begin; the message says how, for example `exit code 3`."""


class Child:
    """One process. Example: `child = await Child.start("drumroll.envs.blocking:open_environments", hello)`, `await child.ask(question)`.

    Questions wait for each other nowhere: whoever asks sees to it that the one before has been answered.
    """

    def __init__(self, pid: int, ended: asyncio.Future[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`ended` is the exit code, once there is one."""
        self.pid = pid
        self._ended = ended
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, opener: str, hello: Any) -> Self:
        """A child whose `opener` has accepted the first message; `ChildDied` with the reason where it did not."""
        return await cls._spawn("serve", opener, hello)

    @classmethod
    async def _spawn(cls, function: str, opener: str, hello: Any) -> Self:
        """A new process that runs one of this module's functions."""
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from drumroll.child import {function}; {function}({theirs.fileno()}, {opener!r})"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        child = await cls._at(ours, process.pid, asyncio.ensure_future(process.wait()))
        await child._settle_in(child.ask(hello))
        return child

    @classmethod
    async def _at(cls, connection: socket.socket, pid: int, ended: asyncio.Future[int]) -> Self:
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        return cls(pid, ended, reader, writer)

    async def _settle_in(self, word: Coroutine[Any, Any, Any]) -> None:
        """Wait for its word that it has begun, which is empty or says why it could not."""
        try:
            async with asyncio.timeout(START_S):
                problem = await word
        except TimeoutError:
            await self.end()
            raise ChildDied(f"it took longer than {START_S:g} s") from None
        except (OSError, EOFError):
            raise ChildDied(await self.end(DYING_S)) from None
        except BaseException:
            await asyncio.shield(self.end())
            raise
        if problem:
            await self.end()
            raise ChildDied(problem)

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def ask(self, question: Any) -> Any:
        """The answer; `ChildDied` when the child ends before it has given one."""
        try:
            self._writer.write(_framed(question))
            await self._writer.drain()
            return await self._listen()
        except (OSError, EOFError):
            raise ChildDied(await self.end(DYING_S)) from None

    async def _listen(self) -> Any:
        (length,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        return pickle.loads(await self._reader.readexactly(length))  # from our own child

    async def end(self, grace_s: float = 0.0) -> str:
        """Kill the child where it does not end by itself; how it ended."""
        self._writer.close()
        await asyncio.wait({self._ended}, timeout=grace_s)
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # asyncio's own `kill` would reap it, and nobody would learn how it ended
        code = await asyncio.shield(self._ended)
        if code == -signal.SIGKILL:
            return "killed, perhaps for want of memory"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Nursery:
    """A process that has imported what its children need, and forks one whenever it is asked.

    A process with several threads cannot be forked safely. Where importing made some, every child is a new process, which imports
    everything again."""

    def __init__(self, opener: str, hello: Any, process: Child, control: socket.socket, can_fork: bool) -> None:
        self._opener = opener
        self._hello = hello
        self._process = process
        self._control = control
        """The socket that its `Child` reads, once more: files can be sent through it."""
        self._can_fork = can_fork
        self._births: deque[asyncio.Future[tuple[int, asyncio.Future[int]]]] = deque()
        self._ended: dict[int, asyncio.Future[int]] = {}
        """Of each child."""
        self._listener = asyncio.create_task(self._hear()) if can_fork else None

    @classmethod
    async def start(cls, opener: str, hello: Any) -> Self:
        """A nursery whose `opener` has accepted the first message; `ChildDied` with the reason where it did not."""
        process = await Child._spawn("nurse", opener, hello)
        try:
            can_fork = await process._listen()
        except EOFError:
            raise ChildDied(await process.end(DYING_S)) from None
        control = socket.socket(fileno=os.dup(process._writer.get_extra_info("socket").fileno()))
        return cls(opener, hello, process, control, can_fork)

    @property
    def alive(self) -> bool:
        """Whether it has children to give; one that cannot fork needs no process for that."""
        return not self._can_fork or self._process.alive

    async def child(self) -> Child:
        """Another child; `ChildDied` with the reason where it could not begin."""
        if not self._can_fork:
            return await Child._spawn("serve_from_nursery", self._opener, self._hello)
        ours, theirs = socket.socketpair()
        born = asyncio.get_running_loop().create_future()
        with theirs:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise ChildDied(f"its nursery has ended: {await self._process.end(DYING_S)}") from None
            self._births.append(born)
        try:
            pid, ended = await asyncio.shield(born)
        except BaseException:
            ours.close()  # whoever is born finds nobody there, and ends
            raise
        child = await Child._at(ours, pid, ended)
        await child._settle_in(child._listen())
        return child

    async def end(self) -> None:
        """End all its children, and then itself."""
        for pid in self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._ended:
            await asyncio.wait(self._ended.values())
        await self._process.end()
        if self._listener is not None:
            await self._listener
        self._control.close()

    async def _hear(self) -> None:
        """What becomes of children, until the nursery ends; nobody outlives it."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, EOFError):
            while True:
                pid, news = NEWS.unpack(await self._process._reader.readexactly(NEWS.size))
                if news == BORN:
                    ended = self._ended[pid] = loop.create_future()
                    self._births.popleft().set_result((pid, ended))
                else:
                    self._ended.pop(pid).set_result(news)
        why = await self._process.end(DYING_S)
        for born in self._births:
            born.set_exception(ChildDied(f"its nursery has ended: {why}"))
        for ended in self._ended.values():
            ended.set_result(-signal.SIGKILL)


# The other side.


def serve(fd: int, opener: str) -> None:
    """A child: answer questions until the parent hangs up."""
    _die_with_parent()
    with socket.socket(fileno=fd) as connection:
        _attend(connection, lambda pipe: _function(opener)(_read(pipe)))


def serve_from_nursery(fd: int, opener: str) -> None:
    """A child that is its own nursery."""
    _die_with_parent()
    with socket.socket(fileno=fd) as connection:
        _attend(connection, lambda pipe: _function(opener)(_read(pipe))())


def nurse(fd: int, opener: str) -> None:
    """A nursery: make a child for every connection that arrives, until the parent hangs up."""
    _die_with_parent()
    begin_importing()
    with socket.socket(fileno=fd) as control:
        with control.makefile("rwb") as pipe:
            try:
                begin = _function(opener)(_read(pipe))
            except Exception as error:
                _write(pipe, f"{type(error).__name__}: {error}")
                return
            have_imported()
            is_alone = len(os.listdir("/proc/self/task")) == 1
            _write(pipe, "")
            _write(pipe, is_alone)
        if is_alone:
            _breed(control, begin)


def _breed(control: socket.socket, begin: Callable[[], Answer]) -> None:
    children: dict[int, int] = {}
    """By the file that says when each ends."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    nursery = os.getpid()
    while True:
        for file, _ in poller.poll():
            if file in children:
                poller.unregister(file)
                os.close(file)
                pid = children.pop(file)
                control.sendall(NEWS.pack(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            word, files, _, _ = socket.recv_fds(control, 1, 1)
            if not word:
                return
            with socket.socket(fileno=files[0]) as connection:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _live(connection, begin, nursery)
            children[handle := os.pidfd_open(pid)] = pid
            poller.register(handle, select.POLLIN)
            control.sendall(NEWS.pack(pid, BORN))


def _live(connection: socket.socket, begin: Callable[[], Answer], nursery: int) -> NoReturn:
    """A forked child, from its first breath to its last: it returns nowhere into what its nursery was doing."""
    code = 1
    try:
        _die_with_parent()
        if os.getppid() == nursery:
            if "numpy" in sys.modules:  # its generator is the nursery's; Python's own is renewed by itself
                sys.modules["numpy"].random.seed()
            _attend(connection, lambda pipe: begin())
            code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _attend(connection: socket.socket, begin: Callable[[Any], Answer]) -> None:
    """Say that it has begun, or why not; then answer questions."""
    begin_importing()
    with connection.makefile("rwb") as pipe, contextlib.suppress(EOFError):
        try:
            answer = begin(pipe)
        except Exception as error:
            _write(pipe, f"{type(error).__name__}: {error}")
            return
        have_imported()
        _write(pipe, "")
        while True:
            _write(pipe, answer(_read(pipe)))


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # what hangs must not outlive its parent


def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _framed(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(body)) + body


def _read(pipe: Any) -> Any:
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        raise EOFError
    (length,) = HEAD.unpack(head)
    return pickle.loads(pipe.read(length))


def _write(pipe: Any, message: Any) -> None:
    pipe.write(_framed(message))
    pipe.flush()
