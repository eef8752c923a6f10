"""The workers of one role: launch, dispatch, collection, and errors that say which worker failed.

    trainers = Cluster.launch(session, plan.workers("actor_train"), "drumroll.workers.train:TrainWorker", kwargs={...})
    trainers.all("train", loss)                       # every rank, results by rank
    trainers.shards("train", [shard0, shard1])        # one element for each rank
    await engines.call(3, "poll", 1.0)                # from an event loop
    scores = reference.kept("score", [shard0, shard1])  # a Ref for each rank: results stay in the object store ...
    trainers.all("train", scores)                     # ... and arrive there as the values themselves

Every call has a deadline. A `Handle` is one worker's address; it can be sent to other workers, which call it directly.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drumroll.cluster.host import KEPT, Host, HostInfo, Returns, Slot, Whereabouts, seat
from drumroll.cluster.session import Session
from drumroll.errors import DeviceMemoryError, DrumrollError, UserError, WorkerError, WorkerLost, WorkerOverdue, WorkerUnreachable
from drumroll.luggage import Luggage
from drumroll.plan import Placement
from drumroll.types import RankInfo

DEADLINE_S = 3600.0
"""Of a call that names none."""

WHEREABOUTS_S = 5.0
"""How long a worker that is late may take to say what it does."""

FAILURE_GRACE_S = 0.5
"""After the first failure of a call on several ranks, how long to wait for one that tells more: a rank that died makes its
peers fail too, and often sooner."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A result that stays where it is. As an argument (also inside lists, tuples and dictionaries) it arrives as the value."""

    object: Any
    where: str
    method: str
    deadline_s: float = DEADLINE_S

    def fetch(self, deadline_s: float | None = None) -> Any:
        """Bring the value here; for small results."""
        return collect([self._arriving()], [self.where], self.method, deadline_s or self.deadline_s)[0]

    async def value(self) -> Any:
        """`fetch`, awaited."""
        return await _within(self._arriving(), self.where, self.method, self.deadline_s)

    def _arriving(self) -> Future[Any]:
        return _translate(self.object.future(), self.where, self.method)


