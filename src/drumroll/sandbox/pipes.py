"""Pipes between drumroll and a guest, on the event loop: fed from a text, or tapped up to an allowance."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType

CHUNK_BYTES = 1 << 16


class Pipe:
    """A pipe whose two ends are closed one by one, or together at the end of a `with`."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close_read()
        self.close_write()

    def close_read(self) -> None:
        if self.read >= 0:
            os.close(self.read)
            self.read = -1

    def close_write(self) -> None:
        if self.write >= 0:
            os.close(self.write)
            self.write = -1


def close_handed_over(read: Iterable[Pipe], write: Iterable[Pipe]) -> None:
    """Closes the ends that a guest has now, so that it is the only one to have them."""
    for pipe in read:
        pipe.close_read()
    for pipe in write:
        pipe.close_write()


async def feed(pipe: Pipe, content: bytes) -> None:
    """Writes into a pipe as the reader takes it, then closes the end. A reader that has gone is no error."""
    loop = asyncio.get_running_loop()
    os.set_blocking(pipe.write, False)
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(pipe.write, rest[:CHUNK_BYTES]) :]
        except BlockingIOError:
            writable = asyncio.Event()
            loop.add_writer(pipe.write, writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(pipe.write)
        except BrokenPipeError:
            break
    pipe.close_write()


@contextlib.asynccontextmanager
async def feeding(*contents: tuple[Pipe, bytes]) -> AsyncIterator[None]:
    """Feeds pipes while the body runs. What is not taken by then is dropped."""
    tasks = [asyncio.create_task(feed(pipe, content)) for pipe, content in contents]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Allowance:
    """How many bytes several taps may collect together."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes
        self.exceeded = False

    def take(self, num_bytes: int) -> int:
        """How many of so many bytes may be kept."""
        kept = min(num_bytes, self.left)
        self.left -= kept
        self.exceeded = self.exceeded or kept < num_bytes
        return kept


class Tap:
    """Collects what comes out of a pipe while a `with` lasts, and what is left in it at its end. Calls `on_excess` beyond the allowance."""

    def __init__(self, pipe: Pipe, allowance: Allowance, on_excess: Callable[[], None]) -> None:
        self.file = pipe.read
        self.allowance = allowance
        self.on_excess = on_excess
        self.content = bytearray()

    def __enter__(self) -> Tap:
        os.set_blocking(self.file, False)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.file, self.collect)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self.collect():
            pass
        self.loop.remove_reader(self.file)

    def collect(self) -> bool:
        """Takes what is there now, up to a chunk; False when there is nothing, or nothing more may be kept."""
        try:
            chunk = os.read(self.file, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.content += chunk[: self.allowance.take(len(chunk))]
        if self.allowance.exceeded:
            self.on_excess()
        if self.allowance.exceeded or not chunk:
            self.loop.remove_reader(self.file)
            return False
        return True

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")
