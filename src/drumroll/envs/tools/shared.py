"""What all episodes of a process share: one object for equal arguments, for as long as the event loop lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")


def once_per_loop(make: Callable[P, T]) -> Callable[P, T]:
    """Like `functools.cache`, for what belongs to the running event loop: locks, tasks, connections."""
    made: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, T]] = WeakKeyDictionary()

    @wraps(make)
    def shared(*args: P.args, **kwargs: P.kwargs) -> T:
        of_loop = made.setdefault(asyncio.get_running_loop(), {})
        key = (args, tuple(sorted(kwargs.items())))
        if key not in of_loop:
            of_loop[key] = make(*args, **kwargs)
        return of_loop[key]

    return shared
