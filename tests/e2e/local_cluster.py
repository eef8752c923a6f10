"""A stand-in for Ray that hosts every worker in this process, so that a whole run takes a second instead of fifteen.

    with local_cluster():
        start(cfg)

Clusters, handles, references and hosts are the real ones: only what they ask of Ray is done here. A worker has an event loop in
a thread of its own and a compute thread. Arguments and results are passed as they are, without a copy. What needs a process
for each worker cannot be had: several trainer ranks (torch knows one process group per process), and killing a worker in the
middle of a plain method, which goes on to its end in the background.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Self
from unittest.mock import patch

from ray.exceptions import RayActorError

from drumroll.cluster.host import Host, HostInfo, seat
from drumroll.cluster.session import LOCAL
from drumroll.config.models import RayConfig
from drumroll.luggage import Luggage
from drumroll.plan import Placement, Pool, local_pool
from drumroll.types import RankInfo

NODE = "0123abcd" * 7
"""What Ray would call this machine."""

THREAD_NAME = "local worker"
"""Of the threads with the workers' event loops."""

END_S = 5.0
"""How long the end of a session waits for a worker that computes."""


@contextmanager
def local_cluster() -> Iterator[None]:
    """Runs that are started inside of the block have their workers in this process."""
    with patch("drumroll.pipelines.fleet.Session", LocalSession), patch("drumroll.cluster.cluster.ray", LocalRay):
        yield


class LocalSession:
    """The interface of `cluster.session.Session`; leaving the block ends every worker."""

    def __init__(self, config: RayConfig) -> None:
        self.config = config
        self.folder = None
        self.private = True
        self._pool = local_pool(config.cpu_slots)
        self._actors: list[LocalHandle] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_workers()
        for actor in self._actors:
            actor.join()

    def pool(self) -> Pool:
        return self._pool

    def node_id(self, node: str) -> str:
        return NODE if node == LOCAL else node

    def environment(self, placement: Placement) -> dict[str, str]:
        return {}

    def relocate(self, placement: Placement) -> Placement:
        return placement

    def object_store_bytes(self) -> float:
        return float("inf")

    def last_words(self, node: str, pid: int) -> str:
        return ""

    @contextmanager
    def launch(self) -> Iterator[None]:
        yield

    def adopt(self, actor: LocalHandle) -> None:
        self._actors.append(actor)

    def came_up(self, info: HostInfo) -> None:
        pass

    def end_workers(self) -> None:
        for actor in self._actors:
            actor.kill()


class LocalRay:
    """The functions of the module `ray` that `cluster.cluster` calls."""

    @staticmethod
    def remote(host: type[Host]) -> type[LocalHandle]:
        return LocalHandle

    @staticmethod
    def put(value: Any) -> LocalObject:
        future: Future[Any] = Future()
        future.set_result(value)
        return LocalObject(future)

    @staticmethod
    def kill(actor: LocalHandle) -> None:
        actor.kill()


class LocalObject:
    """An object reference."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class LocalHost(Host):
    """The real host's dispatch; this process needs neither plugins nor settings."""

    def __init__(self) -> None:
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._worker: Any = None
        self._where = "a worker that has not started"
        self._role, self._rank = "", -1
        self._info = HostInfo(NODE, "127.0.0.1", os.getpid())

    async def prepare(self, luggage: Luggage, role: str, rank: int) -> None:
        self._where, self._role, self._rank = seat(role, rank, NODE), role, rank

    async def start(self, target: str, rank: RankInfo, kwargs: Mapping[str, Any]) -> None:
        module, _, name = target.partition(":")
        self._worker = await self._run(target, lambda: getattr(importlib.import_module(module), name)(rank=rank, **kwargs))

    async def release(self) -> None:
        """Let go of what the end of a process would free: an engine's threads, the lock of the store."""
        if hasattr(self._worker, "close"):
            with suppress(Exception):  # closed already
                await self._run("close", self._worker.close)
        self._compute.shutdown(wait=False, cancel_futures=True)


class LocalHandle:
    """What Ray calls an actor handle: `handle.method.remote(...)` starts a call of the host's method. Every call comes by `submit`."""

    def __init__(self) -> None:
        self._host = LocalHost()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._alive = True
        self._answers: set[Future[Any]] = set()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    @classmethod
    def options(cls, **options: Any) -> type[LocalHandle]:
        return cls

    @classmethod
    def remote(cls) -> LocalHandle:
        return cls()

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)

    def submit(self, method: str, args: Sequence[Any]) -> Future[Any]:
        """Start a call as soon as every object among its arguments is there."""
        answer: Future[Any] = Future()
        with self._lock:
            if not self._alive:
                answer.set_exception(_died())
                return answer
            self._answers.add(answer)
            asyncio.run_coroutine_threadsafe(self._serve(method, args, answer), self._loop)
        return answer

    async def _serve(self, method: str, args: Sequence[Any], answer: Future[Any]) -> None:
        try:
            values = [await asyncio.wrap_future(part.future()) if isinstance(part, LocalObject) else part for part in args]
            result, error = await getattr(self._host, method)(*values), None
        except Exception as raised:
            result, error = None, raised
        with self._lock:
            if answer not in self._answers:  # the worker was killed meanwhile
                return
            self._answers.discard(answer)
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def kill(self) -> None:
        """End the worker: calls under way and later ones fail as they do when a process dies."""
        with self._lock:
            if not self._alive:
                return
            self._alive = False
            answers, self._answers = self._answers, set()
        for answer in answers:
            answer.set_exception(_died())
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    def join(self) -> None:
        self._thread.join(END_S)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        try:
            await self._host.release()
            await self._loop.shutdown_default_executor()
        finally:
            self._loop.stop()


class _Method:
    """`actor.method`, with Ray's ways to call it."""

    def __init__(self, actor: LocalHandle, name: str, num_returns: int = 1) -> None:
        self._actor = actor
        self._name = name
        self._num_returns = num_returns

    def options(self, *, num_returns: int) -> _Method:
        return _Method(self._actor, self._name, num_returns)

    def remote(self, *args: Any) -> Any:
        answer = self._actor.submit(self._name, args)
        return LocalObject(answer) if self._num_returns == 1 else [LocalObject(_part(answer, n)) for n in range(self._num_returns)]


def _part(answer: Future[Any], number: int) -> Future[Any]:
    """One of several values that a call returns."""
    part: Future[Any] = Future()

    def arrived(answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            part.set_result(answer.result()[number])
        else:
            part.set_exception(error)

    answer.add_done_callback(arrived)
    return part


def _died() -> RayActorError:
    return RayActorError(error_msg="The worker was killed.")
