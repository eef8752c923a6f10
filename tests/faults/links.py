"""Lines between environment workers and engines that can be cut and slowed: an actor in the middle of each, through real Ray.

Nothing is lost on the way, as on a network that repeats what did not arrive: while a line is cut, calls and answers wait at its ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import ray
import ray.cloudpickle

from drumroll.cluster.cluster import Handle
from drumroll.pipelines.servers import Servers

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find this file


class Line:
    """Passes every call of an engine's host on."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._delay_s = 0.0

    async def call(self, method: str, returns: Any, template: Any, *values: Any) -> Any:
        await self._pass()
        answer = await self._host.call.remote(method, returns, template, *values)
        await self._pass()
        return answer

    async def hold(self, seconds: float) -> None:
        self._is_open.clear()
        await asyncio.sleep(seconds)
        self._is_open.set()

    async def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    async def _pass(self) -> None:
        await asyncio.sleep(self._delay_s)
        await self._is_open.wait()


@dataclass
class Links:
    """The lines of a run."""

    by_engine: dict[int, list[Any]] = field(default_factory=dict)

    def hold(self, engine: int, seconds: float) -> None:
        """Cut the lines to an engine; returns when they are whole again."""
        ray.get([line.hold.remote(seconds) for line in self.by_engine[engine]])

    def delay(self, engine: int, seconds: float) -> None:
        ray.get([line.delay.remote(seconds) for line in self.by_engine[engine]])

    def through(self, handle: Handle) -> Handle:
        """The engine's address by way of a new line."""
        line = ray.remote(Line).options(num_cpus=0, max_concurrency=1000).remote(handle.actor)
        self.by_engine.setdefault(handle.rank, []).append(line)
        return replace(handle, actor=line)


@contextmanager
def cut_links() -> Iterator[Links]:
    """Environment workers of runs that are started inside of the block reach their engines through lines."""
    links = Links()

    def relayed(servers: Servers) -> tuple[tuple[Handle, ...], tuple[Handle, ...]]:
        return tuple(links.through(handle) for handle in servers._engines.handles), ()

    with patch.object(Servers, "_those_who_answer", property(relayed)):
        yield links
