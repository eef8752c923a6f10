"""A reply outlives its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from drumroll.rollout import engine_client
from drumroll.rollout.engine_client import Engines
from drumroll.types import Chunk, GenRequest, Sampling

REQUEST = GenRequest("r", [7], Sampling(max_new_tokens=6), seed=1)


class Client:
    """An engine that answers with the numbers from `len(sampled)` on, and is out of reach after `lasts` of them, or gone."""

    def __init__(self, lasts: int | None = None, num_waiting: int = 0, *, is_gone: bool = False) -> None:
        self.lasts = lasts
        self.num_waiting = num_waiting
        self.is_gone = is_gone
        self.asked: list[GenRequest] = []

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
        self.asked.append(request)
        await asyncio.sleep(0)
        first, last = len(request.sampled), request.sampling.max_new_tokens
        end = last if self.lasts is None else min(last, first + self.lasts)
        tokens = list(range(first, end))
        finish: Any = "length" if end == last and self.lasts is None else "lost"
        return Chunk(request.id, tokens, [-float(token) for token in tokens], [3] * len(tokens), finish, slot=2)


def generate(clients: list[Client], rank: int = 0, *, goes_on: bool = True, meanwhile: Callable[[Engines], None] | None = None) -> Chunk:
    async def run() -> Chunk:
        engines = Engines(clients, goes_on=goes_on)  # type: ignore[arg-type]
        reply = asyncio.create_task(engines[rank].generate(REQUEST, 60.0))
        if meanwhile is not None:
            for _ in range(20):
                await asyncio.sleep(0)
            assert not reply.done(), "there is nobody to go on"
            meanwhile(engines)
        return await asyncio.wait_for(reply, 20)

    return asyncio.run(run())


def test_it_goes_on_elsewhere_from_the_tokens_that_arrived() -> None:
    lost, other = Client(lasts=2), Client()
    chunk = generate([lost, other])
    assert (chunk.token_ids, chunk.logp, chunk.token_version) == ([*range(6)], [-float(token) for token in range(6)], [3] * 6)
    assert (chunk.finish, chunk.slot) == ("length", 2)
    assert list(other.asked[0].sampled) == [0, 1]


def test_where_every_bit_counts_it_begins_anew() -> None:
    other = Client()
    assert generate([Client(lasts=2), other], goes_on=False).token_ids == [*range(6)]
    assert list(other.asked[0].sampled) == []


def test_the_least_busy_of_the_others_is_chosen() -> None:
    busy, idle = Client(num_waiting=5), Client(num_waiting=1)
    generate([Client(lasts=1), busy, idle])
    assert (len(busy.asked), len(idle.asked)) == (0, 1)


def test_where_there_is_no_other_it_waits_for_one_that_is_replaced() -> None:
    chunk = generate([Client(lasts=3)], meanwhile=lambda engines: engines.replace(0, Client()))  # type: ignore[arg-type]
    assert (chunk.token_ids, chunk.finish) == ([*range(6)], "length")


def test_one_that_is_gone_is_not_asked_again_before_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: the tokens that have arrived are kept."""
    monkeypatch.setattr(engine_client, "REST_S", 0.0)
    gone = Client(lasts=3, is_gone=True)
    chunk = generate([gone], meanwhile=lambda engines: engines.replace(0, Client()))  # type: ignore[arg-type]
    assert (len(gone.asked), chunk.token_ids) == (1, [*range(6)])


def test_an_engine_that_was_out_of_reach_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was cut for a moment: nobody replaces anything."""
    monkeypatch.setattr(engine_client, "REST_S", 0.01)
    client = Client(lasts=1)

    async def run() -> Chunk:
        engines = Engines([client])  # type: ignore[list-item]
        reply = asyncio.create_task(engines[0].generate(REQUEST, 60.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.lasts = None
        return await asyncio.wait_for(reply, 20)

    assert asyncio.run(run()).token_ids == [*range(6)]


def test_a_reply_that_loses_engine_after_engine_is_not_handed_on_for_ever() -> None:
    clients = [Client(lasts=0) for _ in range(6)]
    assert generate(clients).finish == "lost"
    assert sum(len(client.asked) for client in clients) == 1 + engine_client.MAX_MOVES


def test_a_reply_that_waits_for_an_engine_can_be_aborted() -> None:
    async def run() -> Chunk:
        reply = asyncio.create_task(Engines([Client(lasts=2)])[0].generate(REQUEST, 60.0))  # type: ignore[list-item]
        for _ in range(20):
            await asyncio.sleep(0)
        reply.cancel()
        return await reply

    chunk = asyncio.run(run())
    assert (chunk.finish, chunk.token_ids) == ("aborted", [0, 1])
