"""Workers are missed when they are lost, and only then; what becomes of them has an end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from drumroll.cluster import supervision
from drumroll.cluster.supervision import Budget, Supervisor, answered_within
from drumroll.config.models import SupervisionConfig
from drumroll.errors import NodeLost, RoleLost, WorkerError, WorkerLost

PATIENCE_S = 20.0
"""For what must happen sooner or later."""


@dataclass(eq=False)
class Worker:
    """A handle whose worker dies, freezes or fails when a test says so."""

    where: str
    is_frozen: bool = False
    has_pulse: bool = True
    end: Future[Any] = field(default_factory=Future)
    num_pings: int = 0

    def vigil(self) -> Future[Any]:
        watched: Future[Any] = Future()
        self.end.add_done_callback(lambda end: watched.cancelled() or watched.set_exception(end.exception() or WorkerLost("killed")))
        return watched

    async def ping(self, deadline_s: float) -> float:
        self.num_pings += 1
        if self.is_frozen:
            await asyncio.Event().wait()
        return 0.0

    async def call(self, method: str, *, deadline_s: float) -> None:
        assert method == "pulse"
        if not self.has_pulse:
            await asyncio.Event().wait()

    def kill(self) -> None:
        if not self.end.done():
            self.end.set_exception(WorkerLost(f"{self.where}: killed"))


class Role:
    """A cluster of such workers."""

    role = "actor_infer"

    def __init__(self, world: int, fails: int = 0, node_is_lost: bool = False) -> None:
        self.world = world
        self.handles = [Worker(f"actor_infer rank {rank}") for rank in range(world)]
        self.fails = fails
        """Replacements that do not come up."""
        self.node_is_lost = node_is_lost

    def replace(self, rank: int) -> Worker:
        if self.node_is_lost:
            raise NodeLost(f"actor_infer rank {rank}: its node is gone")
        if self.fails:
            self.fails -= 1
            raise WorkerError("it did not come up")
        self.handles[rank] = Worker(f"actor_infer rank {rank} again")
        return self.handles[rank]

    def last_words(self, rank: int) -> str:
        return "Segmentation fault"


@dataclass
class Seen:
    """What a guarded role was heard of."""

    out: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    lost: list[RoleLost] = field(default_factory=list)
    said: list[tuple[str, str]] = field(default_factory=list)

    def until(self, condition: Any) -> None:
        patience = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < patience, self
            time.sleep(0.005)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "PING_EVERY_S", 0.01)
    monkeypatch.setattr(supervision, "PULSE_EVERY_S", 0.01)
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def supervisor(seen: Seen) -> Iterator[Supervisor]:
    with Supervisor(SupervisionConfig(silence_s=1.0, max_restarts=3), lambda kind, text: seen.said.append((kind, text))) as supervisor:
        yield supervisor


def guard(supervisor: Supervisor, role: Role, seen: Seen, pulse_s: float | None = None) -> supervision.Ward:
    return supervisor.guard(
        role,  # type: ignore[arg-type]
        out=lambda rank, error: seen.out.append(rank),
        back=seen.back.append,
        lost=seen.lost.append,
        pulse_s=pulse_s,
    )


def test_a_worker_that_dies_is_replaced_and_its_successor_is_watched(supervisor: Supervisor, seen: Seen) -> None:
    role = Role(3)
    guard(supervisor, role, seen)
    role.handles[1].kill()
    seen.until(lambda: seen.back == [1])
    role.handles[1].kill()
    seen.until(lambda: seen.back == [1, 1])
    assert (seen.out, seen.lost) == ([1, 1], [])
    assert [kind for kind, _ in seen.said] == ["worker lost", "worker replaced"] * 2


def test_a_frozen_worker_is_ended_and_replaced(supervisor: Supervisor, seen: Seen) -> None:
    role = Role(2)
    frozen = role.handles[0]
    guard(supervisor, role, seen)
    frozen.is_frozen = True
    seen.until(lambda: seen.back == [0])
    assert frozen.end.done()
    assert "actor_infer rank 0: it has not answered for 1 s, and was ended." in seen.said[0][1]


def test_a_worker_that_answers_and_does_nothing_is_ended_and_replaced(supervisor: Supervisor, seen: Seen) -> None:
    role = Role(2)
    role.handles[1].has_pulse = False
    guard(supervisor, role, seen, pulse_s=0.1)
    seen.until(lambda: seen.back == [1])
    assert "it has not got on with its work for 0.1 s" in seen.said[0][1]


def test_one_that_is_found_to_be_of_no_use_is_replaced_once(supervisor: Supervisor, seen: Seen) -> None:
    role = Role(2)
    ward = guard(supervisor, role, seen)
    for _ in range(3):
        supervisor.sick(ward, 1, WorkerError("checksums differ"))
    seen.until(lambda: seen.back == [1])
    assert seen.out == [1]


def test_a_launch_that_fails_is_tried_again(supervisor: Supervisor, seen: Seen) -> None:
    role = Role(1, fails=2)
    guard(supervisor, role, seen)
    role.handles[0].kill()
    seen.until(lambda: seen.back == [0])
    assert [kind for kind, _ in seen.said].count("worker not replaced") == 2


def test_when_restarts_are_used_up_the_others_go_on_and_the_last_one_takes_the_role_along(seen: Seen) -> None:
    with Supervisor(SupervisionConfig(max_restarts=0), lambda kind, text: seen.said.append((kind, text))) as supervisor:
        role = Role(2)
        guard(supervisor, role, seen)
        role.handles[0].kill()
        seen.until(lambda: "worker given up" in dict(seen.said))
        assert (seen.out, seen.lost) == ([0], [])
        role.handles[1].kill()
        seen.until(lambda: seen.lost)
    message = str(seen.lost[0])
    assert "actor_infer: nobody is left to do its work, and its restarts are used up: 0 within 3600 s" in message
    assert "supervision.max_restarts" in message
    assert "Its last words:\n    Segmentation fault" in message
    assert "drumroll resume" in message


def test_a_worker_whose_node_is_gone_is_given_up_at_once(supervisor: Supervisor, seen: Seen) -> None:
    role = Role(2, node_is_lost=True)
    guard(supervisor, role, seen)
    role.handles[0].kill()
    seen.until(lambda: "worker given up" in dict(seen.said))
    role.handles[1].kill()
    seen.until(lambda: seen.lost)
    assert "its node is gone" in str(seen.lost[0])


def test_nobody_is_missed_after_the_end_or_once_let_go(supervisor: Supervisor, seen: Seen) -> None:
    role, other = Role(1), Role(1)
    supervisor.let_go(guard(supervisor, role, seen))
    guard(supervisor, other, seen)
    seen.until(lambda: role.handles[0].num_pings and other.handles[0].num_pings)
    role.handles[0].kill()
    supervisor.stop()
    time.sleep(0.05)
    other.handles[0].kill()
    time.sleep(0.05)
    assert seen == Seen()


def test_a_watcher_that_was_asleep_itself_blames_nobody() -> None:
    """Seconds in which this process did not run do not count, however many they are."""

    async def scene() -> bool:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def doze() -> None:
            time.sleep(2.5)
            asyncio.get_running_loop().call_later(0.05, answer.set_result, None)

        asyncio.get_running_loop().call_later(0.05, doze)
        return await answered_within(answer, 2.0)

    assert asyncio.run(scene())


class TestBudget:
    @pytest.fixture(autouse=True)
    def usual_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.5)

    def test_a_worker_that_does_not_come_up_is_waited_for_ever_longer(self) -> None:
        now = [0.0]
        budget = Budget(SupervisionConfig(max_restarts=100), clock=lambda: now[0])
        pauses = []
        for _ in range(9):
            pauses.append(budget.spend())
            now[0] += 100.0
        assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]

    def test_one_that_was_up_for_a_while_is_replaced_at_once(self) -> None:
        now = [0.0]
        budget = Budget(SupervisionConfig(max_restarts=100), clock=lambda: now[0])
        pauses = []
        for lived_s in (1.0, 1.0, 60.0, 1.0):
            pauses.append(budget.spend())
            budget.is_up()
            now[0] += lived_s
        assert [*pauses, budget.spend()] == [0.0, 0.5, 1.0, 0.0, 0.5]

    def test_workers_that_are_lost_together_do_not_wait_for_one_another(self) -> None:
        budget = Budget(SupervisionConfig(max_restarts=100), clock=lambda: 0.0)
        assert [budget.spend(rank) for rank in range(8)] == [0.0] * 8

    def test_only_a_window_counts(self) -> None:
        now = [0.0]
        budget = Budget(SupervisionConfig(max_restarts=2, window_s=100.0), clock=lambda: now[0])
        assert [budget.spend() is None for _ in range(3)] == [False, False, True]
        now[0] = 100.0
        assert budget.spend() is not None


def test_no_thread_is_left(seen: Seen) -> None:
    before = set(threading.enumerate())
    with Supervisor(SupervisionConfig(), lambda kind, text: None):
        pass
    assert set(threading.enumerate()) <= before
