"""The Ray that a run works on: a private one on this machine, or a cluster that is there already.

A private one listens on the loopback only, has a token and a temporary folder of its own, and ends with the session, so that
two runs on one machine know nothing of each other.

    controller ── starts ──► gcs, raylet, agents ──► workers       each has DRUMROLL_SESSION=<folder> in its environment
        └── pipe ──► guardian: when the pipe closes, ends every process with that variable and removes the folder

The pipe closes in an orderly end and when the controller's process dies, be it by SIGKILL: nothing is left either way.
"""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
import ray._private.parameter
import ray._private.utils
import ray._private.worker
from ray._private import auto_init_hook, ray_constants, services
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drumroll.cluster.host import HostInfo, seat
from drumroll.config.models import RayConfig
from drumroll.errors import NodeLost, UserError, WorkerError, WorkerLost
from drumroll.plan import Node, Placement, Pool, local_pool
from drumroll.plan.pool import host_gib

LOCAL = "local"
"""What `local_pool` calls this machine."""

CPU_ENVIRONMENT = {
    # One compute thread per process: several processes with several threads each are many times slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Where a role is given more threads, those that wait sleep before long: spinning, they would take the cores from those that they wait
    # for. From one product to the next, microseconds later, it pays to stay awake.
    "GOMP_SPINCOUNT": "100000",
    # Memory that a pass gives back is what the next one asks for: returned to the system in between, every page of it would be a fault,
    # which costs a tenth of an update.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    # Machines that advertise AMX and trap it kill bfloat16 products with SIGILL otherwise.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
}

SPARE_GIB = 2.0
"""Memory of a machine that must be left, or Ray ends a worker before the kernel ends anything. Ray's own share of it would be several times
as much on a large one."""
CONNECT_S = 5.0
STOP_S = 3.0
"""How long the workers of a private Ray may take to end by themselves; the guardian kills those that do not."""
LAST_LINES = 12
"""Of a lost worker's log that errors show."""
MARK = "DRUMROLL_SESSION"
"""Variable in the environment of every process of a private Ray: its folder. Process ids are used again; the folder's name is not."""
GUARD, KEEP, REMOVE = "guard", "keep", "remove"
"""What a guardian is told about the folder: that it is there, and in an orderly end whether it stays."""


