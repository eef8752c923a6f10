"""Clusters of workers and weight sync on a real Ray: one private session for the module, and one joined cluster of two nodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from drumroll.backends.lent import Lent
from drumroll.cluster.cluster import Cluster
from drumroll.cluster.session import Session
from drumroll.cluster.weights import Offer, WeightSync
from drumroll.config.models import RayConfig
from drumroll.errors import DataError, UserError, WeightSyncError, WorkerError, WorkerLost
from drumroll.plan import Device, Placement
from drumroll.registry import REGISTRY
from drumroll.types import Version

ECHO = "cluster_workers:Echo"
TRAINER = "cluster_weight_workers:Trainer"
ENGINE = "cluster_weight_workers:Engine"


def placements(role: str, nodes: list[str]) -> list[Placement]:
    return [Placement(role, rank, node, (Device(rank, node, rank, "cpu"),), "cpu") for rank, node in enumerate(nodes)]  # type: ignore[arg-type]


def double(value: int) -> int:
    return 2 * value


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # must not capture a private session
        REGISTRY.shipped["twice"] = lambda value: double(value)
        try:
            with Session(RayConfig(object_store_mib=128, cpu_slots=2)) as session:
                yield session
        finally:
            del REGISTRY.shipped["twice"]
    assert not os.path.exists(str(session.folder))


@pytest.fixture(scope="module")
def echo(session: Session) -> Cluster:
    return Cluster.launch(
        session,
        placements("environment", ["local", "local"]),
        ECHO,
        kwargs={"greeting": "hi"},
        rank_kwargs=[{}, {"greeting": "hey"}],
    )


class TestDispatch:
    def test_every_rank_knows_its_place(self, session: Session, echo: Cluster) -> None:
        first, second = echo.all("info")
        assert (first.role, first.rank, first.world, first.device) == ("environment", 0, 2, "cpu")
        assert second.rank == 1
        assert first.node == session.node_id("local") == echo.handles[0].node
        assert first.rendezvous == second.rendezvous
        assert first.rendezvous.startswith("127.0.0.1:")

    def test_only_the_loopback_is_used(self, session: Session, echo: Cluster) -> None:
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        assert echo.on(0, "environment", "GLOO_SOCKET_IFNAME") == ["lo"]

    def test_environment_is_set_before_the_process_starts(self, echo: Cluster) -> None:
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")
        assert echo.on(1, "environment", *names) == ["", "1", "AVX512_CORE_FP16"]

    def test_visible_devices_are_the_planned_ones(self, session: Session) -> None:
        gpus = Placement("critic", 0, "local", (Device(2, "local", 2, "gpu"), Device(3, "local", 3, "gpu")), "gpu")
        assert session.environment(gpus)["CUDA_VISIBLE_DEVICES"] == "2,3"

    def test_all_and_shards_keep_the_order_of_ranks(self, echo: Cluster) -> None:
        assert echo.all("greet", "Ann", mark=".") == ["hi Ann. from 0", "hey Ann. from 1"]
        assert echo.shards("greet", ["Ann", "Bob"]) == ["hi Ann! from 0", "hey Bob! from 1"]
        with pytest.raises(ValueError, match="got 1 shards for 2 ranks"):
            echo.shards("greet", ["Ann"])

    def test_the_loop_answers_while_the_compute_thread_works(self, echo: Cluster) -> None:
        async def run() -> float:
            blocked = asyncio.create_task(echo.call(0, "block", 1.0))
            await asyncio.sleep(0.1)
            started = time.monotonic()
            await echo.handles[0].ping()
            assert await echo.call(0, "nap", 0.0) == 0
            waited = time.monotonic() - started
            await blocked
            return waited

        assert asyncio.run(run()) < 0.7

    def test_plain_methods_share_one_thread(self, echo: Cluster) -> None:
        assert {echo.on(0, "thread") for _ in range(4)} == {"compute_0"}

    def test_handles_let_workers_call_workers(self, echo: Cluster) -> None:
        assert echo.on(0, "relay", echo.handles[1], "Eve") == "hey Eve? from 1"
        with pytest.raises(WorkerError, match=r"environment rank 1 on node \w+: no answer to nap\(\) within 0.2 s"):
            echo.on(0, "relay_late", echo.handles[1])

    def test_shipped_functions_arrive(self, echo: Cluster) -> None:
        assert echo.all("shipped", "python:twice", 21) == [42, 42]


class TestReferences:
    def test_values_arrive_where_refs_were_passed(self, echo: Cluster) -> None:
        one = echo.ref(0, "add", [1], [2])
        assert echo.on(1, "add", one, [3]) == [1, 2, 3]
        assert echo.on(1, "total", [one, [10]], more={"x": one}) == 16
        assert one.fetch() == [1, 2]

    def test_a_list_becomes_one_ref_for_each_element(self, echo: Cluster) -> None:
        parts = echo.refs(0, 2, "split", 2)
        assert echo.shards("add", parts) == [[0, 0], [0, 1]]
        (only,) = echo.refs(1, 1, "split", 1)
        assert asyncio.run(only.value()) == [1, 0]
        with pytest.raises(WorkerError, match=r"environment rank 1 on node \w+: no answer to nap\(\) within 0.1 s"):
            echo.ref(1, "nap", 0.3).fetch(deadline_s=0.1)
        with pytest.raises(WorkerError, match="was to return a list of 3 values and returned 2 values"):
            echo.refs(0, 3, "split", 2)[0].fetch()

    def test_a_failed_reference_names_the_worker_that_failed(self, echo: Cluster) -> None:
        with pytest.raises(WorkerError, match=r"environment rank 0 .*fail\(\) raised KeyError: 'lost'"):
            echo.on(1, "add", echo.ref(0, "fail", "lost"))


class TestErrors:
    def test_error_names_role_rank_node_method_and_remote_traceback(self, echo: Cluster) -> None:
        with pytest.raises(WorkerError) as caught:
            echo.all("fail", "oops")
        text = str(caught.value)
        assert f"environment rank 0 on node {echo.handles[0].node[:8]}: fail() raised KeyError: 'oops'" in text
        assert "raise KeyError(text)" in text
        assert "ray" not in text

    def test_user_errors_keep_their_class(self, echo: Cluster) -> None:
        with pytest.raises(DataError, match=r"column 'answer' is missing \(environment rank 1 on node \w+, bad_data\)"):
            echo.on(1, "bad_data")

    def test_unknown_method(self, echo: Cluster) -> None:
        with pytest.raises(WorkerError, match="Echo has no method 'nothing'"):
            echo.on(0, "nothing")

    def test_deadline_names_the_silent_worker(self, echo: Cluster) -> None:
        with pytest.raises(WorkerError, match=r"environment rank 1 on node \w+: no answer to nap\(\) within 0.1 s"):
            echo.on(1, "nap", 0.5, deadline_s=0.1)

    def test_failures_while_starting_name_the_rank(self, session: Session) -> None:
        with pytest.raises(WorkerError, match=r"reward rank 1 .* raised ValueError: this rank cannot be built"):
            Cluster.launch(session, placements("reward", ["local", "local"]), ECHO, kwargs={"fail_rank": 1})
        session.config = session.config.model_copy(update={"start_timeout_s": 2.0})
        try:
            with pytest.raises(WorkerError, match=r"reward rank 0 on node \w+: no answer to \S+\(\) within .*start_timeout_s"):
                Cluster.launch(session, placements("reward", ["local"]), ECHO, kwargs={"hang_rank": 0})
        finally:
            session.config = session.config.model_copy(update={"start_timeout_s": 120.0})

    def test_lost_and_stuck_workers(self, session: Session) -> None:
        crew = Cluster.launch(session, placements("reward", ["local", "local"]), ECHO)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=r"reward rank 1 .*left the collective"):
            crew.all("fail_on", 1)  # rank 0 hangs
        with pytest.raises(WorkerLost, match=r"reward rank 1 on node \w+: gone while die\(\) was under way"):
            crew.on(1, "die")
        with pytest.raises(WorkerLost, match="reward rank 1"):
            crew.all("block", 30)
        with pytest.raises(WorkerLost, match="reward rank 1"):
            asyncio.run(crew.call(1, "info"))
        assert time.monotonic() - started < 10
        crew.kill()


@pytest.fixture(scope="module")
def trainers(session: Session) -> Cluster:
    return Cluster.launch(session, placements("actor_train", ["local", "local"]), TRAINER)


@pytest.fixture(scope="module")
def engines(session: Session) -> Cluster:
    return Cluster.launch(session, placements("actor_infer", ["local", "local"]), ENGINE)


class TestReplacement:
    def test_a_rank_that_is_killed_is_replaced_under_its_number(self, session: Session) -> None:
        cluster = Cluster.launch(session, placements("environment", ["local", "local"]), ECHO)
        before = cluster.handles
        vigil = before[1].vigil()
        os.kill(before[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"environment rank 1 on node \w+: gone while being watched"):
            vigil.result(timeout=20)
        assert list(cluster.lost(deadline_s=20)) == [1]
        assert cluster.replace(1).pid != before[1].pid
        assert cluster.handles[0] is before[0]
        assert cluster.lost(deadline_s=20) == {}
        cluster.kill()

    def test_who_is_late_is_named_with_what_it_does(self, session: Session) -> None:
        cluster = Cluster.launch(session, placements("environment", ["local", "local"]), ECHO)
        os.kill(cluster.handles[0].pid, signal.SIGSTOP)
        with pytest.raises(WorkerError) as error:
            cluster.all("block", 60.0, deadline_s=1.0)
        first, *lines = str(error.value).splitlines()
        assert "no answer to block() within 1 s" in first
        assert re.search(r"environment rank 0 on node \w+ does not answer at all: it is frozen", lines[0])
        assert re.search(r"environment rank 1 on node \w+ computes, in block\(\) for \d+ s", lines[1])
        cluster.kill()


class TestWeightSync:
    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("bucket_bytes", [16, 2**20])  # a bucket for every tensor, one for all
    def test_weights_arrive_with_their_version(self, trainers: Cluster, engines: Cluster, shared: bool, bucket_bytes: int) -> None:
        sync = WeightSync(trainers, engines, bucket_bytes=bucket_bytes, shared_memory=shared, deadline_s=30)
        for step in (1, 2):
            trainers.all("set", version=step)
            report = sync.push(Version(0, step))
            assert engines.all("matches", step) == [True, True]
        assert (report.version, report.num_tensors, report.num_bytes) == (Version(0, 2), 3, 50 * 8 * 4 + 8 * 8 * 2 + 4)
        assert report.transports == dict.fromkeys((0, 1), "shared_memory" if shared else "broadcast")
        assert 0 < report.seconds < 10
        assert sync.failed == {}
        assert trainers.on(0, "num_segments") == 0

    def test_group_is_rebuilt_when_membership_changes(self, trainers: Cluster, engines: Cluster) -> None:
        sync = WeightSync(trainers, engines, shared_memory=False, deadline_s=30)
        sync.push(Version(0, 1))
        trainers.all("set", version=7)
        assert sync.push(Version(0, 2), ranks=[1]).transports == {1: "broadcast"}
        assert engines.all("matches", 7) == [False, True]
        sync.push(Version(0, 3))
        assert engines.all("matches", 7) == [True, True]

    @pytest.mark.parametrize("shared", [True, False])
    def test_damage_names_tensor_and_engine(self, trainers: Cluster, engines: Cluster, shared: bool) -> None:
        sync = WeightSync(trainers, engines, shared_memory=shared, deadline_s=30)
        engines.on(1, "set", corrupt="layer.weight", paused=False)
        failed = sync.push(Version(0, 4)).failed
        assert re.match(r"actor_infer rank 1 on node \w+: tensor 'layer.weight' arrived damaged", failed[1])
        assert list(sync.failed) == list(failed) == [1]
        assert engines.all("paused") == [False, True]
        engines.on(1, "set", corrupt="", paused=False)
        sync.push(Version(0, 5))
        assert sync.failed == {}

    @pytest.mark.parametrize("shared", [True, False])
    def test_an_engine_that_fails_blocks_nobody(self, trainers: Cluster, engines: Cluster, shared: bool) -> None:
        sync = WeightSync(trainers, engines, bucket_bytes=16, shared_memory=shared, deadline_s=30)
        engines.on(0, "set", fault="raise")
        started = time.monotonic()
        assert re.match(r"actor_infer rank 0 .*no room for these weights", sync.push(Version(0, 6)).failed[0])
        assert time.monotonic() - started < 10
        assert 0 in sync.failed
        assert (1 in sync.failed) is (not shared)
        engines.all("set", fault="", paused=False)
        sync.push(Version(0, 7))
        assert sync.failed == {}
        assert trainers.on(0, "num_segments") == 0

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_trainer_that_fails_leaves_nothing_locked(self, trainers: Cluster, engines: Cluster, shared: bool, rank: int) -> None:
        sync = WeightSync(trainers, engines, shared_memory=shared, deadline_s=30)
        trainers.on(rank, "set", fault="raise")
        with pytest.raises(WorkerError, match=rf"actor_train rank {rank} .*the gather failed"):
            sync.push(Version(0, 8))
        assert trainers.on(0, "num_segments") == 0
        trainers.on(rank, "set", fault="")
        sync.push(Version(0, 9))
        assert sync.failed == {}

    @pytest.mark.parametrize("shared", [True, False])
    def test_lost_engine(self, session: Session, trainers: Cluster, engines: Cluster, shared: bool) -> None:
        (mortal,) = Cluster.launch(session, placements("actor_infer", ["local"]), ENGINE).handles
        crew = Cluster("actor_infer", [engines.handles[0], mortal])
        sync = WeightSync(trainers, crew, bucket_bytes=16, shared_memory=shared, deadline_s=30)
        crew.on(1, "set", fault="die")
        started = time.monotonic()
        assert "gone while receive_weights" in sync.push(Version(0, 10)).failed[1]
        assert time.monotonic() - started < 10
        sync.push(Version(0, 11), ranks=[0])
        assert list(sync.failed) == [1]

    def test_lost_trainer_frees_the_engines(self, session: Session, engines: Cluster) -> None:
        mortal = Cluster.launch(session, placements("actor_train", ["local"]), TRAINER)
        mortal.on(0, "set", fault="die")
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="actor_train rank 0"):
            WeightSync(mortal, engines, deadline_s=30).push(Version(0, 12))
        assert time.monotonic() - started < 10
        assert engines.all("paused", deadline_s=5.0) == [True, True], "none of them waits for it any more"

    def test_shared_memory_of_another_node_is_refused(self, trainers: Cluster, engines: Cluster) -> None:
        offer = Offer(Version(0, 1), "another-node", Lent(1, 0, (3, 4, 5), False, 10.0), None)
        with pytest.raises(WeightSyncError, match=r"shared memory of node another- cannot be read on node"):
            engines.on(0, "receive_weights", offer, 0, "shared_memory", "keep")


LATE_LAUNCH = """
    import threading
    import ray
    from drumroll.cluster.cluster import Cluster
    from drumroll.cluster.session import Session
    from drumroll.config.models import RayConfig
    from drumroll.errors import WorkerLost
    from drumroll.plan import Device, Placement

    def replace(when):
        try:
            cluster.replace(0)
        except Exception as error:
            print(f"{when}: {type(error).__name__}")

    with Session(RayConfig(object_store_mib=128, cpu_slots=1)) as session:
        place = Placement("environment", 0, "local", (Device(0, "local", 0, "cpu"),), "cpu")
        cluster = Cluster.launch(session, [place], "cluster_workers:Echo", kwargs={"greeting": "hi"})
        began = threading.Event()
        adopt = session.adopt
        session.adopt = lambda actor: (adopt(actor), began.set())
        late = threading.Thread(target=replace, args=["at the end"])
        late.start()
        began.wait()
    late.join()
    replace("after it")
    print("Ray runs:", ray.is_initialized())
