"""The garbage collector of a process that keeps many small objects for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 20)
"""Objects between two collections of the youngest, and how many collections of each generation there are between two of the next."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for circles of objects less often, and among what is there already, such as modules, not at all.

    A scheduler with ten thousand engines has some million objects that live for minutes. By Python's defaults, going through all of
    them costs as much as scheduling; the scheduler leaves no circles behind that would have to be found."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