class Session:
    """A connection to Ray for the length of a `with` block.

        with Session(cfg.ray) as session:
            plan = make_plan(cfg, session.pool())
            trainers = Cluster.launch(session, plan.workers("actor_train"), "drumroll.workers.train:TrainWorker", kwargs={...})

    Leaving the block ends every worker, whatever raised.
    """

    def __init__(self, config: RayConfig) -> None:
        self.config = config
        self.folder: str | None = None
        """Temporary folder of a private Ray, with the workers' logs; kept when a worker failed."""
        self._pool: Pool | None = None
        self._inherited: dict[str, str] = {}
        """Variables that workers have from the start, because Ray's own processes have them."""
        self._stack = ExitStack()
        self._actors: list[Any] = []
        self._ending = False
        self._launches = threading.Condition()
        self._num_launches = 0
        """That are under way, in whatever threads."""
        self._local_pids: set[int] = set()
        self._guardian: _Guardian | None = None

    @property
    def private(self) -> bool:
        return self.config.address is None

    def __enter__(self) -> Self:
        if ray.is_initialized():
            raise UserError("this process is connected to Ray already. Call `ray.shutdown()` first.")
        auto_init_hook.enable_auto_connect = False  # a thread that is late must not start another Ray, without a token or a guardian
        try:
            self._stack.enter_context(_quiet())
            # Errors of results that nobody asks for any more are ignored; the mode is set by Ray itself.
            self._stack.enter_context(_environment({"RAY_IGNORE_UNHANDLED_ERRORS": "1"}, "RAY_AUTH_MODE"))
            # `ray.init` would take SIGTERM over; the program's own handler stays.
            with _replaced(ray._private.utils, "set_sigterm_handler", lambda handler: None):
                self._start() if self.private else self._join()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _start(self) -> None:
        self._guardian = _Guardian()
        # Sockets have paths of at most 107 characters, and Ray adds about 70.
        self.folder = tempfile.mkdtemp(prefix="drumroll-ray-", dir=None if len(tempfile.gettempdir()) < 15 else "/tmp")
        self._guardian.tell(GUARD, self.folder)
        # A token of its own: none is written into the home folder, and nobody else's is needed.
        self._stack.enter_context(_environment({"RAY_AUTH_TOKEN": secrets.token_hex(32)}))
        self._stack.enter_context(_fresh_token())
        marks = {MARK: self.folder, "SPT_NOENV": "1"}  # processes that give themselves a title do not write over the first one
        if all(node.kind == "cpu" for node in self.pool().nodes):  # then one environment does for all workers
            self._inherited = _environment_on("cpu")
        # Ray replaces 127.0.0.1 by the machine's outer address unless it is told that it cannot form a cluster.
        with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False), _few_processes(), _environment({**marks, **self._inherited}):
            ray.init(
                address="local",  # also when RAY_ADDRESS names a cluster
                num_cpus=os.cpu_count(),
                num_gpus=0,  # the plan gives out devices, not Ray
                object_store_memory=self.config.object_store_mib * 2**20,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=os.path.join(self.folder, "ray"),  # Ray opens its folder to everybody; the one around it stays closed
                _system_config={
                    "prestart_worker_first_driver": False,  # every worker has its own environment
                    "worker_niceness": 0,  # Ray's own choice would have them starve beside whatever else the machine does
                    "memory_usage_threshold": max(0.95, 1 - SPARE_GIB / host_gib()),
                },
            )

    def _join(self) -> None:
        address = str(self.config.address)
        try:
            found = services.canonicalize_bootstrap_address_or_die(address)
            host, _, port = found.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()  # Ray itself would try for minutes
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            advice = "Is it running, and at this host:port?"
            if "token" in str(error).casefold():
                advice = "Give its token in RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token."
            raise UserError(
                f"`ray.address`: cannot join the Ray cluster '{address}': {type(error).__name__}: {str(error).partition(chr(10))[0]} "
                f"{advice} Without the key, a private Ray is started."
            ) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.end_workers()
        finally:
            with self._launches:
                self._launches.wait_for(lambda: self._num_launches == 0, timeout=STOP_S)
            self._actors.clear()
            try:
                ray.shutdown()
            finally:
                _await_end(self._local_pids)
                self._stack.close()
                if self._guardian is not None:
                    keep = isinstance(error, WorkerError)
                    self._guardian.dismiss(KEEP if keep else REMOVE, self.folder)
                    if error is not None and keep:
                        error.add_note(f"The workers' logs are kept in {self.folder}.")

    def pool(self) -> Pool:
        """This machine, or the live nodes of the joined cluster as they were when first asked for."""
        if self._pool is None:
            self._pool = local_pool(self.config.cpu_slots) if self.private else Pool(tuple(map(self._node, self._live_nodes())))
        return self._pool

    @staticmethod
    def _live_nodes() -> list[Mapping[str, Any]]:
        """The head first, then by address: the same cluster always gives the same numbers."""

        def order(node: Mapping[str, Any]) -> tuple[bool, str, str]:
            return "node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"], node["NodeID"]

        return sorted((node for node in ray.nodes() if node["Alive"]), key=order)

    def _node(self, facts: Mapping[str, Any]) -> Node:
        """A live node as the plan sees it: Ray says how many GPUs may be used, the node itself says what they are."""
        resources, labels = facts["Resources"], facts.get("Labels", {})
        own = {key.removeprefix("ray.io/"): value for key, value in labels.items() if key != "ray.io/node-id"}
        kind_label = own.pop("accelerator-type", None) or next(
            (key.removeprefix("accelerator_type:") for key in resources if key.startswith("accelerator_type:")), None
        )
        num_gpus = int(resources.get("GPU", 0))
        common = {"id": facts["NodeID"], "address": facts["NodeManagerAddress"], "name": facts["NodeName"]}
        if num_gpus == 0:
            return Node(num_devices=self.config.cpu_slots or max(1, int(resources.get("CPU", 1))), kind="cpu", labels=own, **common)
        probe = ray.remote(num_cpus=0)(local_pool).options(scheduling_strategy=NodeAffinitySchedulingStrategy(facts["NodeID"], soft=False))
        seen: Node = ray.get(probe.remote(), timeout=self.config.start_timeout_s).nodes[0]
        found = seen if seen.kind == "gpu" and seen.num_devices >= num_gpus else None
        return Node(
            num_devices=num_gpus,
            kind="gpu",
            memory_gib=found.memory_gib if found else None,
            labels={**own, **({"gpu": kind_label} if kind_label else {}), **(found.labels if found else {})},
            device_ids=found.device_ids[:num_gpus] if found else (),
            free_gib=found.free_gib[:num_gpus] if found else (),
            host_gib=found.host_gib if found else None,
            **common,
        )

    def node_id(self, node: str) -> str:
        """Ray's id of a plan's node."""
        return str(ray.get_runtime_context().get_node_id()) if node == LOCAL else node

    def relocate(self, placement: Placement) -> Placement:
        """Where a worker that was lost can be started again: where it was, or on the first live node if it needs no device of its own."""
        if placement.node == LOCAL:
            return placement
        live = [str(node["NodeID"]) for node in self._live_nodes()]
        if placement.node in live:
            return placement
        if placement.devices:
            raise NodeLost(
                f"{seat(placement.role, placement.rank, placement.node)}: its node is gone, and with it the devices that the plan gave it. "
                f"`drumroll resume` makes a new plan for the nodes that are left."
            )
        return replace(placement, node=live[0])

    def object_store_bytes(self) -> float:
        """Room for objects on the live node that has least."""
        return min((float(node["Resources"].get("object_store_memory", 0.0)) for node in self._live_nodes()), default=0.0)

    def last_words(self, node: str, pid: int) -> str:
        """The last lines of a worker's log, as long as its node lives."""
        if node == self.node_id(LOCAL):
            return _last_words(pid)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            words = ray.remote(num_cpus=0)(_last_words).options(scheduling_strategy=strategy, max_retries=0).remote(pid)
            return str(ray.get(words, timeout=CONNECT_S))
        except Exception:  # the node has gone with its logs
            return ""

    def environment(self, placement: Placement) -> dict[str, str]:
        """Variables that Ray must give the worker's process before it starts, besides those that it has anyway. With any, Ray starts the
        process twice over, which takes as long again as importing Ray."""
        visible: list[str] = []
        if placement.kind == "gpu":
            node = self.pool().by_id[placement.node]
            visible = [node.device_id(device.local) for device in placement.devices]
        wanted = _environment_on(placement.kind, visible)
        return {name: value for name, value in wanted.items() if self._inherited.get(name) != value}

    @contextmanager
    def launch(self) -> Iterator[None]:
        """While workers are launched, in any thread. The end of the session waits for it, and lets no other one begin."""
        with self._launches:
            if self._ending:
                raise WorkerLost("nothing is launched any more: the session is ending.")
            self._num_launches += 1
        try:
            yield
        finally:
            with self._launches:
                self._num_launches -= 1
                self._launches.notify_all()

    def adopt(self, actor: Any) -> None:
        """End this actor with the session."""
        self._actors.append(actor)
        if self._ending:
            ray.kill(actor)

    def end_workers(self) -> None:
        """End every worker, and each that is adopted from now on: launches in other threads fail at once instead of going on."""
        with self._launches:
            self._ending = True
        for actor in tuple(self._actors):
            with suppress(Exception):
                ray.kill(actor)

    def came_up(self, info: HostInfo) -> None:
        """A worker's process runs; in a private session its end is waited for."""
        if self.private:
            self._local_pids.add(info.pid)