"""

INTERRUPTED_RUN = """
    import signal, sys, time
    from drumroll.cluster.cluster import Cluster
    from drumroll.cluster.session import Session
    from drumroll.config.models import RayConfig
    from drumroll.plan import Device, Placement

    def stop(number, frame):
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, stop)
    with Session(RayConfig(object_store_mib=80, cpu_slots=1)) as session:
        place = Placement("reward", 0, "local", (Device(0, "local", 0, "cpu"),), "cpu")
        crew = Cluster.launch(session, [place], "cluster_workers:Echo")
        print(session.folder, flush=True)
        crew.all("block", 600)
"""


def processes_of(session_id: int) -> list[str]:
    """Command lines of everything that runs in a terminal session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session_id and fields[0] != "Z":
                found.append((entry / "cmdline").read_text())
        except (OSError, ValueError, IndexError):
            continue
    return found


class TestProcesses:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted_run_leaves_nothing_and_disturbs_nobody(self, echo: Cluster, number: signal.Signals) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED_RUN)]
        with subprocess.Popen(
            command, env=environment, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as run:
            assert run.stdout is not None
            assert run.stderr is not None
            folder = run.stdout.readline().strip()
            assert os.path.isdir(folder), run.stderr.read()
            assert len(processes_of(run.pid)) > 3
            if number == signal.SIGINT:
                os.killpg(run.pid, number)  # as a terminal does
            else:
                run.send_signal(number)
            output, errors = run.communicate(timeout=20)
        assert run.returncode in (-signal.SIGINT, 130, 143)
        assert output == ""
        assert "ray" not in errors.replace("drumroll-ray", "").split("Traceback")[0]
        patience = time.monotonic() + 5
        while processes_of(run.pid) and time.monotonic() < patience:
            time.sleep(0.05)
        assert processes_of(run.pid) == []
        assert not os.path.exists(folder)
        assert echo.all("greet", "Ann") == ["hi Ann! from 0", "hey Ann! from 1"]

    def test_two_nodes(self) -> None:
        """A cluster is joined by address, and weights cross nodes by broadcast though both nodes are this machine."""
        script = Path(__file__).parent / "cluster_two_nodes.py"
        run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr
        facts = json.loads(run.stdout.splitlines()[-1])
        assert facts == {
            "slots": [2, 3],
            "labels": [{}, {"gpu": "L40S"}],
            "transports": ["shared_memory", "broadcast"],
            "apart": True,
            "matches": [True, True],
        }

    def test_a_cluster_that_is_not_there(self) -> None:
        code = """
            from drumroll.cluster.session import Session
            from drumroll.config.models import RayConfig
            Session(RayConfig(address="127.0.0.1:9")).__enter__()
        """
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False)
        assert "UserError: `ray.address`: cannot join the Ray cluster '127.0.0.1:9': ConnectionRefusedError" in run.stderr

    def test_a_launch_that_is_late_starts_no_other_ray(self) -> None:
        """Threads replace workers until the very end of a session: one hangs on to the end of a launch, another comes after it."""
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", textwrap.dedent(LATE_LAUNCH)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines() == ["at the end: WorkerLost", "after it: WorkerLost", "Ray runs: False"]

    def test_one_session_at_a_time_in_a_process(self, session: Session) -> None:
        with pytest.raises(UserError, match="connected to Ray already"), Session(RayConfig()):
            pass
        assert ray.is_initialized()
