"""Those who serve rollouts: engines, environment workers, reward workers. Each that is lost is replaced by itself, while the others go on.

    lost ──► out: no sample goes there ──► a new process ──► an engine: current weights, acknowledged ──► announced ──► serves

An engine gets its weights from the step loop's thread, while that waits for rollouts: at no other time are trainers known to stand still.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from drumroll.cluster.cluster import Cluster, Handle
from drumroll.cluster.peaks import Peaks
from drumroll.cluster.residency import Arbiter
from drumroll.cluster.supervision import Supervisor, Ward
from drumroll.cluster.weights import Cache, SyncReport, WeightSync
from drumroll.errors import WeightSyncError, WorkerError, WorkerLost
from drumroll.pipelines.learners import Learners
from drumroll.rollout.service import RolloutService
from drumroll.types import Version

BLOCKED = (
    " Was it busy inside an environment or a reward? Those that compute or wait without `await` hold up all others: extend `BlockingEnv`, "
    "or raise `supervision.silence_s`."
)


class Servers:
    """Hands weights to the engines and knows which of them serve; replaces whoever is lost."""

    def __init__(
        self,
        supervisor: Supervisor,
        arbiter: Arbiter,
        learners: Learners,
        rollouts: RolloutService,
        sync: WeightSync,
        environments: Cluster,
        rewards: Cluster | None,
        peaks: Peaks,
        *,
        cache: Cache,
        offload: bool,
        stall_s: float,
    ) -> None:
        """`cache` is what becomes of keys and values when weights change; with `offload` engines that give way to others take their memory
        along; an engine that gives no token for `stall_s` is lost."""
        self._supervisor = supervisor
        self._arbiter = arbiter
        self._learners = learners
        self._rollouts = rollouts
        self._sync = sync
        self._engines = sync.engines
        self._environments = environments
        self._rewards = rewards
        self._peaks = peaks
        self._cache = cache
        self._offload = offload
        self._version: Version | None = None
        """Of the current weights."""
        self._serving: set[int] = set()
        """Ranks of engines that have them."""
        self._unannounced: set[int] = set()
        """Ranks of engines that have been replaced, and that environment workers do not know of."""
        environments.all("connect", *self._those_who_answer)
        self.register(background=False)
        learners.started_anew = self._learners_changed
        self._ward: Ward = supervisor.guard(
            self._engines, out=self._engine_out, back=self._engine_back, lost=rollouts.fail, pulse_s=stall_s
        )
        supervisor.guard(environments, out=rollouts.worker_out, back=self._environment_back, lost=rollouts.fail, hint=BLOCKED)
        if rewards is not None:
            supervisor.guard(rewards, back=self._reward_back, lost=rollouts.fail)

    def register(self, *, background: bool) -> None:
        """Say how engines leave and enter their devices; in the `background` they have them whenever nobody else is granted them."""
        leave = leaving(self._offload)
        self._arbiter.register(
            "actor_infer",
            give_up=lambda ranks: self._engines.some(ranks, leave),
            take=self._resume,
            background=background,
        )

    def push(self, version: Version) -> SyncReport:
        """Hand the trainers' weights over to every engine, checked and acknowledged. An engine that does not get them serves no more until
        it does; one that was replaced serves again."""
        self._version = version
        up = [rank for rank in range(self._engines.world) if rank not in self._ward.away and rank not in self._ward.gone]
        return self._learners.redone(lambda: self._push(version, up))

    def _push(self, version: Version, ranks: Sequence[int]) -> SyncReport:
        with self._arbiter.grant("actor_train"):
            if self._offload:
                self._sync.trainers.all("make_room")
                self._engines.some(ranks, "wake")
            try:
                report = self._sent(version, ranks)
            except WorkerLost:
                raise
            except (WorkerError, WeightSyncError) as error:  # engines have given the version up; it may have been a hiccup
                self._supervisor.say("sync failed", f"version {version} could not be sent, and is sent again: {error}")
                report = self._sent(version, ranks)
            self._peaks.note(self._sync.trainers, "sync")
            with suppress(WorkerError):  # an engine that is lost
                self._peaks.note(self._engines, "sync")
            for rank in ranks:
                if rank in report.failed:
                    self._engine_failed(rank, report.failed[rank])
                elif rank not in self._serving:
                    self._let_serve(rank)
            return report

    def _sent(self, version: Version, ranks: Sequence[int]) -> SyncReport:
        """Engines stop when a version breaks off, and nobody knows which of them had begun with it: none of them serves before the next."""
        try:
            return self._sync.push(version, ranks=ranks, cache=self._cache)
        except BaseException:
            self._serving.difference_update(ranks)
            raise

    def _resume(self, ranks: Sequence[int]) -> None:
        """Those of them that have the current weights."""
        serving = [rank for rank in ranks if rank in self._serving]
        if self._offload:
            self._engines.some(serving, "wake")
        self._engines.some(serving, "resume")

    # Engines.

    def _engine_out(self, rank: int, error: WorkerError) -> None:
        self._serving.discard(rank)
        self._rollouts.engine_out(rank)

    def _engine_back(self, rank: int) -> None:
        self._unannounced.add(rank)
        self._rollouts.leave(partial(self._catch_up, rank))

    def _engine_failed(self, rank: int, why: str) -> None:
        """An engine did not take a version. It serves nobody, and another one takes its place."""
        self._serving.discard(rank)
        self._rollouts.engine_out(rank)
        self._supervisor.sick(self._ward, rank, WorkerError(why))

    def _catch_up(self, rank: int) -> None:
        """An engine that was replaced gets the current weights, while the others go on where they do not share the trainers' devices."""
        if self._version is not None and rank not in self._serving and rank not in self._ward.away and rank not in self._ward.gone:
            version = self._version
            self._learners.redone(lambda: self._push(version, [rank]))

    def _let_serve(self, rank: int) -> None:
        """An engine has the current weights: environment workers hear of it, and samples go there."""
        self._serving.add(rank)
        try:
            if rank in self._arbiter.residents("actor_infer"):
                self._resume([rank])
            if rank in self._unannounced:
                self._announce(self._engines.handles[rank])
                self._unannounced.discard(rank)
                self._supervisor.say("engine serves", f"{self._engines.handles[rank].where} serves again, at version {self._version}.")
        except WorkerError as error:
            self._engine_failed(rank, str(error))
        else:
            self._rollouts.engine_back(rank)

    def _learners_changed(self, role: str) -> None:
        if role == "actor_train":
            self._sync.forget_trainers()

    # Environment and reward workers.

    @property
    def _those_who_answer(self) -> tuple[Sequence[Handle], Sequence[Handle]]:
        """Where replies and rewards come from."""
        return self._engines.handles, self._rewards.handles if self._rewards is not None else ()

    def _environment_back(self, rank: int) -> None:
        self._environments.on(rank, "connect", *self._those_who_answer)
        self._rollouts.worker_back(rank)

    def _reward_back(self, rank: int) -> None:
        assert self._rewards is not None
        self._rewards.on(rank, "open")
        self._announce(self._rewards.handles[rank])

    def _announce(self, worker: Handle) -> None:
        """Tell every environment worker of one that was replaced. Those that are being replaced themselves will hear of it then."""
        self._environments.some(range(self._environments.world), "take_up", worker)


def leaving(offload: bool) -> str:
    """What an engine does that has to leave its device."""
    return "sleep" if offload else "pause"
