"""Imports are most of a start, and a third of an import is the garbage collector, looking again and again at what will stay for good."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Where much is imported: the collector rests."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def begin_importing() -> None:
    """For processes that import what they need once, before they do anything: the collector rests until `have_imported`."""
    gc.disable()


def have_imported() -> None:
    """What is there now stays for good: the collector need never look at it, and processes that are forked from this one share it."""
    gc.freeze()
    gc.enable()
