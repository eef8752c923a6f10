"""The most GPU memory that each role had in use at each stage of a step. No ray, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from drumroll.config.models import Role
from drumroll.plan import Plan, Stage


class _Workers(Protocol):
    role: Any

    def all(self, method: str, *args: Any, **kwargs: Any) -> Sequence[Any]: ...


class Peaks:
    """Asks the workers of a role, when it has finished a stage, what they had in use since they were asked last.

    peaks = Peaks(plan)
    peaks.note(trainers, "update")
    peaks.take()                      # {"memory/actor_train_update_gib": 40.3}

    A worker counts what its own process had in use; the engines of other packages tell it at each sync alone. Without GPUs nobody is
    asked."""

    def __init__(self, plan: Plan) -> None:
        self._on_gpu = {role for role in plan.roles if any(device.kind == "gpu" for device in plan.devices(role))}
        self._bytes: dict[tuple[Role, Stage], int] = {}

    def note(self, workers: _Workers, stage: Stage) -> None:
        """The role of these workers has finished a stage; its largest worker counts."""
        if workers.role not in self._on_gpu:
            return
        peak = max(workers.all("take_peak_bytes"))
        self._bytes[workers.role, stage] = max(peak, self._bytes.get((workers.role, stage), 0))

    def take(self) -> dict[str, float]:
        """Metrics of what was noted since the last time."""
        taken, self._bytes = self._bytes, {}
        return {f"memory/{role}_{stage}_gib": value / 2**30 for (role, stage), value in taken.items() if value}
