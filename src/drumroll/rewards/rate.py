"""A limit on how often something is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class RateLimit:
    """Lets through so many a minute, evenly spaced and in the order of asking: a token bucket that holds one token.

    Whoever gives up while waiting costs the others nothing. Example: `await RateLimit(per_minute=60).take()`.
    """

    def __init__(
        self,
        per_minute: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._sleep = sleep
        self._full_at = clock()
        self._turn = asyncio.Lock()  # its waiters are served in order

    async def take(self) -> None:
        """Wait for the token, and take it."""
        async with self._turn:
            while (wait_s := self._full_at - self._clock()) > 0:
                await self._sleep(wait_s)
            self._full_at = self._clock() + 60.0 / self.per_minute
