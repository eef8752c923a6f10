"""The Ray actor around one worker: builds it from an import path, runs its methods, wraps its errors.

                 ┌────────────────────── Host ──────────────────────┐
    call ──────▶ │ event loop ── coroutine methods, concurrently     │
                 │     └──────▶ compute thread ── plain methods,     │
    ping ──────▶ │              one at a time, in the order they came│
                 └──────────────────────────────────────────────────┘

The loop stays free while a plain method computes, so pings and aborts are answered at any time. The host knows nothing of
what it holds: the worker's class comes as `package.module:Class`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import ray

from drumroll.backends.exhaustion import device_error
from drumroll.backends.network import interface_of
from drumroll.errors import DeviceMemoryError, DrumrollError, WorkerError, WorkerLost, WorkerOverdue
from drumroll.imports import begin_importing, have_imported
from drumroll.luggage import Luggage
from drumroll.types import RankInfo

DISTRIBUTED = os.path.join("torch", "distributed", "")
"""Where a thread is that waits for other ranks."""

IN_VAIN = re.compile(r"Timed out (waiting|after) \d+ ?ms|collective operation timeout", re.IGNORECASE)
"""What gloo and NCCL say of a collective that somebody has not joined in time."""

KEPT: Literal["kept"] = "kept"
Returns = int | Literal["kept"]
"""What a call returns in place of its result: the elements of a list of so many, or that it is done and the result, each as an object of
its own."""


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Where a host came up."""

    node: str
    """Ray's id of the node."""
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a worker's compute thread does."""

    method: str
    """Empty: nothing."""
    seconds: float
    """How long it has been at it."""
    place: str
    """The innermost line that is not in somebody else's library, such as `fsdp2.py, line 210, in train`."""
    waits: bool
    """For other ranks, in a collective."""

    def __str__(self) -> str:
        if not self.method:
            return "has nothing to do"
        doing = "waits for other ranks" if self.waits else "computes"
        return f"{doing}, in {self.method}() for {self.seconds:.0f} s ({self.place})"


def seat(role: str, rank: int, node: str) -> str:
    """How messages name a worker, for example `actor_train rank 0 on node 3f2a91bc`."""
    return f"{role} rank {rank} on node {node[:8]}"


def wrap_error(error: Exception, where: str, method: str, role: str = "", rank: int = -1) -> DrumrollError:
    """The error as the caller sees it: what the user can put right keeps its class, the rest becomes a `WorkerError`, and where a device's
    memory or the device itself is the reason, one that says so."""
    if isinstance(error, DeviceMemoryError | WorkerLost):
        return error
    found = device_error(error, role, rank, where, method)
    if found is not None:
        return found
    if isinstance(error, WorkerError):
        return error
    if isinstance(error, RuntimeError) and IN_VAIN.search(str(error)):
        return WorkerOverdue(f"{where}: has waited for other ranks in {method}(), in vain: {error}")
    if isinstance(error, DrumrollError):
        try:
            return type(error)(f"{error} ({where}, {method})")
        except TypeError:  # a subclass with another constructor
            pass
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error)).strip()
    return WorkerError(f"{where}: {method}() raised {summary}\n\nRemote traceback:\n{trace}")


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the n-th by-reference value in a call's arguments."""

    index: int


def fill(template: Any, values: Sequence[Any]) -> Any:
    """The arguments with every `Slot` replaced by its value, in lists, tuples and dictionaries at any depth."""
    if isinstance(template, Slot):
        return values[template.index]
    if type(template) in (list, tuple):
        return type(template)(fill(part, values) for part in template)
    if type(template) is dict:
        return {key: fill(part, values) for key, part in template.items()}
    return template


def _is_foreign(filename: str) -> bool:
    """Whether a source file is a library's, or this one, and not drumroll's or the user's."""
    if f"{os.sep}drumroll{os.sep}" in filename:
        return filename == __file__
    return filename.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<"))


def free_port(address: str) -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


class Host:
    """One actor: `describe`, then `prepare`, then `start`, then any number of `call`s."""

    _computing: tuple[str, float, int] | None = None
    """Method, beginning and thread of what the compute thread does."""
    _never: asyncio.Event | None = None
    """Kept here: the event loop alone does not keep a task that nothing will wake."""

    def __init__(self) -> None:
        begin_importing()
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._worker: Any = None
        self._where = "a worker that has not started"
        self._role, self._rank = "", -1
        context = ray.get_runtime_context()
        self._info = HostInfo(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    async def describe(self) -> HostInfo:
        return self._info

    async def ping(self) -> float:
        """This process's time; answered whatever the compute thread does."""
        return time.time()

    async def vigil(self) -> None:
        """Never returns: whoever waits for it hears at once of this process's end."""
        if self._never is None:
            self._never = asyncio.Event()
        await self._never.wait()

    async def whereabouts(self) -> Whereabouts:
        """What the compute thread does at this moment; answered while it does."""
        computing = self._computing
        if computing is None:
            return Whereabouts("", 0.0, "", False)
        method, began, thread = computing
        frames = traceback.extract_stack(sys._current_frames().get(thread))
        own = [frame for frame in frames if not _is_foreign(frame.filename)]
        innermost = (own or frames)[-1:]
        place = "".join(f"{os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name}" for frame in innermost)
        waits = any(DISTRIBUTED in frame.filename for frame in frames)
        return Whereabouts(method, time.monotonic() - began, place, waits)

    async def free_port(self) -> int:
        return free_port(self._info.address)

    async def prepare(self, luggage: Luggage, role: str, rank: int) -> None:
        """Install the user's plugins. Before `start`, because arguments may be made of them."""
        self._where = seat(role, rank, self._info.node)
        self._role, self._rank = role, rank
        interface = interface_of(self._info.address)
        if interface is not None:  # collectives use the network that Ray uses, and so the loopback in a private session
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if self._info.address.startswith("127."):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        await self._run("prepare", luggage.unpack)

    async def start(self, target: str, rank: RankInfo, kwargs: Mapping[str, Any]) -> None:
        """Import and build the worker, in the thread that its plain methods will run in."""

        def build() -> Any:
            module, _, name = target.partition(":")
            return getattr(importlib.import_module(module), name)(rank=rank, **kwargs)

        self._worker = await self._run(target, build)
        have_imported()

    async def call(self, method: str, returns: Returns | None, template: tuple[Iterable[Any], Mapping[str, Any]], *values: Any) -> Any:
        """Run a method of the worker; `values` are the by-reference arguments, which Ray has fetched. `returns`: as several objects."""
        args, kwargs = fill(template, values)
        function = getattr(self._worker, method, None)
        if not callable(function):
            self._raise(AttributeError(f"{type(self._worker).__qualname__} has no method '{method}'"), method)
        result = await self._run(method, function, *args, **kwargs)
        if returns is None:
            return result
        if returns == KEPT:
            return None, result
        if not isinstance(result, list | tuple) or len(result) != returns:
            got = f"{len(result)} values" if isinstance(result, list | tuple) else type(result).__name__
            self._raise(ValueError(f"it was to return a list of {returns} values and returned {got}"), method)
        return result if returns > 1 else result[0]

    async def _run(self, method: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def compute() -> Any:
            self._computing = method, time.monotonic(), threading.get_ident()
            try:
                return function(*args, **kwargs)
            finally:
                self._computing = None

        try:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._compute, compute)
        except Exception as error:
            self._raise(error, method)

    def _raise(self, error: Exception, method: str) -> NoReturn:
        # The cause stays behind: its text is in the message, and it need not survive pickling.
        raise wrap_error(error, self._where, method, self._role, self._rank) from None
