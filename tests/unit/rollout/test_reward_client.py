"""Questions find a reward worker that is well, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from drumroll.errors import RewardError, WorkerError, WorkerLost
from drumroll.rollout import reward_client
from drumroll.rollout.reward_client import RewardClient


class Worker:
    """A reward worker that answers with its rank, or as `answer` says."""

    def __init__(self, rank: int, answer: Callable[[], Any] | None = None) -> None:
        self.rank = rank
        self.where = f"reward rank {rank}"
        self.num_open = self.most_open = self.num_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_silent = False
        self._answer = answer

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        assert (method, args[:2]) == ("judge", ("math", 0))
        self.num_asked += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            return {"rank": float(self.rank)} if self._answer is None else self._answer()
        finally:
            self.num_open -= 1

    async def ping(self, deadline_s: float) -> float:
        if self.is_silent:
            raise WorkerError(f"{self.where}: no answer to ping() within {deadline_s:g} s.")
        return 0.0


async def ask(client: RewardClient, asked: list[int] | None = None) -> dict[str, float]:
    return await client.ask("math", 0, None, [] if asked is None else asked)  # type: ignore[arg-type]


def raising(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def test_questions_are_spread_evenly() -> None:
    async def run() -> list[int]:
        workers = [Worker(rank) for rank in range(3)]
        client = RewardClient(workers)
        await asyncio.gather(*(ask(client) for _ in range(30)))
        return [worker.most_open for worker in workers]

    assert asyncio.run(run()) == [10, 10, 10]


def test_who_has_been_asked_is_asked_last() -> None:
    async def run() -> list[float]:
        client = RewardClient([Worker(rank) for rank in range(3)])
        asked: list[int] = []
        return [(await ask(client, asked))["rank"] for _ in range(3)]

    assert asyncio.run(run()) == [0.0, 1.0, 2.0]


def test_a_worker_that_is_gone_is_not_asked_again() -> None:
    async def run() -> None:
        workers = [Worker(0, raising(WorkerLost("gone"))), Worker(1)]
        client = RewardClient(workers)
        assert [(await ask(client))["rank"] for _ in range(4)] == [1.0] * 4, "the question goes elsewhere"
        assert workers[0].num_asked == 1

    asyncio.run(run())


def test_where_all_are_gone_a_question_waits_for_one_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = RewardClient([Worker(0, raising(WorkerLost("gone")))])
        waiting = [asyncio.create_task(ask(client)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(question.done() for question in waiting)
        client.replace(0, Worker(0))
        assert [(await question)["rank"] for question in waiting] == [0.0] * 3
        monkeypatch.setattr(reward_client, "REPLACED_S", 0.01)
        alone = RewardClient([Worker(0, raising(WorkerLost("gone")))])
        with pytest.raises(WorkerLost, match="every reward worker is gone"):
            await ask(alone)

    asyncio.run(run())


def test_a_question_that_takes_worker_after_worker_along_is_the_rewards_own_failure() -> None:
    async def run() -> None:
        client = RewardClient([Worker(rank, raising(WorkerLost(f"{rank} gone"))) for rank in range(3)])
        with pytest.raises(RewardError, match="2 reward workers in a row ended while they computed it; the last: 1 gone"):
            await ask(client)

    asyncio.run(run())


def test_a_silent_worker_is_noticed_by_its_pings_however_long_its_queue_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_client, "PING_EVERY_S", 0.001)

    async def run() -> None:
        workers = [Worker(0), Worker(1)]
        workers[0].gate.clear()
        client = RewardClient(workers)
        patient = asyncio.create_task(ask(client))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not patient.done(), "a worker that answers pings may take its time"
        workers[0].is_silent = True
        assert (await patient)["rank"] == 1.0, "the question goes elsewhere"
        assert workers[0].num_open == 0 or not workers[0].gate.is_set()
        assert [(await ask(client))["rank"] for _ in range(3)] == [1.0, 1.0, 1.0], "it rests for a while"

    asyncio.run(run())


def test_an_error_of_the_reward_passes_through() -> None:
    async def run() -> None:
        with pytest.raises(RewardError, match="returned nan"):
            await ask(RewardClient([Worker(0, raising(RewardError("returned nan")))]))
        with pytest.raises(RewardError, match="it broke"):
            await ask(RewardClient([Worker(0, raising(WorkerError("it broke")))]))

    asyncio.run(run())
