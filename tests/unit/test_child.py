"""Children and nurseries: how each end is told, whenever it comes. What children are for is tested with rewards and environments."""

import asyncio
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumroll.child import Child, ChildDied, Nursery


async def child_of_a_nursery(begin: Any) -> Child:
    """A child that begins with a call of `begin`."""
    nursery = await Nursery.start("functools:partial", begin)
    try:
        return await nursery.child()
    finally:
        await nursery.end()


@pytest.mark.parametrize(
    ("run", "ending"),
    [
        (lambda: Child.start("os:_exit", 3), "exit code 3"),
        (lambda: Child.start("missing:opener", None), "ModuleNotFoundError: No module named 'missing'"),
        (lambda: Nursery.start("os:_exit", 3), "exit code 3"),
        (lambda: Nursery.start("builtins:open", "not-there"), "FileNotFoundError"),
        (lambda: child_of_a_nursery(os.abort), "signal SIGABRT"),
        (lambda: child_of_a_nursery(operator.neg), "TypeError"),
    ],
)
def test_one_that_cannot_begin_says_how_it_ended(run: Callable[[], Any], ending: str) -> None:
    with pytest.raises(ChildDied, match=ending):
        asyncio.run(run())


def test_children_of_a_nursery_are_processes_of_their_own_and_end_with_it() -> None:
    async def run() -> None:
        nursery = await Nursery.start("functools:partial", globals)
        children = [await nursery.child() for _ in range(3)]
        assert len({child.pid for child in children}) == 3
        await children[0].end()
        assert [child.alive for child in children] == [False, True, True]
        with pytest.raises(ChildDied, match="exit code 1"):  # what it got from its opener answers no questions
            await children[1].ask("anything")
        await nursery.end()
        assert not children[2].alive
        assert not any(Path(f"/proc/{child.pid}").exists() for child in children)
        with pytest.raises(ChildDied, match="nursery has ended"):
            await nursery.child()

    asyncio.run(run())
