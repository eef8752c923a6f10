"""Those who hold what is learnt, and those who prepare it for them: how a call of them survives the loss of one.

    redone(attempt) ──► attempt ──► remember: a copy of the learners' state, in Ray's object store
          ▲                │ somebody is lost
          └── recall ◄── the whole role starts anew

Ranks of a role meet in collectives and cannot go on without one of them, so that a role starts anew as a whole. What was under way is done
again from the copy, with the same result. Without a copy a `WorkerLost` goes up, and the run goes back to its newest checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from drumroll.cluster.cluster import Cluster, Ref
from drumroll.cluster.residency import Arbiter
from drumroll.cluster.session import Session
from drumroll.cluster.supervision import Budget, Supervisor, Ward, role_lost
from drumroll.config.models import RunConfig
from drumroll.errors import DeviceLost, DeviceMemoryError, NodeLost, RoleLost, WorkerError, WorkerLost, WorkerOverdue, WorkerUnreachable
from drumroll.plan import Plan

Outcome = TypeVar("Outcome")

PATIENCE = 3.0
"""Times as long as others these may be silent: whoever loads, compiles or writes a large model may be inside a library that lets nobody
answer."""

MAX_MEMORY_SHARE = 0.5
"""Of the object store, for two copies of the learners' state: the last one, and the one that takes its place."""


class Learners:
    """The roles of a run that are brought back by whoever calls them."""

    def __init__(self, cfg: RunConfig, session: Session, supervisor: Supervisor, plan: Plan, arbiter: Arbiter) -> None:
        self._cfg = cfg
        self._session = session
        self._supervisor = supervisor
        self._plan = plan
        self._arbiter = arbiter
        self._clusters: dict[str, Cluster] = {}
        """By role."""
        self._wards: dict[str, Ward] = {}
        self._budgets: dict[str, Budget] = {}
        self._memory: dict[str, list[Ref]] = {}
        """By role: what its ranks come back from, an object for each. Empty where none is kept."""
        self._remembers: bool | None = None
        """Whether copies are kept, once that is known."""
        self._halved: set[str] = set()
        """Roles whose memory was not enough, and whose micro-batches are half as large since."""
        self.started_anew: Callable[[str], None] = lambda role: None
        """Told of each role that was started anew."""

    def add(self, cluster: Cluster) -> None:
        """A role has been launched. From now on one of its workers that is frozen is ended, so that whoever calls it hears of it."""
        self._clusters[cluster.role] = cluster
        self._wards[cluster.role] = self._supervisor.guard(cluster, silence_s=self._silence_s)

    @property
    def _silence_s(self) -> float:
        return PATIENCE * self._cfg.supervision.silence_s

    @property
    def learning(self) -> dict[str, Cluster]:
        """Those of them that have a state, by role."""
        return {role: self._clusters[role] for role in ("actor_train", "critic") if role in self._clusters}

    def redone(self, attempt: Callable[[], Outcome], *, changes: bool = False) -> Outcome:
        """Do something with these roles. Where a worker is lost meanwhile, its role starts anew, the learners go back to where they were,
        and it is done again. `changes`: it leads to a new state, which is where they go back to from now on."""
        while True:
            try:
                outcome = attempt()
                if changes:
                    self.remember()
                return outcome
            except WorkerError as error:
                failure: WorkerError | None = error
            while failure is not None:
                failure = self._bring_back(failure)

    def remember(self) -> None:
        """Keep a copy of the learners' state outside of their processes, where there is room for it."""
        if self._remembers is None:
            self._remembers = self._has_room()
        if self._remembers:
            self._memory = {role: cluster.kept("remember") for role, cluster in self.learning.items()}

    def forget(self) -> None:
        """The learners are about to go elsewhere: no copy is where they would go back to."""
        self._memory.clear()

    def start_anew(self, cluster: Cluster, error: WorkerError, rank: int = 0) -> None:
        """Launch a whole role again, until it is up, or as often as it is allowed. `rank` is the one that was lost."""
        role = cluster.role
        if role in self._wards:
            self._supervisor.let_go(self._wards.pop(role))
        budget = self._budgets.setdefault(role, Budget(self._cfg.supervision))
        while True:
            pause_s = budget.spend()
            if pause_s is None:
                raise role_lost(cluster, rank, error, f"restarts are used up: {budget}") from error
            self._supervisor.say("role lost", f"{error}\n{role} starts anew.")
            time.sleep(pause_s)
            try:
                self._launch_again(cluster)
                break
            except NodeLost:
                raise
            except WorkerError as failure:
                error = failure
        budget.is_up()
        self.add(cluster)
        self.started_anew(role)

    def _launch_again(self, cluster: Cluster) -> None:
        on_devices = [planned for planned in self._plan.roles if planned == cluster.role]
        with self._arbiter.grant(on_devices[0]) if on_devices else nullcontext():
            cluster.relaunch()
            if cluster.role in self._halved:
                cluster.all("halve_micro_batches")

    def _has_room(self) -> bool:
        """Whether two copies fit where they will lie: each on the node of its rank."""
        wanted = self._cfg.checkpoint.in_memory
        if wanted != "auto":
            return wanted
        by_node: Counter[str] = Counter()
        for cluster in self.learning.values():
            for handle, num_bytes in zip(cluster.handles, cluster.all("state_bytes"), strict=True):
                by_node[handle.node] += num_bytes
        return 2 * max(by_node.values()) <= MAX_MEMORY_SHARE * self._session.object_store_bytes()

    def _make_room(self, error: DeviceMemoryError) -> None:
        """A role that ran out of memory in its passes starts anew with half as large ones, once. Raises the error where that is no help."""
        if error.role not in self._clusters or error.stage not in ("score", "update") or error.role in self._halved:
            raise error
        self._halved.add(error.role)
        self._supervisor.say("micro-batches halved", f"{error}\n`trainer.micro_batch_tokens` counts half for {error.role} from now on.")

    def _loss_of(self, cluster: Cluster, error: WorkerError) -> tuple[int, WorkerError] | None:
        """What a role has lost, if anything: a worker that is gone or silent, one that has not answered a call in time, or cannot go on."""
        found = cluster.lost(self._silence_s)
        if found:
            return next(iter(found.items()))
        if isinstance(error, DeviceMemoryError) and error.role == cluster.role:
            return error.rank, error
        speaks_of_it = str(error).startswith(f"{cluster.role} rank ")
        return (0, error) if isinstance(error, DeviceLost | WorkerOverdue | WorkerUnreachable) and speaks_of_it else None

    def _bring_back(self, error: WorkerError) -> WorkerError | None:
        """Start those anew who are lost, and take the learners back; who is lost meanwhile is the answer. Raises where that cannot be done:
        nobody is lost, there is no copy to go back to, or a role has been started too often."""
        if isinstance(error, RoleLost | NodeLost):
            raise error
        if isinstance(error, DeviceMemoryError):
            self._make_room(error)
        lost = {role: loss for role, cluster in self._clusters.items() if (loss := self._loss_of(cluster, error)) is not None}
        if not lost:
            raise error
        for role, (rank, why) in lost.items():
            self.start_anew(self._clusters[role], why, rank)
        if not lost.keys() & self.learning.keys():
            return None
        if not self._memory:
            raise error if isinstance(error, WorkerLost) else WorkerLost(f"{error}\nNo copy of what was learnt is in memory.") from error
        try:
            for role, cluster in self.learning.items():
                cluster.shards("recall", self._memory[role])
        except WorkerError as failure:
            return failure
        self._supervisor.say("redone", "The learners stand where they stood before, and what was under way is done again.")
        return None
