"""The stand-in for Ray does what Ray does: the same run, the same dispatch, the same errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import THREAD_NAME, LocalSession, local_cluster
from safetensors.torch import load_file
from tiny import run_tiny

from drumroll.cluster.cluster import Cluster
from drumroll.config.models import RayConfig
from drumroll.errors import DataError, WorkerError, WorkerLost
from drumroll.plan import Device, Placement
from drumroll.record.folder import RunFolder


def test_a_run_in_this_process_gives_the_weights_of_one_on_ray(first: RunFolder, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with local_cluster():
        run = run_tiny(tmp_path)
    left_over = [thread.name for thread in threading.enumerate() if thread not in before]
    ours, theirs = (load_file(folder.final_model / "model.safetensors") for folder in (run, first))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert THREAD_NAME not in left_over


@pytest.fixture
def echo() -> Iterator[Cluster]:
    places = [Placement("environment", rank, "local", (Device(rank, "local", rank, "cpu"),), "cpu") for rank in range(2)]
    with local_cluster(), LocalSession(RayConfig(cpu_slots=2)) as session:
        yield Cluster.launch(session, places, "cluster_workers:Echo", kwargs={"greeting": "hi"}, rank_kwargs=[{}, {"greeting": "hey"}])  # type: ignore[arg-type]


def test_dispatch(echo: Cluster) -> None:
    assert echo.all("greet", "Ann", mark=".") == ["hi Ann. from 0", "hey Ann. from 1"]
    assert echo.shards("greet", ["Ann", "Bob"]) == ["hi Ann! from 0", "hey Bob! from 1"]
    assert echo.on(0, "relay", echo.handles[1], "Eve") == "hey Eve? from 1"
    assert {echo.on(0, "thread") for _ in range(4)} == {"compute_0"}


def test_the_loop_answers_while_the_compute_thread_works(echo: Cluster) -> None:
    blocked = echo.submit(0, "block", 0.3)
    assert echo.on(0, "nap", 0.0) == 0
    assert not blocked.done()
    blocked.result(10)


def test_references(echo: Cluster) -> None:
    one = echo.ref(0, "add", [1], [2])
    assert echo.on(1, "total", [one, [10]], more={"x": one}) == 16
    assert one.fetch() == [1, 2]
    parts = echo.refs(0, 2, "split", 2)
    assert echo.shards("add", parts) == [[0, 0], [0, 1]]
    kept = echo.kept("split", [1, 2])
    assert [part.fetch() for part in kept] == [[[0, 0]], [[1, 0], [1, 1]]]
    (only,) = echo.refs(1, 1, "split", 1)
    assert asyncio.run(only.value()) == [1, 0]


def test_errors(echo: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"environment rank 0 on node 0123abcd: fail\(\) raised KeyError: 'lost'"):
        echo.on(1, "add", echo.ref(0, "fail", "lost"))
    with pytest.raises(WorkerError, match=r"rank 1 on node \w+: no answer to nap\(\) within 0.05 s"):
        echo.on(1, "nap", 0.2, deadline_s=0.05)
    with pytest.raises(WorkerError, match="was to return a list of 3 values and returned 2 values"):
        echo.refs(0, 3, "split", 2)[0].fetch()
    with pytest.raises(DataError, match="column 'answer' is missing"):
        echo.on(0, "bad_data")


def test_killed_workers_are_lost() -> None:
    place = Placement("reward", 0, "local", (Device(0, "local", 0, "cpu"),), "cpu")
    with local_cluster(), LocalSession(RayConfig(cpu_slots=1)) as session:
        crew = Cluster.launch(session, [place], "cluster_workers:Echo")  # type: ignore[arg-type]
        pending = crew.submit(0, "nap", 60.0)
        crew.kill()
        with pytest.raises(WorkerLost, match="gone while nap"):
            pending.result(10)
        with pytest.raises(WorkerLost, match="gone while greet"):
            crew.on(0, "greet", "Ann")
