"""Roles that leave a GPU to one another start one after the other; elsewhere they start side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumroll.config.load import check_config
from drumroll.config.models import RlConfig
from drumroll.pipelines import fleet as fleet_module
from drumroll.pipelines.fleet import Fleet
from drumroll.plan import make_plan, parse_pool

ROLES = ("actor_train", "actor_infer", "reference", "environment")


class Recorded:
    """A cluster of workers that note what happens to them."""

    deadline_s = 5.0

    def __init__(self, role: str, log: list[str]) -> None:
        self.role, self.log = role, log

    def some(self, ranks: Sequence[int], method: str, *args: Any) -> None:
        self.log.append(" ".join([self.role, method, *map(str, args)]))

    def all(self, method: str, *args: Any) -> list[None]:
        self.some([0], method, *args)
        return [None]


def launched(monkeypatch: pytest.MonkeyPatch, pool: str, offload: bool) -> tuple[list[str], Fleet, int]:
    """What happened while trainers and engines were started, and how many starts were under way at the same time."""
    log: list[str] = []
    lock, at_once = threading.Lock(), [0, 0]

    def launch(session: Any, placements: Any, target: str, *, kwargs: Any, **options: Any) -> Recorded:
        role = placements[0].role
        with lock:
            at_once[0] += 1
            at_once[1] = max(at_once)
        time.sleep(0.2)
        log.append(f"{role} started")
        with lock:
            at_once[0] -= 1
        return Recorded(role, log)

    monkeypatch.setattr(fleet_module.Cluster, "launch", launch)
    tree = {
        "pipeline": "rl",
        "max_steps": 1,
        "model": {"scratch": {"characters": "01"}},
        "data": {"train": {"path": "tasks.jsonl"}},
        "rewards": [{"kind": "exact_match"}],
        "trainer": {"offload": offload},
        "engine": {"offload": offload},
    }
    cfg = check_config(tree)
    assert isinstance(cfg, RlConfig)
    supervisor = SimpleNamespace(guard=lambda cluster, **options: None)
    fleet = Fleet(cfg, None, supervisor, make_plan(cfg, parse_pool(pool), ROLES), None, Path("model"))  # type: ignore[arg-type]
    fleet._start_together(trainers=lambda: fleet._trainers("actor_train", Path("model")), engines=lambda: fleet._engines(cfg))
    return log, fleet, at_once[1]


def test_roles_that_leave_a_gpu_start_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log, fleet, at_once = launched(monkeypatch, "1x1x80GiB", offload=True)
    assert at_once == 1
    first, second = (line.removesuffix(" started") for line in log if line.endswith("started"))
    leaving = {"actor_train": "actor_train to host", "actor_infer": "actor_infer sleep"}
    assert log == [f"{first} started", leaving[first], f"{second} started"]
    log.clear()
    with fleet._arbiter.grant("actor_train"):
        pass
    assert log == ([] if second == "actor_train" else ["actor_infer sleep", "actor_train to device"])
    log.clear()
    fleet._trainers("reference", Path("model"))  # later, when the weights that it begins with are known
    assert log == ["actor_train to host", "reference started"]


@pytest.mark.parametrize(("pool", "offload"), [("1x1x80GiB", False), ("1x1xcpu", True)])
def test_others_start_side_by_side(monkeypatch: pytest.MonkeyPatch, pool: str, offload: bool) -> None:
    _, _, at_once = launched(monkeypatch, pool, offload)
    assert at_once == 2