def _last_words(pid: int) -> str:
    """The end of what a worker of this node wrote, errors first."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    for pattern in (f"worker-*-{pid}.err", f"worker-*-{pid}.out"):
        for log in folder.glob(pattern):
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and not line.startswith(":")]
            if lines:
                return "\n".join(lines[-LAST_LINES:])
    return ""


class _Guardian:
    """A small process that outlives this one by seconds and clears up after it. No signal to this one's group reaches it."""

    def __init__(self) -> None:
        code = f"{inspect.getsource(_guard)}\n_guard({MARK!r}, {GUARD!r}, {KEEP!r})"
        self._process = subprocess.Popen(  # its end of the pipe is closed in every program that this process starts
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            text=True,
        )

    def tell(self, word: str, folder: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {folder}\n")
        self._process.stdin.flush()

    def dismiss(self, word: str, folder: str | None) -> None:
        """Have it end what is still there and deal with the folder, if there is one; returns when it is done."""
        with suppress(BrokenPipeError):  # somebody ended it
            if folder is not None:
                self.tell(word, folder)
        with suppress(BrokenPipeError):
            self._process.communicate()


def _guard(mark: str, guard: str, keep: str) -> None:
    """The guardian's program, which is this function's source alone: waits for the end of its input, and obeys its last line.

    A process that is being started shows no environment yet, and a controller that died may have been about to start one: the
    guardian goes on looking for a while after the last one that it found.
    """
    import os
    import shutil
    import signal
    import sys
    import time

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    if not lines:
        return
    word, _, folder = lines[-1].partition(" ")
    wanted = f"{mark}={folder}".encode()
    quiet_s = 1.0 if word == guard else 0.1
    started = found = time.monotonic()
    while time.monotonic() < min(found + quiet_s, started + 8.0):
        for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
            try:
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if wanted in environ.read().split(b"\0"):
                        os.kill(int(name), signal.SIGKILL)
                        found = time.monotonic()
            except OSError:  # it has ended, or is somebody else's
                continue
        time.sleep(0.02)
    if word != keep:
        shutil.rmtree(folder, ignore_errors=True)


def _environment_on(kind: str, visible: Sequence[str] = ()) -> dict[str, str]:
    """Variables of a worker on devices of this kind; `visible` are the GPUs that it may see."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray leaves the line above alone
        **(CPU_ENVIRONMENT if kind == "cpu" else {}),
    }


@contextmanager
def _few_processes() -> Iterator[None]:
    """A Ray of one machine goes without the processes that watch over a cluster, collect logs for a driver that wants none, and report how
    Ray is used: together they take as much of a processor as Ray itself. `ray.init` has no arguments for them."""
    lean = partial(ray._private.parameter.RayParams, no_monitor=True, include_log_monitor=False)
    with _replaced(ray._private.parameter, "RayParams", lean), _replaced(services, "start_api_server", lambda *args, **kwargs: ("", None)):
        yield


@contextmanager
def _environment(changes: Mapping[str, str], *others: str) -> Iterator[None]:
    """Variables for the length of a block; `others` are put back too."""
    before = {name: os.environ.get(name) for name in (*changes, *others)}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _fresh_token() -> Iterator[None]:
    """Ray keeps the first token that a process has read; a later session needs its own."""
    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)  # older versions of Ray have no tokens
    if loader is not None:
        loader.instance().reset_cache()
    try:
        yield
    finally:
        if loader is not None:
            loader.instance().reset_cache()


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's own remarks stay off the terminal; its errors arrive as exceptions."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _replaced(ray._private.worker, "print_to_stdstream", lambda *args, **kwargs: None):
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _await_end(pids: set[int]) -> None:
    """Wait until the processes are gone, within reason: a stopped process cannot end itself."""
    patience = time.monotonic() + STOP_S
    while any(map(_alive, pids)) and time.monotonic() < patience:
        time.sleep(0.02)
    pids.clear()
