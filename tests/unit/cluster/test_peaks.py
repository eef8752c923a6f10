from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumroll.cluster.peaks import Peaks
from drumroll.plan import Plan
from drumroll.plan.placement import Placement
from drumroll.plan.pool import Device


class Workers:
    """Two workers of a role, which remember what they were asked."""

    def __init__(self, role: str, *peaks: Sequence[int]) -> None:
        self.role, self.peaks = role, list(peaks)
        self.asked: list[str] = []

    def all(self, method: str, *args: Any, **kwargs: Any) -> Sequence[int]:
        self.asked.append(method)
        return self.peaks.pop(0)


def plan(kind: str) -> Plan:
    device = Device(0, "local", 0, kind)  # type: ignore[arg-type]
    return Plan({role: (Placement(role, 0, "local", (device,), device.kind),) for role in ("actor_train", "actor_infer")})  # type: ignore[arg-type]


def test_the_largest_worker_of_each_role_and_stage_counts_once() -> None:
    peaks = Peaks(plan("gpu"))
    trainers, engines = Workers("actor_train", (2**30, 3 * 2**30), (2**30, 2 * 2**30), (2**29, 0)), Workers("actor_infer", (0, 0))
    peaks.note(trainers, "update")
    peaks.note(trainers, "update")  # a second time within a step
    peaks.note(trainers, "sync")
    peaks.note(engines, "sync")
    assert peaks.take() == {"memory/actor_train_update_gib": 3.0, "memory/actor_train_sync_gib": 0.5}
    assert peaks.take() == {}


def test_nobody_is_asked_without_gpus() -> None:
    trainers = Workers("actor_train")
    peaks = Peaks(plan("cpu"))
    peaks.note(trainers, "update")
    assert trainers.asked == []
    assert peaks.take() == {}
