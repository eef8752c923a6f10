"""Small workers for test_cluster.py: importable by the processes that host them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

from drumroll.errors import DataError
from drumroll.registry import REGISTRY
from drumroll.types import RankInfo


class Echo:
    """Says what it was told and where it runs."""

    def __init__(self, rank: RankInfo, greeting: str = "hello", fail_rank: int | None = None, hang_rank: int | None = None) -> None:
        self.rank = rank
        self.greeting = greeting
        if rank.rank == fail_rank:
            raise ValueError("this rank cannot be built")
        if rank.rank == hang_rank:
            time.sleep(600)

    def info(self) -> RankInfo:
        return self.rank

    def greet(self, name: str, *, mark: str = "!") -> str:
        return f"{self.greeting} {name}{mark} from {self.rank.rank}"

    def thread(self) -> str:
        return threading.current_thread().name

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def pid(self) -> int:
        return os.getpid()

    def block(self, seconds: float) -> None:
        time.sleep(seconds)

    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank.rank

    def add(self, *numbers: Any) -> Any:
        return sum(numbers[1:], numbers[0])

    def total(self, parts: list[list[int]], *, more: dict[str, list[int]]) -> int:
        return sum(map(sum, parts)) + sum(map(sum, more.values()))

    def split(self, count: int) -> list[list[int]]:
        return [[self.rank.rank, index] for index in range(count)]

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def fail_on(self, rank: int) -> int:
        """One rank fails; the others hang, as in a collective that it left."""
        if self.rank.rank == rank:
            raise KeyError("left the collective")
        time.sleep(30)
        return 0

    def bad_data(self) -> None:
        raise DataError("column 'answer' is missing")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def shipped(self, name: str, value: int) -> int:
        return int(REGISTRY.lookup("reward", name).target(value))

    async def relay(self, handle: Any, name: str) -> str:
        answer: str = await handle.call("greet", name, mark="?", deadline_s=10)
        return answer

    async def relay_late(self, handle: Any) -> None:
        await handle.call("nap", 30, deadline_s=0.2)
