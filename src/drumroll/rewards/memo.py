"""Values that are dear to compute and asked for more than once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Call(Generic[T]):
    task: asyncio.Task[T]
    num_waiting: int = 0


class Memo(Generic[T]):
    """Keeps the values of the keys that were used last. Callers who ask for one key at the same time share one computation.

    A computation that fails is not kept. One that nobody waits for any more is cancelled; as long as anybody waits, the others
    may give up without harm.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._open: dict[str, _Call[T]] = {}

    async def get(self, key: str, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The key's value, computed if it is not known."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._open:
            self._open[key] = _Call(asyncio.create_task(self._run(key, compute)))
        call = self._open[key]
        call.num_waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if not call.num_waiting:
                del self._open[key]
                call.task.cancel()  # without effect on one that is done

    async def _run(self, key: str, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        value = await compute()
        self._kept[key] = value
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return value
