"""Plain reward functions in a process of their own, which can be ended when one hangs, crashes or eats the memory.

    reward worker (event loop)                      child process (main thread)
      ask(number, trajectory) ── pipe ──────────────► compute
              ▲                                          │
              └───────────── parts, or why not ◄─────────┘

One trajectory at a time. A child that does not answer in time is killed; the next question starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from drumroll.config.models import RewardConfig
from drumroll.errors import RewardError
from drumroll.luggage import Luggage
from drumroll.registry import REGISTRY
from drumroll.rewards.reward import Parts, Reward, overdue
from drumroll.types import Trajectory

HEAD = struct.Struct(">Q")
START_S = 120.0
"""How long a child may take to import what its rewards need."""
DYING_S = 2.0
"""How long a child that has hung up may take to end."""
PR_SET_PDEATHSIG = 1


class RewardProcess:
    """A child process with rewards. Example: `await RewardProcess({0: config}, {0: "math"}).ask(0, trajectory, deadline_s=5.0)`."""

    def __init__(self, configs: Mapping[int, RewardConfig], names: Mapping[int, str]) -> None:
        self._configs = dict(configs)
        self._names = dict(names)
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Bring the child up. The first question does that, too."""
        async with self._turn:
            await self._ensure()

    async def ask(self, number: int, trajectory: Trajectory, deadline_s: float) -> Parts:
        """What the reward says; a `RewardError` when it fails, dies, or has not answered `deadline_s` after its turn came."""
        async with self._turn:
            await self._ensure()
            name = self._names[number]
            try:
                async with asyncio.timeout(deadline_s):
                    await _send(self._writer, (number, trajectory))
                    ok, answer = await _receive(self._reader)
            except TimeoutError:
                await self._end()
                raise RewardError(overdue(name, trajectory, deadline_s)) from None
            except (OSError, EOFError, asyncio.IncompleteReadError):
                how = await self._end(DYING_S)
                raise RewardError(f"reward '{name}' on task '{trajectory.task.id}': its process died ({how}).") from None
            except BaseException:  # cancelled: its answer would be taken for that to the next question
                await asyncio.shield(self._end())
                raise
            if not ok:
                raise RewardError(answer)
            return dict(answer)

    async def close(self) -> None:
        await self._end()

    async def _ensure(self) -> None:
        if self._child is not None and self._child.returncode is None:
            return
        await self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from drumroll.rewards.process import serve; serve({theirs.fileno()})"
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        kinds = {number: (config.kind, config.model_dump(mode="json")) for number, config in self._configs.items()}
        try:
            async with asyncio.timeout(START_S):
                await _send(self._writer, (Luggage.pack(), kinds, self._names))
                ok, problem = await _receive(self._reader)
        except (TimeoutError, OSError, EOFError, asyncio.IncompleteReadError):
            how = await self._end(DYING_S)
            raise RewardError(f"the process of the rewards {', '.join(self._names.values())} did not start ({how}).") from None
        if not ok:
            await self._end()
            raise RewardError(f"the process of the rewards {', '.join(self._names.values())} did not start: {problem}")

    async def _end(self, grace_s: float = 0.0) -> str:
        """Kill the child, if there is one that does not end by itself; how it ended."""
        child, self._child = self._child, None
        if child is None:
            return "it was not there"
        self._writer.close()
        await asyncio.wait({ended := asyncio.ensure_future(child.wait())}, timeout=grace_s)
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # the child's own `kill` would reap it, and nobody would learn how it ended
        code = await ended
        if code == -signal.SIGKILL:
            return "killed, perhaps for want of memory"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


async def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(HEAD.pack(len(body)) + body)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    return pickle.loads(await reader.readexactly(length))  # from our own child, which runs the user's own functions


def serve(fd: int) -> None:
    """The child: answer questions until the parent hangs up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a reward that hangs must not outlive its worker
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as pipe:
        try:
            rewards = _unpack(_read(pipe))
        except Exception as error:
            _write(pipe, (False, f"{type(error).__name__}: {error}"))
            return
        _write(pipe, (True, ""))
        with contextlib.suppress(EOFError):
            while True:
                number, trajectory = _read(pipe)
                _write(pipe, _answer(rewards[number], trajectory))


def _unpack(message: tuple[Luggage, Mapping[int, tuple[str, dict[str, Any]]], Mapping[int, str]]) -> dict[int, Reward]:
    luggage, kinds, names = message
    luggage.unpack()
    schemas = {number: REGISTRY.lookup("reward", kind).schema(RewardConfig) for number, (kind, _) in kinds.items()}
    return {number: Reward(schemas[number].model_validate(options), names[number]) for number, (_, options) in kinds.items()}


def _answer(reward: Reward, trajectory: Trajectory) -> tuple[bool, Parts | str]:
    try:
        return True, reward.compute(trajectory)
    except RewardError as error:
        return False, str(error)


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
