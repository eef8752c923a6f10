"""The order in which training draws its tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drumroll.errors import DataError
from drumroll.types import Task, sample_seed


class TaskCursor:
    """Tasks without end, shuffled anew in every epoch.

    The order is a function of the seed and the epoch alone. Where one `take` reaches over the end of an epoch, tasks that
    it already holds move to the end of the new one, so that no task appears twice in a `take` of at most all tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise DataError("there are no tasks to draw from.")
        self.tasks = tasks
        self._seed = seed
        self._start_epoch(0, deferred=[])

    def __len__(self) -> int:
        """Tasks in an epoch."""
        return len(self.tasks)

    def take(self, n: int) -> list[Task]:
        """The next `n` tasks."""
        return [self.tasks[number] for number in self.take_numbers(n)]

    def take_numbers(self, n: int) -> list[int]:
        """The next `n` tasks, as places in `tasks`."""
        taken: list[int] = []
        while len(taken) < n:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1, deferred=taken if n <= len(self.tasks) else [])
            block = self._order[self._position : self._position + n - len(taken)]
            taken += block
            self._position += len(block)
        return taken

    def state(self) -> dict[str, Any]:
        """Where the cursor stands, as JSON can hold it."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "deferred": self._deferred,
            "seed": self._seed,
            "tasks": self._fingerprint(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken; refused when seed or tasks are others."""
        if state["seed"] != self._seed:
            raise DataError(f"the saved order of tasks was drawn with seed {state['seed']}, and this run has seed {self._seed}.")
        if state["tasks"] != self._fingerprint():
            raise DataError("the tasks are not the ones that the saved state was made with: ids or their order differ.")
        self._start_epoch(state["epoch"], list(state["deferred"]))
        self._position = state["position"]

    def _start_epoch(self, epoch: int, deferred: list[int]) -> None:
        # The bit generator's raw stream is the same in every NumPy version, which its `permutation` is not.
        keys = np.random.PCG64(sample_seed(self._seed, "tasks", epoch)).random_raw(len(self.tasks))
        order = np.argsort(keys, kind="stable")
        late = np.isin(order, deferred)
        self._order: list[int] = np.concatenate([order[~late], order[late]]).tolist()
        self._deferred = list(deferred)
        self._epoch = epoch
        self._position = 0

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for task in self.tasks:
            digest.update(task.id.encode() + b"\x1f")
        return digest.hexdigest()