@dataclass(frozen=True, slots=True)
class Handle:
    """One worker's address. Example, inside an environment worker: `await engine.call("submit", requests, deadline_s=30)`."""

    actor: Any
    role: str
    rank: int
    node: str
    """Ray's id of its node."""
    deadline_s: float = DEADLINE_S
    pid: int = 0
    """Of its process."""

    @property
    def where(self) -> str:
        return seat(self.role, self.rank, self.node)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call; its errors are drumroll's."""
        return _translate(self._objects(method, args, kwargs, 1).future(), self.where, method)

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call and await. `deadline_s` is this call's; everything else goes to the method."""
        return await _within(self.submit(method, *args, **kwargs), self.where, method, deadline_s or self.deadline_s)

    def ref(self, method: str, *args: Any, **kwargs: Any) -> Ref:
        """Start a call whose result stays in the object store. Its failure shows where the `Ref` is used."""
        return self._ref(self._objects(method, args, kwargs, 1), method)

    def refs(self, num_returns: int, method: str, *args: Any, **kwargs: Any) -> list[Ref]:
        """As `ref`, for a method that returns a list of `num_returns` values: one `Ref` for each."""
        objects = self._objects(method, args, kwargs, num_returns, returns=num_returns)
        return [self._ref(part, method) for part in (objects if num_returns > 1 else [objects])]

    def kept(self, method: str, *args: Any, **kwargs: Any) -> tuple[Future[Any], Ref]:
        """As `ref`, with something that ends when the result is there, and fails when there will be none."""
        done, result = self._objects(method, args, kwargs, 2, returns=KEPT)
        return _translate(done.future(), self.where, method), self._ref(result, method)

    async def ping(self, deadline_s: float = 10.0) -> float:
        """The worker's clock; answered also while it computes."""
        answer: float = await _within(_translate(self.actor.ping.remote().future(), self.where, "ping"), self.where, "ping", deadline_s)
        return answer

    def vigil(self) -> Future[Any]:
        """Fails with `WorkerLost` as soon as the worker's process is gone, and never ends otherwise."""
        return _translate(self.actor.vigil.remote().future(), self.where, "being watched")

    def kill(self) -> None:
        """End the worker; whoever waits for an answer of it hears at once that it is lost."""
        ray.kill(self.actor)

    def _ref(self, part: Any, method: str) -> Ref:
        return Ref(part, self.where, method, self.deadline_s)

    def _objects(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_objects: int, *, returns: Returns | None = None
    ) -> Any:
        objects: list[Any] = []
        template = _slots((args, dict(kwargs)), objects)
        return self.actor.call.options(num_returns=num_objects).remote(method, returns, template, *objects)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How the workers of a role are made, the first time and again."""

    session: Session
    placements: tuple[Placement, ...]
    target: str
    kwargs: Mapping[str, Any]
    rank_kwargs: Sequence[Mapping[str, Any]] | None
    deadline_s: float

    def bring_up(self, ranks: Sequence[int]) -> list[Handle]:
        """Start these ranks, all at once, and return when all are up; if one does not come up, all are ended and the error names it.
        All ranks together meet at a new address; one that comes back alone meets nobody."""
        session, started = self.session, time.monotonic()
        placements = [self.placements[rank] for rank in ranks]
        actor_class = ray.remote(Host)
        actors = []
        for placement in placements:
            variables = session.environment(placement)
            actor = actor_class.options(
                num_cpus=0,
                num_gpus=0,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(session.node_id(placement.node), soft=False),
                runtime_env={"env_vars": variables} if variables else None,
            ).remote()
            session.adopt(actor)
            actors.append(actor)
        names = [seat(placement.role, placement.rank, session.node_id(placement.node)) for placement in placements]

        def stage(method: str, objects: Sequence[Any]) -> list[Any]:
            left = started + session.config.start_timeout_s - time.monotonic()
            futures = [_translate(part.future(), name, method) for part, name in zip(objects, names[: len(objects)], strict=True)]
            return collect(futures, names[: len(objects)], method, left, hint=" Raise `ray.start_timeout_s` if it is only slow.")

        try:
            infos: list[HostInfo] = stage("start-up", [actor.describe.remote() for actor in actors])
            for info in infos:
                session.came_up(info)
            luggage = ray.put(Luggage.pack())
            seats = [(placement.role, placement.rank) for placement in placements]
            stage("prepare", [actor.prepare.remote(luggage, *place) for actor, place in zip(actors, seats, strict=True)])
            rendezvous = ""
            if len(actors) > 1:
                (port,) = stage("free_port", [actors[0].free_port.remote()])
                rendezvous = f"{infos[0].address}:{port}"
            starts = []
            for actor, placement, info in zip(actors, placements, infos, strict=True):
                rank, world = placement.rank, len(self.placements)
                device = "cuda:0" if placement.kind == "gpu" and placement.devices else "cpu"
                place = RankInfo(placement.role, rank, world, device, info.node, rendezvous, max(1, len(placement.devices)))
                kwargs = {**self.kwargs, **(self.rank_kwargs[rank] if self.rank_kwargs else {})}
                starts.append(actor.start.remote(self.target, place, kwargs))
            stage("start", starts)
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
        return [
            Handle(actor, placement.role, placement.rank, info.node, self.deadline_s, info.pid)
            for actor, placement, info in zip(actors, placements, infos, strict=True)
        ]


class Cluster:
    """The workers of one role, by rank. A rank that is lost can be replaced: it keeps its number and gets another handle."""

    def __init__(self, role: str, handles: Sequence[Handle], deadline_s: float = DEADLINE_S, recipe: _Recipe | None = None) -> None:
        self.role = role
        self.handles = tuple(handles)
        self.deadline_s = deadline_s
        self._recipe = recipe
        self._lock = threading.Lock()

    @classmethod
    def launch(
        cls,
        session: Session,
        placements: Sequence[Placement],
        target: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        rank_kwargs: Sequence[Mapping[str, Any]] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Self:
        """Start one worker for each placement, all at once, and return when all are up.

        The worker is `target` ("package.module:Class"), built with `rank=RankInfo(...)`, `kwargs`, and its entry of
        `rank_kwargs`. If one does not come up within `ray.start_timeout_s`, all are ended and the error names it.
        """
        assert placements, "a cluster needs at least one placement"
        recipe = _Recipe(session, tuple(placements), target, kwargs or {}, rank_kwargs, deadline_s)
        with session.launch():
            return cls(placements[0].role, recipe.bring_up(range(len(placements))), deadline_s, recipe)

    def replace(self, rank: int) -> Handle:
        """End what is left of one worker and start another in its place: on its node, or where that is gone and the worker needs no
        device of it, on another. For ranks that do not meet each other."""
        self._rearrange([rank])
        return self.handles[rank]

    def relaunch(self) -> None:
        """End every worker and start all of them anew: ranks that work together cannot go on without one of them."""
        self._rearrange(range(self.world))

    def _rearrange(self, ranks: Sequence[int]) -> None:
        """Any thread may be at it, for other ranks than those of other threads."""
        assert self._recipe is not None, "only what was launched can be launched again"
        session = self._recipe.session
        with session.launch():
            for rank in ranks:
                ray.kill(self.handles[rank].actor)
            moved = {rank: session.relocate(self._recipe.placements[rank]) for rank in ranks}
            with self._lock:
                placements = tuple(moved.get(rank, placement) for rank, placement in enumerate(self._recipe.placements))
                self._recipe = recipe = replace(self._recipe, placements=placements)
            fresh = dict(zip(ranks, recipe.bring_up(ranks), strict=True))
        with self._lock:
            self.handles = tuple(fresh.get(rank, handle) for rank, handle in enumerate(self.handles))

    def lost(self, deadline_s: float) -> dict[int, WorkerError]:
        """Ranks that are gone, or that do not answer a ping in time, and what is known of each."""
        futures = [_translate(handle.actor.ping.remote().future(), handle.where, "ping") for handle in self.handles]
        _, silent = concurrent.futures.wait(futures, timeout=deadline_s)
        found: dict[int, WorkerError] = {}
        for rank, (handle, future) in enumerate(zip(self.handles, futures, strict=True)):
            error = _overdue([handle.where], "ping", deadline_s) if future in silent else future.exception()
            if isinstance(error, WorkerError):
                found[rank] = error
        return found

    def last_words(self, rank: int) -> str:
        """The end of what the worker wrote to its log; empty where it cannot be had."""
        return self._recipe.session.last_words(self.handles[rank].node, self.handles[rank].pid) if self._recipe else ""

    @property
    def world(self) -> int:
        return len(self.handles)

    # Blocking dispatch, for the controller's loop.

    def all(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call on every rank; results by rank. The first failure is raised without waiting for the ranks it left hanging."""
        return self._collect([self.submit(rank, method, *args, **kwargs) for rank in range(self.world)], method, deadline_s)

    def shards(self, method: str, shards: Sequence[Any], *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call on every rank with its own element of `shards` as the first argument; results by rank."""
        calls = [self.submit(rank, method, part, *args, **kwargs) for rank, part in enumerate(self._checked(method, shards))]
        return self._collect(calls, method, deadline_s)

    def on(self, rank: int, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call on one rank."""
        return self._answer(rank, self.submit(rank, method, *args, **kwargs), method, deadline_s or self.deadline_s)

    def some(self, ranks: Sequence[int], method: str, *args: Any) -> None:
        """Have these ranks do something, and wait until they have. One that is lost needs not."""
        for rank, call in [(rank, self.submit(rank, method, *args)) for rank in ranks]:
            with suppress(WorkerLost):
                self._answer(rank, call, method, self.deadline_s)

    def kept(self, method: str, shards: Sequence[Any] | None = None, *args: Any, **kwargs: Any) -> list[Ref]:
        """As `shards`, or without them as `all`, for results that stay in the object store; they are there when this returns."""
        arguments = [()] * self.world if shards is None else [(shard,) for shard in self._checked(method, shards)]
        calls = [handle.kept(method, *own, *args, **kwargs) for handle, own in zip(self.handles, arguments, strict=True)]
        self._collect([done for done, _ in calls], method, None)
        return [ref for _, ref in calls]

    # The same from an event loop.

    async def call(self, rank: int, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """`on`, awaited."""
        return await _within(self.submit(rank, method, *args, **kwargs), self.handles[rank].where, method, deadline_s or self.deadline_s)

    # By reference: nothing of the result comes here.

    def ref(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Ref:
        """Start a call on one rank; its result stays in the object store."""
        return self.handles[rank].ref(method, *args, **kwargs)

    def refs(self, rank: int, num_returns: int, method: str, *args: Any, **kwargs: Any) -> list[Ref]:
        """As `ref`, for a method that returns a list: one `Ref` for each of its `num_returns` values."""
        return self.handles[rank].refs(num_returns, method, *args, **kwargs)

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call on one rank."""
        return self.handles[rank].submit(method, *args, **kwargs)

    def _checked(self, method: str, shards: Sequence[Any]) -> Sequence[Any]:
        if len(shards) != self.world:
            raise ValueError(f"{self.role}.{method}: got {len(shards)} shards for {self.world} ranks")
        return shards

    def _answer(self, rank: int, call: Future[Any], method: str, deadline_s: float) -> Any:
        return collect([call], [self.handles[rank].where], method, deadline_s, tell=lambda _: self._tell([rank]))[0]

    def _collect(self, futures: Sequence[Future[Any]], method: str, deadline_s: float | None) -> list[Any]:
        names = [handle.where for handle in self.handles]
        return collect(futures, names, method, deadline_s or self.deadline_s, tell=self._tell)

    def _tell(self, ranks: Sequence[int]) -> str:
        """What each of these does instead of answering, a line each. In a collective all wait for the one that does not, which comes
        first."""
        asked = [self.handles[rank] for rank in ranks]
        answers = [_translate(handle.actor.whereabouts.remote().future(), handle.where, "whereabouts") for handle in asked]
        concurrent.futures.wait(answers, timeout=WHEREABOUTS_S)
        lines = []
        for handle, answer in zip(asked, answers, strict=True):
            if not answer.done():
                lines.append((0, f"{handle.where} does not answer at all: it is frozen, or cannot be reached"))
            elif (error := answer.exception()) is not None:
                lines.append((0, str(error)))
            else:
                found: Whereabouts = answer.result()
                lines.append((2 if found.waits else 1, f"{handle.where} {found}"))
        return "".join(f"\n  {text}" for _, text in sorted(lines))

    def kill(self) -> None:
        """End every worker at once."""
        for handle in self.handles:
            handle.kill()


def collect(
    futures: Sequence[Future[Any]],
    names: Sequence[str],
    method: str,
    deadline_s: float,
    hint: str = "",
    tell: Callable[[Sequence[int]], str] | None = None,
) -> list[Any]:
    """The results in order. Raises the most telling of the first failures, or names the workers that gave no answer in time, with what
    `tell` knows of them by number. A rank that has waited in vain for others in a collective is an answer that names those too."""
    done, pending = concurrent.futures.wait(futures, timeout=max(0.0, deadline_s), return_when=concurrent.futures.FIRST_EXCEPTION)
    failed = any(future.exception() for future in done)
    if failed and pending:
        done, pending = concurrent.futures.wait(futures, timeout=FAILURE_GRACE_S)
    errors = [error for future in futures if future.done() and (error := future.exception())]
    silent = [number for number, future in enumerate(futures) if future in pending]
    if errors:
        error = min(errors, key=lambda error: [not isinstance(error, kind) for kind in (DeviceMemoryError, WorkerLost, UserError)])
        if isinstance(error, WorkerOverdue) and silent and tell:
            raise WorkerOverdue(f"{error}\nThose who have not arrived:{tell(silent)}") from error
        raise error
    if silent:
        raise _overdue([names[number] for number in silent], method, deadline_s, hint or (tell(silent) if tell else ""))
    return [future.result() for future in futures]


def _overdue(names: Sequence[str], method: str, deadline_s: float, hint: str = "") -> WorkerOverdue:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return WorkerOverdue(f"{', '.join(names[:4])}{more}: no answer to {method}() within {deadline_s:g} s.{hint}")


async def _within(future: Future[Any], where: str, method: str, deadline_s: float) -> Any:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), deadline_s)
    except TimeoutError:
        raise _overdue([where], method, deadline_s) from None


def _translate(answer: Future[Any], where: str, method: str) -> Future[Any]:
    """The same answer with Ray's exceptions replaced by drumroll's."""
    translated: Future[Any] = Future()

    def arrived(answer: Future[Any]) -> None:
        if not translated.set_running_or_notify_cancel():
            return
        error = answer.exception()
        if error is None:
            translated.set_result(answer.result())
        else:
            translated.set_exception(_as_ours(error, where, method))

    answer.add_done_callback(arrived)
    return translated


def _as_ours(error: BaseException, where: str, method: str) -> BaseException:
    if isinstance(error, RayTaskError) and isinstance(error.cause, DrumrollError):
        return error.cause
    if isinstance(error, OutOfMemoryError):
        state = _reason(error).partition(" OOM kill reason")[0]  # pages about Ray's policies follow
        return WorkerLost(
            f"{where}: killed while {method}() was under way, because its machine ran out of memory. {state}. Free some, or lower what the "
            f"run needs (`drumroll plan`)."
        )
    if isinstance(error, ActorUnavailableError):
        return WorkerUnreachable(
            f"{where}: out of reach while {method}() was under way; whether it was done is not known. {_reason(error)}"
        )
    if isinstance(error, RayActorError | ActorUnschedulableError | NodeDiedError | LocalRayletDiedError | WorkerCrashedError):
        return WorkerLost(f"{where}: gone while {method}() was under way. {_reason(error)}")
    if isinstance(error, ObjectLostError):
        return WorkerLost(f"{where}: an argument or the result of {method}() is lost with the process that held it. {_reason(error)}")
    if isinstance(error, RayError):
        return WorkerError(f"{where}: {method}() failed. {error}")
    return error


def _reason(error: BaseException) -> str:
    """Ray's own words, on one line, without its names for things and its advice for other systems."""
    words = " ".join(str(error).split())
    return re.sub(r" class_name: .*? ip: \S+| Some common causes include: .*", "", words)


def _slots(template: Any, objects: list[Any]) -> Any:
    """The arguments with every `Ref` moved to `objects`, from where Ray fetches it for the receiver."""
    if isinstance(template, Ref):
        objects.append(template.object)
        return Slot(len(objects) - 1)
    if type(template) in (list, tuple):
        return type(template)(_slots(part, objects) for part in template)
    if type(template) is dict:
        return {key: _slots(part, objects) for key, part in template.items()}
    return template
