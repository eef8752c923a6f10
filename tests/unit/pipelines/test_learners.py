"""Calls of trainers outlive trainers: a role that lost somebody starts anew, goes back, and does it again."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from drumroll.cluster import supervision
from drumroll.config.models import CheckpointConfig, SupervisionConfig
from drumroll.errors import DeviceMemoryError, NodeLost, RoleLost, WorkerError, WorkerLost, WorkerOverdue
from drumroll.pipelines.learners import Learners


class Trainers:
    """A role whose whole state is a number."""

    def __init__(self, role: str = "actor_train") -> None:
        self.role = role
        self.world = 1
        self.handles = (SimpleNamespace(where=f"{role} rank 0", node="a"),)
        self.state = 0
        self.is_dead = False
        self.num_launches = 1
        self.failures: list[str] = []
        """Methods that fail once more, each for want of its worker."""
        self.told: list[str] = []

    def lost(self, deadline_s: float) -> dict[int, WorkerError]:
        return {0: WorkerLost(f"{self.role} rank 0: gone")} if self.is_dead else {}

    def relaunch(self) -> None:
        self._may_fail("relaunch")
        self.state, self.is_dead = -1, False
        self.num_launches += 1

    def kept(self, method: str) -> list[Any]:
        assert method == "remember"
        return [self.state]

    def shards(self, method: str, memories: list[Any]) -> None:
        self._may_fail(method)
        assert method == "recall"
        (self.state,) = memories

    def _may_fail(self, method: str) -> None:
        if method in self.failures:
            self.failures.remove(method)
            self.is_dead = True
            raise WorkerLost(f"{self.role} rank 0: gone while {method}() was under way")

    def all(self, method: str) -> list[int]:
        self.told.append(method)
        return [100]

    def last_words(self, rank: int) -> str:
        return ""

    def train(self, *, dies: bool = False, error: Exception | None = None) -> int:
        """Adds one; a death leaves the state half changed."""
        self.state += 1
        if dies and self.num_launches == 1:
            self.is_dead, self.state = True, 1000
            raise WorkerLost("gone while train() was under way")
        if error is not None and self.num_launches == 1:
            raise error
        return self.state


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.0)


def learners(in_memory: bool | str = True, max_restarts: int = 5, store_bytes: float = 1e9) -> tuple[Learners, list[str]]:
    said: list[str] = []
    cfg = SimpleNamespace(
        supervision=SupervisionConfig(max_restarts=max_restarts),
        checkpoint=CheckpointConfig(in_memory=in_memory),  # type: ignore[arg-type]
    )
    supervisor = SimpleNamespace(
        guard=lambda cluster, **options: cluster, let_go=lambda ward: None, say=lambda kind, text: said.append(kind)
    )
    session = SimpleNamespace(object_store_bytes=lambda: store_bytes)
    made: Any = Learners(
        cfg, session, supervisor, SimpleNamespace(roles=("actor_train",)), SimpleNamespace(grant=lambda role: nullcontext())
    )  # type: ignore[arg-type]
    return made, said


def test_a_call_that_loses_its_role_is_made_again_from_where_it_stood() -> None:
    trainers = Trainers()
    crew, said = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    assert crew.redone(trainers.train, changes=True) == 1
    assert crew.redone(lambda: trainers.train(dies=True), changes=True) == 2
    assert (trainers.num_launches, said) == (2, ["role lost", "redone"])
    assert crew.redone(trainers.train, changes=True) == 3


def test_what_others_lose_does_not_take_the_learners_back() -> None:
    trainers, assembler = Trainers(), Trainers("assembler")
    crew, _ = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    crew.add(assembler)  # type: ignore[arg-type]
    crew.redone(trainers.train, changes=True)
    trainers.state = 7
    crew.redone(lambda: assembler.train(dies=True))
    assert (trainers.state, trainers.num_launches, assembler.num_launches) == (7, 1, 2)


def test_without_a_copy_the_loss_goes_up_once_the_role_stands_again() -> None:
    trainers = Trainers()
    crew, _ = learners(in_memory=False)
    crew.add(trainers)  # type: ignore[arg-type]
    crew.redone(trainers.train, changes=True)
    with pytest.raises(WorkerLost, match="gone while train"):
        crew.redone(lambda: trainers.train(dies=True), changes=True)
    assert trainers.num_launches == 2


@pytest.mark.parametrize(("store_bytes", "keeps"), [(400.0, True), (399.0, False)])
def test_a_copy_is_kept_where_two_fit_into_half_of_the_store(store_bytes: float, keeps: bool) -> None:
    trainers = Trainers()
    crew, _ = learners(in_memory="auto", store_bytes=store_bytes)
    crew.add(trainers)  # type: ignore[arg-type]
    crew.redone(trainers.train, changes=True)
    with nullcontext() if keeps else pytest.raises(WorkerLost):
        crew.redone(lambda: trainers.train(dies=True), changes=True)


def test_an_error_of_a_worker_that_is_well_is_an_error() -> None:
    trainers = Trainers()
    crew, _ = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="a shape does not fit"):
        crew.redone(lambda: trainers.train(error=WorkerError("a shape does not fit")), changes=True)
    assert trainers.num_launches == 1


def test_a_role_that_hangs_is_started_anew() -> None:
    trainers = Trainers()
    crew, _ = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    crew.redone(trainers.train, changes=True)
    late = WorkerOverdue("actor_train rank 0 on node a: no answer to train() within 10 s")
    assert crew.redone(lambda: trainers.train(error=late), changes=True) == 2
    assert trainers.num_launches == 2


def test_that_somebody_else_is_late_is_no_reason_to_start_anew() -> None:
    trainers = Trainers()
    crew, _ = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    with pytest.raises(WorkerOverdue):
        crew.redone(lambda: trainers.train(error=WorkerOverdue("actor_infer rank 0 on node a: no answer to resume() within 10 s")))
    assert trainers.num_launches == 1


@pytest.mark.parametrize("failures", [["relaunch"], ["relaunch", "relaunch"], ["recall"], ["recall", "relaunch"]])
def test_a_loss_on_the_way_back_is_one_more_loss(failures: list[str]) -> None:
    trainers = Trainers()
    crew, _ = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    crew.redone(trainers.train, changes=True)
    trainers.failures = list(failures)
    assert crew.redone(lambda: trainers.train(dies=True), changes=True) == 2
    assert trainers.failures == []


def test_a_node_that_is_gone_is_said_to_be() -> None:
    trainers = Trainers()
    crew, _ = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    trainers.relaunch = raising(NodeLost("its node is gone"))  # type: ignore[method-assign]
    with pytest.raises(NodeLost, match="its node is gone"):
        crew.redone(lambda: trainers.train(dies=True))


def raising(error: Exception) -> Any:
    def function() -> None:
        raise error

    return function


def test_without_a_copy_other_trouble_is_a_loss_too() -> None:
    """So that the run goes back to its newest checkpoint."""
    trainers = Trainers()
    crew, said = learners(in_memory=False)
    crew.add(trainers)  # type: ignore[arg-type]
    with pytest.raises(WorkerLost, match="out of device memory"):
        crew.redone(lambda: trainers.train(error=out_of_memory()), changes=True)
    assert said == ["micro-batches halved", "role lost"]
    assert trainers.told.count("halve_micro_batches") == 1


def out_of_memory(stage: str = "update") -> DeviceMemoryError:
    error = DeviceMemoryError("actor_train rank 0: out of device memory")
    error.role, error.rank, error.stage = "actor_train", 0, stage
    return error


def test_micro_batches_are_halved_once_when_memory_runs_out() -> None:
    trainers = Trainers()
    crew, said = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    crew.redone(trainers.train, changes=True)
    assert crew.redone(lambda: trainers.train(error=out_of_memory()), changes=True) == 2
    assert (trainers.told.count("halve_micro_batches"), said[0]) == (1, "micro-batches halved")
    trainers.num_launches = 1
    with pytest.raises(DeviceMemoryError):
        crew.redone(lambda: trainers.train(error=out_of_memory()), changes=True)


def test_memory_that_runs_out_elsewhere_is_an_error() -> None:
    trainers = Trainers()
    crew, _ = learners()
    crew.add(trainers)  # type: ignore[arg-type]
    with pytest.raises(DeviceMemoryError):
        crew.redone(lambda: trainers.train(error=out_of_memory("sync")))
    assert trainers.num_launches == 1


def test_restarts_have_an_end() -> None:
    trainers = Trainers()
    crew, _ = learners(max_restarts=0)
    crew.add(trainers)  # type: ignore[arg-type]
    with pytest.raises(RoleLost, match="actor_train: nobody is left to do its work, and its restarts are used up: 0 within"):
        crew.redone(lambda: trainers.train(dies=True))
