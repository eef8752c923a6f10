"""Every cluster of a run, behind the few verbs that the loops need. Which devices they use is the arbiter's business.

controller ── scheduler ──► environment workers ──► engines          rollout
     │                              └────────────► reward workers
     │                              └── blocks ──► assembler ──► trainers, reference, teacher, critic     score, update
     │                              └── blocks ──► recorder                              record
     └── trainers ── weights ──► engines                                                 sync
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from drumroll.cluster.cluster import Cluster, Handle, Ref
from drumroll.cluster.peaks import Peaks
from drumroll.cluster.residency import Arbiter
from drumroll.cluster.session import LOCAL, Session
from drumroll.cluster.supervision import Supervisor
from drumroll.cluster.weights import SyncReport, WeightSync
from drumroll.config.models import PreferenceRunConfig, RlConfig, Role, RunConfig, SftConfig, SftRunConfig, TeacherConfig
from drumroll.errors import CheckpointError, DrumrollError, ModelError, WorkerError, WorkerLost
from drumroll.hub import resolve_folder
from drumroll.imports import importing
from drumroll.life import Departure, Span
from drumroll.models.prepare import prepare_model, resolve_dtype, resolve_model
from drumroll.pipelines.job import EvalJob, PreferenceJob, RlJob, SftJob
from drumroll.pipelines.learners import Learners
from drumroll.pipelines.servers import Servers, leaving
from drumroll.plan import Placement, Plan, Stage, make_plan
from drumroll.plan.placement import Helper
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import Recorder
from drumroll.rollout.filters import GroupFilters, reject_by_domain
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.rollout.scheduler import Limits
from drumroll.rollout.service import RolloutService
from drumroll.rollout.source import GroupRequest, ListSource, Source
from drumroll.rollout.stream import Policy, Rollout, Stream
from drumroll.types import Schedule, Version

Metrics = Mapping[str, float]
Phase = Literal["warmup", "rl", "comparison", "sft", "preference"]
"""What trainers are trained for: demonstrations before RL, RL, demonstrations instead of RL, demonstrations alone, preferences."""

TRAINER, CRITIC = "trainer", "critic"
"""Parts of a checkpoint: the states of those who learn."""

MAX_UNWRITTEN = 4
"""Calls of the recorder that may be under way."""

MIN_ROLLED_OUT = 0.5
"""Share of the groups of an evaluation that must come to an end."""

FAILED_FINISH_S = 10.0
"""How long a run that failed waits for its last samples to be written."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's batch: what is known of it here, and where the trainers' shards are."""

    report: Metrics
    shards: Sequence[Ref]
    """None in a step in which only the critic learns."""
    critic_shards: Sequence[Ref] = ()


@dataclass(frozen=True, slots=True)
class _Writing:
    """A call of the recorder that may have to be made again."""

    method: str
    args: tuple[Any, ...]
    blocks: tuple[Any, ...]
    """Of trajectories, which follow the other arguments."""
    result: Ref


@dataclass(frozen=True, slots=True)
class RayTransport:
    """The scheduler's way to environment workers."""

    environments: Cluster
    slots: Sequence[int]

    @property
    def num_workers(self) -> int:
        return self.environments.world

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None:
        await self.environments.call(worker, "lease", leases)

    async def abort(self, worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        await self.environments.call(worker, "abort", attempts)

    async def poll(self, worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, Ref]:
        report, block = self.environments.refs(worker, 2, "poll", wait_s, linger_s)
        return await report.value(), block


class Fleet:
    """The clusters of one run. `launch` builds it and takes it down."""

    def __init__(self, cfg: RunConfig, session: Session, supervisor: Supervisor, plan: Plan, folder: RunFolder, model_folder: Path) -> None:
        self._cfg = cfg
        self._session = session
        self._supervisor = supervisor
        self._plan = plan
        self._folder = folder
        self._model_folder = model_folder
        self._arbiter = Arbiter(plan)
        self._peaks = Peaks(plan)
        self._unwritten: deque[_Writing] = deque()
        """Calls of the recorder, each of which waits for the one before."""
        self._learners = Learners(cfg, session, supervisor, plan, self._arbiter)
        self.trainers: Cluster
        self.assembler: Cluster
        self.recorder: Cluster
        self.engines: Cluster
        self.environments: Cluster
        self.rewards: Cluster | None = None
        self.reference: Cluster | None = None
        self.teacher: Cluster | None = None
        self.critic: Cluster | None = None
        self._copied: dict[str, Cluster] = {}
        """Whose state the last `snapshot` copied, by the part of a checkpoint that it belongs in."""
        self._critic_state: Path | None = None
        """Where the critic's state is in the checkpoint that the trainers went to last."""
        self._rollouts: RolloutService
        self._training: Stream | None = None
        self._servers: Servers

    # Starting.

    def start_replay(self, cfg: RlConfig) -> None:
        """What training a step takes, without engines and environments."""
        algo = cfg.algo.model_dump(mode="json")
        self._start_together(
            trainers=lambda: self._trainers("actor_train", self._model_folder, algo=algo),
            assembler=lambda: self._assembler(algo=algo, constant_length=_longest_reply(cfg), **self._critic_targets(cfg)),
            **self._teachers(cfg.teacher),
        )

    def start_sft(self, cfg: SftRunConfig) -> None:
        """Trainers, the assembler, and the teacher where there is one, side by side."""
        demonstrations = self._demonstrations(cfg.sft, cfg)
        self._start_together(
            trainers=lambda: self._trainers("actor_train", self._model_folder, distill=_soft_targets(cfg.sft)),
            assembler=lambda: self._assembler(demonstrations=demonstrations),
            **self._teachers(cfg.teacher),
        )

    def start_preference(self, cfg: PreferenceRunConfig) -> None:
        """Trainers, the assembler, and the reference where the loss needs one, side by side."""
        section = cfg.preference.model_dump(mode="json")
        source = {"model_folder": str(self._model_folder), "trust_remote_code": cfg.model.trust_remote_code}
        learner = "drumroll.workers.preference:PreferenceTrainer"
        beside = {"reference": lambda: self._trainers("reference", self._model_folder, target=learner, preference=section)}
        self._start_together(
            trainers=lambda: self._trainers("actor_train", self._model_folder, target=learner, preference=section),
            assembler=lambda: self._assembler("drumroll.workers.pairs:PairAssembler", preference=section, **source),
            **(beside if self._plan.workers("reference") else {}),
        )

    def start_rl(self, cfg: RlConfig, stack: ExitStack) -> None:
        """Everything but reference and critic, which start from the warmed-up weights."""
        demonstrations = self._demonstrations(cfg.warmup, cfg) if cfg.warmup else None
        algo = cfg.algo.model_dump(mode="json")
        budget = _longest_reply(cfg)
        self._start_together(
            trainers=lambda: self._trainers("actor_train", self._model_folder, algo=algo, distill=_soft_targets(cfg.warmup)),
            **self._those_who_serve(cfg),
            assembler=lambda: self._assembler(
                demonstrations=demonstrations, algo=algo, constant_length=budget, **self._critic_targets(cfg)
            ),
            **self._teachers(cfg.teacher),
        )
        self._open_service(cfg, stack)

    def start_evaluation(self, cfg: RlConfig, stack: ExitStack) -> None:
        """Those who generate, play and judge, and who reads the model's weights for the engines in place of trainers."""
        node = self._plan.workers("actor_infer")[0].node
        source = self._model("actor_infer", self._model_folder)
        self._start_together(
            trainers=lambda: self._helper("reader", node, "drumroll.workers.reader:ReaderWorker", **source),
            **self._those_who_serve(cfg),
        )
        self._open_service(cfg, stack)

    def _those_who_serve(self, cfg: RlConfig) -> dict[str, Callable[[], Cluster]]:
        """How they are launched, and who writes down what they do."""
        recorder = "drumroll.workers.recorder:RecorderWorker"
        pooled = {"rewards": lambda: self._rewards(cfg)} if self._plan.workers("reward") else {}
        return {
            "engines": lambda: self._engines(cfg),
            "environments": lambda: self._environments(cfg),
            "recorder": lambda: self._helper("recorder", LOCAL, recorder, folder=str(self._folder.store)),
            **pooled,
        }

    def _open_service(self, cfg: RlConfig, stack: ExitStack) -> None:
        if self.rewards is not None:
            self.rewards.all("open")
        rollout = cfg.rollout
        limits = Limits(rollout.deadline_s, rollout.stall_s, rollout.max_attempts, rollout.max_mishaps)
        transport = RayTransport(self.environments, [cfg.engine.num_slots] * self.engines.world)
        self._rollouts = stack.enter_context(RolloutService(transport, seed=cfg.seed, limits=limits, max_in_flight=rollout.max_in_flight))
        self._servers = Servers(
            self._supervisor,
            self._arbiter,
            self._learners,
            self._rollouts,
            WeightSync(self.trainers, self.engines),
            self.environments,
            self.rewards,
            self._peaks,
            cache=rollout.cache_on_update,
            offload=cfg.engine.offload,
            stall_s=rollout.stall_s,
        )

    def begin(self, phase: Phase, planned: int = 0) -> None:
        """The trainers start a phase: fresh optimizer state, updates counted from 0. `planned` is the length of a comparison."""
        schedule = self._schedule(phase, planned)
        self._learners.redone(lambda: self.trainers.all("begin", schedule), changes=True)

    def reschedule(self, phase: Phase, planned: int = 0) -> None:
        """Trainers and critic go on in a phase with the learning rate that the config has for it now."""
        schedule = self._schedule(phase, planned)

        def reschedule() -> None:
            self.trainers.all("reschedule", schedule)
            if self.critic is not None:
                self.critic.all("reschedule", self._critic_schedule())

        self._learners.redone(reschedule, changes=True)

    def keep_reference(self, cfg: RlConfig) -> None:
        """Reference and critic, where there are such, will have the weights of this moment."""
        if cfg.warmup and (self._plan.workers("reference") or self._plan.workers("critic")):
            self.export(self._folder.reference_model)

    def start_reference(self, cfg: RlConfig) -> None:
        """Start reference and critic, where there are to be such and are none yet, from the weights that RL began with; the critic goes on
        from the checkpoint that the trainers are at, if it has a state there."""
        begun_with = self._folder.reference_model if cfg.warmup else self._model_folder
        launches: dict[str, Callable[[], Cluster]] = {}
        if self._plan.workers("reference") and self.reference is None:
            launches["reference"] = lambda: self._trainers("reference", begun_with)
        if cfg.critic is not None and self.critic is None:
            options: dict[str, Any] = {"head": "scalar", "value_clip": cfg.critic.value_clip}
            folder = begun_with
            if cfg.critic.path is not None:
                folder = resolve_folder(cfg.critic.path, cfg.critic.revision, "model", ModelError)
            launches["critic"] = lambda: self._trainers("critic", folder, **options)
        if launches:
            self._start_together(**launches)
        if self.critic is not None:
            critic, schedule = self.critic, self._critic_schedule()
            self._learners.redone(lambda: critic.all("begin", schedule), changes=True)
            if self._critic_state is not None:
                self._load_critic(self._critic_state)

    # The verbs of a step.

    def open_training(self, cfg: RlConfig, source: Source) -> None:
        """Begin to draw training tasks. With a staleness above 0 the engines work from now on whenever their devices are free."""
        if cfg.rollout.max_staleness:
            self._servers.register(background=True)
        self._training = self._rollouts.open(source, _training_policy(cfg))

    def take_groups(self, cfg: RlConfig, version: Version) -> Rollout:
        """The groups of the next step, for a learner at `version`."""
        assert self._training is not None, "open_training comes first"
        with self._arbiter.grant("actor_infer"):
            rollout = self._rollouts.take(self._training, cfg.rollout.groups_per_step, version.step)
            self._peaks.note(self.engines, "rollout")
            return rollout

    def close_training(self, step: int) -> None:
        """Draw no more; what is under way is aborted."""
        if self._training is not None:
            self.record("train", step, self._rollouts.close(self._training))
            self._training = None

    def roll_out(self, requests: Sequence[GroupRequest], version: Version) -> Rollout:
        """Run exactly these groups to their ends on the engines' current weights. Those that fail are missing, if they are not too many."""
        stream = self._rollouts.open(ListSource(requests), _every_group(len(requests)))
        try:
            with self._arbiter.grant("actor_infer"):
                return self._rollouts.take(stream, len(requests), version.step)
        finally:
            self._rollouts.close(stream)

    def assemble(self, step: int, rollout: Rollout, carried: Metrics) -> StepBatch:
        """Pack, score and weigh the step's samples; tokens go from worker to worker and never come here. `carried` is what the algorithm
        kept from the step before; what it keeps from this one is part of the report."""
        return self._learners.redone(lambda: self._assemble(step, rollout, carried))

    def _assemble(self, step: int, rollout: Rollout, carried: Metrics) -> StepBatch:
        assert isinstance(self._cfg, RlConfig)
        accepted = [(sample.sample_id, sample.attempt) for sample in rollout.samples if sample.reward is not None]
        witnesses = {group.group_id: group.witnesses for group in rollout.groups if group.witnesses}
        self.assembler.on(0, "pack", accepted, step - 1, self._cfg.rollout.max_staleness, *rollout.blocks, witnesses=witnesses)
        ref_logp = self._score("reference", self.reference) if self.reference is not None else None
        old_logp = self._score("actor_train", self.trainers) if self._several_updates else None
        values = self._score("critic", self.critic, "values") if self.critic is not None else None
        taught = self._taught(self._cfg) if self._cfg.algo.teacher_needs else None
        num_shards = self._plan.num_shards("actor_train")
        num_critic_shards = self._plan.num_shards("critic") if self.critic is not None else 0
        scores = (ref_logp, old_logp, values, carried, taught)
        report, *shards = self.assembler.refs(0, 1 + num_shards + num_critic_shards, "finish", step, *scores)
        metrics: dict[str, float] = report.fetch()
        scored = metrics["batch/num_tokens"] * sum(part is not None for part in (ref_logp, old_logp, values, taught))
        policy_learns = self._cfg.critic is None or step > self._cfg.critic.warmup_steps
        return StepBatch({**metrics, "batch/num_scored_tokens": scored}, shards[:num_shards] if policy_learns else (), shards[num_shards:])

    def train(self, batch: StepBatch) -> tuple[list[Metrics], list[Metrics]]:
        """One optimizer update of the policy and one of the critic for each part of the step, at the same time where they have devices of
        their own; nothing of whom does not learn."""
        return self._learners.redone(lambda: self._train(batch), changes=True)

    def _train(self, batch: StepBatch) -> tuple[list[Metrics], list[Metrics]]:
        def learn(role: Role, cluster: Cluster | None, shards: Sequence[Ref]) -> list[Metrics]:
            if cluster is None or not shards:
                return []
            metrics: list[Metrics] = self._on_shards(role, cluster, "train", shards, stage="update")[0]
            return metrics

        with ThreadPoolExecutor(1) as aside:
            critic = aside.submit(learn, "critic", self.critic, batch.critic_shards)
            return learn("actor_train", self.trainers, batch.shards), critic.result()

    def push(self, version: Version) -> SyncReport:
        """Hand the trainers' weights over to every engine that is there, checked and acknowledged."""
        return self._servers.push(version)

    def take_peaks(self) -> Metrics:
        """The most GPU memory that each role had in use at each stage since the last time; nothing without GPUs."""
        return self._peaks.take()

    def digest(self) -> str:
        """Of the trainers' weights; equal to that of a push of the same weights."""

        def compute() -> str:
            with self._arbiter.grant("actor_train"):
                return str(self.trainers.all("digest")[0])

        return self._learners.redone(compute)

    def imitate(self, first: int, count: int) -> list[Metrics]:
        """Updates on demonstrations, with what a teacher says of them where the loss needs it."""
        return self._learners.redone(lambda: self._imitate(first, count), changes=True)

    def _imitate(self, first: int, count: int) -> list[Metrics]:
        taught = self._taught_each("imitation_to_teach", first, count)
        shards = self.assembler.refs(0, self._plan.num_shards("actor_train"), "imitation", first, count, taught)
        metrics: list[Metrics] = self._on_shards("actor_train", self.trainers, "imitate", shards)[0]
        return metrics

    def heldout_loss(self) -> Metrics:
        """Means per token of the held-out demonstrations, where there are some: their loss, and where a teacher is imitated the distance to
        it."""
        assert isinstance(self._cfg, SftRunConfig)
        if self._cfg.heldout is None:
            return {}

        def judge() -> list[Metrics]:
            shards = self.assembler.refs(0, self._plan.num_shards("actor_train"), "heldout", self._taught_each("heldout_to_teach"))
            return self._on_shards("actor_train", self.trainers, "judge_imitation", shards)

        parts = self._learners.redone(judge)
        totals = {name: sum(part[name] for part in parts) for name in parts[0]}
        num_tokens = totals.pop("tokens")
        return {f"heldout_{name}": total / num_tokens for name, total in totals.items()} if num_tokens else {}

    def prefer(self, first: int, count: int) -> list[Metrics]:
        """Updates on preferences. Where a loss needs a reference point, which the weights of that moment make, one after the other."""
        assert isinstance(self._cfg, PreferenceRunConfig)
        at_once = 1 if "reference_point" in self._cfg.preference.needs else count
        metrics: list[Metrics] = []
        for number in range(first, first + count, at_once):
            metrics += self._learners.redone(partial(self._prefer, self._cfg, number, at_once), changes=True)
        return metrics

    def _prefer(self, cfg: PreferenceRunConfig, first: int, count: int) -> list[Metrics]:
        self.assembler.on(0, "begin", first, count)
        metrics: list[Metrics] = self._on_shards("actor_train", self.trainers, "train", self._compared(cfg))[0]
        return metrics

    def heldout_preferences(self) -> Metrics:
        """The loss on the held-out rows, and what it reports of them; nothing where there are none."""
        assert isinstance(self._cfg, PreferenceRunConfig)
        cfg = self._cfg
        if cfg.preference.heldout is None:
            return {}

        def judge() -> list[Metrics]:
            self.assembler.on(0, "begin_heldout")
            return self._on_shards("actor_train", self.trainers, "judge", self._compared(cfg))

        parts = self._learners.redone(judge)
        totals = {name: sum(part[name] for part in parts) for name in parts[0]}
        weight = totals.pop("weight")
        return {f"heldout_{name}": total / weight for name, total in totals.items()}

    def _compared(self, cfg: PreferenceRunConfig) -> list[Ref]:
        """What the assembler has begun, scored by the reference as far as the loss needs it, in the trainers' shards."""
        ref_logp = mismatched_logp = mismatched_ref_logp = None
        if self.reference is not None:
            ref_logp = self._score_each("reference", self.reference)
        if "reference_point" in cfg.preference.needs:
            assert self.reference is not None, "a reference point lies between the policy and its reference"
            mismatched_logp = self._score_each("actor_train", self.trainers, mismatched=True)
            mismatched_ref_logp = self._score_each("reference", self.reference, mismatched=True)
        return self.assembler.refs(0, self._plan.num_shards("actor_train"), "finish", ref_logp, mismatched_logp, mismatched_ref_logp)

    def _score_each(self, role: Role, cluster: Cluster, *, mismatched: bool = False) -> list[Ref]:
        """Log-probabilities by one role of every update that the assembler has begun, a part per shard."""
        num_shards = self._plan.num_shards(role)
        shards = self.assembler.refs(0, num_shards, "shards", num_shards, mismatched=mismatched)
        return self._ask(role, cluster, "logprobs_of_each", shards)

    def record(self, phase: str, step: int, rollout: Rollout) -> None:
        """Write every sample that has left into the store, while other work goes on."""
        if rollout.departures:
            self._write("add", phase, step, rollout.departures, blocks=rollout.departed_blocks)

    def record_spans(self, spans: Sequence[Span]) -> None:
        """Write what the controller and the trainers did when, for the timeline."""
        if isinstance(self._cfg, RlConfig) and spans:
            self._write("add_spans", spans)

    def export(self, folder: Path) -> None:
        """Write the trainers' weights as a Hugging Face folder of the run, in place of an earlier one."""

        def export() -> None:
            with self._arbiter.grant("actor_train"):
                self.trainers.all("export", str(folder), replace=True)

        self._learners.redone(export)

    def export_critic(self, folder: Path) -> None:
        """Write the critic's weights likewise, where there is one."""
        critic = self.critic
        if critic is None:
            return

        def export() -> None:
            with self._arbiter.grant("critic"):
                critic.all("export", str(folder), replace=True)

        self._learners.redone(export)

    # The verbs of a checkpoint.

    def snapshot(self, deadline_s: float | None = None) -> None:
        """Copy the state of trainers and critic to their hosts' memory; `save` writes that copy."""
        self._copied = {TRAINER: self.trainers} | ({} if self.critic is None else {CRITIC: self.critic})

        def copy() -> None:
            for cluster in self._copied.values():
                cluster.all("snapshot", deadline_s=deadline_s)

        self._learners.redone(copy)

    def save(self, folder: Path, deadline_s: float | None = None) -> None:
        """Write what `snapshot` copied, while training goes on; any thread may call it."""
        for part, cluster in self._copied.items():
            try:
                cluster.all("save", str(folder / part), deadline_s=deadline_s)
            except WorkerError as error:
                raise CheckpointError(f"those who were to write it failed: {error}") from error

    def load(self, folder: Path) -> None:
        """Take trainers and critic to a state that `save` wrote, with this or another number of ranks. A critic that is not there yet
        will begin with it."""
        self._learners.forget()
        self.load_trainers(folder)
        state = folder / CRITIC
        self._critic_state = state if state.is_dir() else None
        if self.critic is not None:
            self._load_critic(state)

    def load_trainers(self, folder: Path) -> None:
        """Take the trainers alone to a state that `save` wrote."""
        self._load("actor_train", self.trainers, folder / TRAINER)

    def _load_critic(self, state: Path) -> None:
        assert self.critic is not None
        self._load("critic", self.critic, state)

    def _load(self, role: Role, cluster: Cluster, state: Path) -> None:
        def load() -> None:
            with self._arbiter.grant(role):
                cluster.all("load", str(state))

        self._learners.redone(load, changes=True)

    def begin_again(self, loss: WorkerLost) -> None:
        """Take those who learn back to the weights that the run began with."""
        self._learners.forget()
        for cluster in self._learners.learning.values():
            self._learners.start_anew(cluster, loss)

    def mark(self) -> Ref | None:
        """How far the trajectory store will have grown when all that was recorded so far, and nothing else, is written."""
        return self._write("mark") if isinstance(self._cfg, RlConfig) else None

    def supersede(self, mark: int) -> None:
        """Trajectories that were stored after `mark` no longer belong to the run."""
        if isinstance(self._cfg, RlConfig):
            self._write("supersede", mark)

    def finish(self) -> None:
        """End all rollouts, write everything that is still to be written, and close the store."""
        self._close_store()
        self._supervisor.stop()

    def abandon(self) -> None:
        """The same after a failure: nobody is replaced any more, and nobody waited for."""
        self._supervisor.stop()
        self._close_store(FAILED_FINISH_S)

    def _close_store(self, deadline_s: float | None = None) -> None:
        if isinstance(self._cfg, RlConfig):
            self._record_leftovers(self._rollouts.stop())
            self._write("close")
        while self._unwritten:
            self._await_writing(deadline_s)

    def _record_leftovers(self, rollout: Rollout) -> None:
        """Samples that belong to no step any more, by the phase that their names begin with."""
        by_phase: dict[str, list[Departure]] = {}
        for departure in rollout.departures:
            by_phase.setdefault(departure.sample_id.partition("/")[0], []).append(departure)
        for phase, departures in by_phase.items():
            self._write("add", phase, -1, departures, blocks=rollout.departed_blocks)

    def _write(self, method: str, *args: Any, blocks: tuple[Any, ...] = ()) -> Ref:
        """The recorder's next call, after all before it. At most a few are under way, so that one that fails is soon noticed."""
        self._begin_writing(method, args, blocks)
        if len(self._unwritten) > MAX_UNWRITTEN:
            self._await_writing()
        return self._unwritten[-1].result

    def _begin_writing(self, method: str, args: tuple[Any, ...], blocks: tuple[Any, ...]) -> None:
        after = self._unwritten[-1].result if self._unwritten else None
        self._unwritten.append(_Writing(method, args, blocks, self.recorder.ref(0, method, after, *args, *blocks)))

    def _await_writing(self, deadline_s: float | None = None) -> None:
        """Wait for the oldest call. A recorder that is lost is replaced and does anew what it left undone: rows that it wrote already are
        written over by the same. Of blocks that are lost with their node, the samples' rows are written alone."""
        try:
            self._unwritten[0].result.fetch(deadline_s)
            self._unwritten.popleft()
        except WorkerLost as error:
            undone, self._unwritten = list(self._unwritten), deque()
            if undone[0].blocks and not self.recorder.lost(self._cfg.supervision.silence_s):
                undone[0] = replace(undone[0], blocks=())
            else:
                self._learners.start_anew(self.recorder, error)
            for writing in undone:
                self._begin_writing(writing.method, writing.args, writing.blocks)

    # How each cluster is made.

    def _start_together(self, **launches: Callable[[], Cluster]) -> None:
        """Launch clusters side by side: imports take most of a worker's start."""
        with ThreadPoolExecutor(len(launches)) as pool:
            started = {name: pool.submit(build) for name, build in launches.items()}
            try:
                for name, future in started.items():
                    setattr(self, name, future.result())
            except BaseException:
                self._session.end_workers()  # or the pool would wait for launches that are of no use any more
                raise
        for name in started.keys() - {"engines", "environments", "rewards"}:
            self._learners.add(getattr(self, name))

    def _trainers(self, role: Role, model_folder: Path, target: str = "drumroll.workers.trainer:TrainWorker", **kwargs: Any) -> Cluster:
        kwargs = {
            **self._model(role, model_folder),
            "trainer": self._cfg.trainer.model_dump(mode="json"),
            "seed": self._cfg.seed,
            "parallel": self._plan.layout(role).model_dump(mode="json"),
            **kwargs,
        }
        deadline_s = self._cfg.supervision.call_s
        with self._in_turn(role) as has_devices:
            cluster = Cluster.launch(self._session, self._plan.workers(role), target, kwargs=kwargs, deadline_s=deadline_s)
            if self._cfg.trainer.offload:
                if not has_devices:
                    cluster.all("to", "host")
                self._arbiter.register(
                    role,
                    give_up=lambda ranks: cluster.some(ranks, "to", "host"),
                    take=lambda ranks: cluster.some(ranks, "to", "device"),
                )
        return cluster

    def _engines(self, cfg: RlConfig) -> Cluster:
        kwargs = {**self._model("actor_infer", self._model_folder), "engine": cfg.engine.model_dump(mode="json")}
        with self._in_turn("actor_infer"):
            placements = self._plan.workers("actor_infer")
            cluster = Cluster.launch(self._session, placements, "drumroll.workers.engine:EngineWorker", kwargs=kwargs)
            leave = leaving(cfg.engine.offload)
            self._arbiter.register("actor_infer", give_up=lambda ranks: cluster.some(ranks, leave))
        return cluster

    @contextmanager
    def _in_turn(self, role: Role) -> Iterator[bool]:
        """Where a role leaves a GPU to others, those that share it start one after the other, each with the memory that the ones before it
        have left. Says whether the role has been given its devices, and is on them when it has started."""
        leaves = self._cfg.trainer.offload or self._engines_offload
        if not (leaves and self._plan.workers(role)[0].kind == "gpu" and self._plan.conflicts(role)):
            yield False
            return
        with self._arbiter.grant(role):
            yield True

    def _environments(self, cfg: RlConfig) -> Cluster:
        kwargs = {
            "model_folder": str(self._model_folder),
            "domains": {
                name: {"env": domain.env.model_dump(mode="json"), "rewards": [reward.model_dump(mode="json") for reward in domain.rewards]}
                for name, domain in cfg.mixture.items()
            },
            "max_turns": cfg.rollout.max_turns,
            "max_tokens": self._max_tokens(cfg),
            "env_deadline_s": cfg.rollout.env_deadline_s,
            "reward_deadline_s": cfg.rollout.reward_deadline_s,
            "keeps_cache": not cfg.deterministic,
            "trust_remote_code": cfg.model.trust_remote_code,
            "needs_verdict": cfg.algo.learns_from_rewards,
        }
        placements = self._plan.workers("environment")
        return Cluster.launch(self._session, placements, "drumroll.workers.environment:EnvironmentWorker", kwargs=kwargs)

    def _rewards(self, cfg: RlConfig) -> Cluster:
        kwargs = {
            "rewards": {name: [reward.model_dump(mode="json") for reward in domain.rewards] for name, domain in cfg.mixture.items()},
            "deadline_s": cfg.rollout.reward_deadline_s,
        }
        return Cluster.launch(self._session, self._plan.workers("reward"), "drumroll.workers.reward:RewardWorker", kwargs=kwargs)

    def _assembler(self, target: str = "drumroll.workers.assembler:Assembler", **kwargs: Any) -> Cluster:
        trainers = self._plan.workers("actor_train")
        kwargs |= {"num_shards": self._plan.num_shards("actor_train"), "seed": self._cfg.seed}
        return self._helper("assembler", trainers[0].node, target, **kwargs)

    def _helper(self, role: Helper, node: str, target: str, **kwargs: Any) -> Cluster:
        """A worker that is no role of the plan, because it never computes on a device."""
        deadline_s = self._cfg.supervision.call_s
        return Cluster.launch(self._session, [Placement(role, 0, node, (), "cpu")], target, kwargs=kwargs, deadline_s=deadline_s)

    def _demonstrations(self, sft: SftConfig, cfg: RunConfig) -> dict[str, Any]:
        heldout = cfg.heldout.model_dump(mode="json") if isinstance(cfg, SftRunConfig) and cfg.heldout else None
        return {
            "model_folder": str(self._model_folder),
            "source": sft.data.model_dump(mode="json"),
            "completion_field": sft.completion_field,
            "batch_size": sft.batch_size,
            "end_token": sft.end_token,
            "heldout": heldout,
            "trust_remote_code": cfg.model.trust_remote_code,
            "teacher_temperature": None if sft.distill is None else sft.distill.temperature,
        }

    def _critic_targets(self, cfg: RlConfig) -> dict[str, Any]:
        """What the assembler has to know of the critic."""
        if cfg.critic is None:
            return {}
        return {"num_critic_shards": self._plan.num_shards("critic"), "critic_lam": cfg.critic.lam}

    def _teachers(self, cfg: TeacherConfig | None) -> dict[str, Callable[[], Cluster]]:
        """How the teacher is launched, where there is one."""
        if cfg is None:
            return {}
        folder = resolve_model(cfg.path, cfg.revision)
        return {"teacher": lambda: self._trainers("teacher", folder, trust_remote_code=cfg.trust_remote_code)}

    def _taught(self, cfg: RlConfig) -> list[Ref]:
        """What the teacher says of the step's tokens, a part per shard; with its likeliest ones where something needs them."""
        assert self.teacher is not None, "what needs a teacher is refused without one"
        assert cfg.teacher is not None
        top_k = cfg.teacher.top_k if "teacher_top_logp" in cfg.algo.teacher_needs else 0
        return self._score("teacher", self.teacher, "teach", top_k)

    def _taught_each(self, shards_of: str, *args: int) -> list[Ref] | None:
        """What the teacher says of demonstrations, which the assembler's method `shards_of` gives, a part per shard; None where it is not
        imitated on demonstrations."""
        cfg = self._cfg
        if not isinstance(cfg, RlConfig | SftRunConfig) or self.teacher is None:
            return None
        assert cfg.teacher is not None
        section = cfg.sft if isinstance(cfg, SftRunConfig) else cfg.warmup
        if section is None or section.distill is None:
            return None
        num_shards = self._plan.num_shards("teacher")
        shards = self.assembler.refs(0, num_shards, shards_of, *args, num_shards)
        return self._ask("teacher", self.teacher, "teach_each", shards, cfg.teacher.top_k)

    def _score(self, role: Role, cluster: Cluster, method: Literal["logprobs", "values", "teach"] = "logprobs", *args: Any) -> list[Ref]:
        """What one role says of the step's tokens, a part per shard."""
        num_shards = self._plan.num_shards(role)
        return self._ask(role, cluster, method, self.assembler.refs(0, num_shards, "shards", num_shards), *args)

    def _ask(self, role: Role, cluster: Cluster, method: str, shards: Sequence[Ref], *args: Any) -> list[Ref]:
        """What the ranks of a role say of each shard. The role has its devices until all have answered."""
        each = self._plan.layout(role).devices_per_shard
        with self._arbiter.grant(role):
            parts = cluster.kept(method, [shard for shard in shards for _ in range(each)], *args)[::each]
            self._peaks.note(cluster, "score")
            return parts

    def _on_shards(self, role: Role, cluster: Cluster, method: str, shards: Sequence[Ref], stage: Stage | None = None) -> list[Any]:
        """What the ranks of a role return for each shard. Ranks that share the work on one all get it, and return the same. What memory it
        took is noted for a `stage` of RL."""
        each = self._plan.layout(role).devices_per_shard
        with self._arbiter.grant(role):
            answers = cluster.shards(method, [shard for shard in shards for _ in range(each)])[::each]
            if stage is not None:
                self._peaks.note(cluster, stage)
            return answers

    def _schedule(self, phase: Phase, planned: int) -> Schedule:
        cfg = self._cfg
        if isinstance(cfg, SftRunConfig):
            return cfg.sft.resolve_schedule(cfg.sft.steps)
        if isinstance(cfg, PreferenceRunConfig):
            return cfg.preference.resolve_schedule(cfg.preference.steps)
        assert isinstance(cfg, RlConfig)
        if phase == "rl":
            steps = cfg.max_steps - (cfg.critic.warmup_steps if cfg.critic is not None else 0)
            return cfg.trainer.resolve_schedule(steps * cfg.algo.updates_per_step * cfg.algo.epochs_per_step)
        assert cfg.warmup is not None
        return cfg.warmup.resolve_schedule(planned if phase == "comparison" else cfg.warmup.steps)

    def _critic_schedule(self) -> Schedule:
        cfg = self._cfg
        assert isinstance(cfg, RlConfig)
        assert cfg.critic is not None
        return cfg.critic.resolve_schedule(cfg.max_steps * cfg.algo.updates_per_step * cfg.algo.epochs_per_step)

    @property
    def _engines_offload(self) -> bool:
        return isinstance(self._cfg, RlConfig) and self._cfg.engine.offload

    @property
    def _several_updates(self) -> bool:
        """Whether a step's later updates need to know where the first one started."""
        return isinstance(self._cfg, RlConfig) and self._cfg.algo.updates_per_step * self._cfg.algo.epochs_per_step > 1

    def _model(self, role: Role, folder: Path) -> dict[str, Any]:
        """Which model a backend loads, and what it computes in."""
        device = {"gpu": "cuda", "cpu": "cpu"}[self._plan.workers(role)[0].kind]
        dtype = resolve_dtype(self._cfg.model.dtype, device)
        return {"model_folder": str(folder), "dtype": dtype, "trust_remote_code": self._cfg.model.trust_remote_code}

    def _max_tokens(self, cfg: RlConfig) -> int:
        """The tightest of the episode's, the engine's, the model's and, where there is one, the teacher's limits."""
        folders = [self._model_folder, *([] if cfg.teacher is None else [resolve_model(cfg.teacher.path, cfg.teacher.revision)])]
        own = [json.loads((folder / "config.json").read_text()).get("max_position_embeddings") for folder in folders]
        limits = [cfg.rollout.max_tokens, cfg.engine.context_tokens, *own]
        return min(int(limit) for limit in limits if limit is not None)


def _every_group(count: int) -> Policy:
    """Of an evaluation."""
    return Policy(is_urgent=True, max_rejected=count, max_failed=count, min_share=MIN_ROLLED_OUT)


def _training_policy(cfg: RlConfig) -> Policy:
    rollout = cfg.rollout
    filters = {name: GroupFilters(domain.filters) for name, domain in cfg.mixture.items() if domain.filters}
    return Policy(
        max_staleness=rollout.max_staleness,
        min_group_size=rollout.smallest_group,
        extra_groups=rollout.extra_groups,
        extra_samples=rollout.extra_samples,
        tail_batching=rollout.tail_batching,
        filters=partial(reject_by_domain, filters) if filters else None,
        max_rejected=rollout.rejection_cap,
        max_failed=rollout.groups_per_step - 1,
        min_share=rollout.min_share,
        waits=rollout.on_shortage == "wait",
    )


def _soft_targets(sft: SftConfig | None) -> dict[str, Any] | None:
    """What trainers have to know of learning a teacher's distribution."""
    return sft.distill.model_dump(mode="json") if sft is not None and sft.distill is not None else None


def _longest_reply(cfg: RlConfig) -> int:
    """Tokens that a reply may have, in the domain that allows most."""
    return max(domain.sampling.max_new_tokens for domain in cfg.mixture.values())


def _tell_incident(folder: RunFolder, rec: Recorder, kind: str, text: str) -> None:
    folder.incident(kind, reason=text)
    rec.warn(text)


def _register(folder: RunFolder, worker: Handle) -> None:
    folder.register_worker(worker.role, worker.rank, worker.node, worker.pid)


@contextmanager
def launch(job: RlJob | EvalJob | SftJob | PreferenceJob, folder: RunFolder, rec: Recorder) -> Iterator[Fleet]:
    """Start Ray and every worker; end all of them when the block ends, however it ends."""
    cfg = job.cfg
    with ExitStack() as stack:
        with rec.stage("starting workers"), rec.phase("start"), importing(), ThreadPoolExecutor(1) as aside:
            model = aside.submit(prepare_model, cfg.model, folder.initial_model, cfg.seed)
            session = stack.enter_context(Session(cfg.ray))
            plan = make_plan(cfg, session.pool(), job.roles)
            supervisor = stack.enter_context(Supervisor(cfg.supervision, partial(_tell_incident, folder, rec), partial(_register, folder)))
            fleet = Fleet(cfg, session, supervisor, plan, folder, model.result())
            if isinstance(job, EvalJob):
                fleet.start_evaluation(job.cfg, stack)
            elif isinstance(cfg, RlConfig):
                fleet.start_rl(cfg, stack)
            elif isinstance(cfg, PreferenceRunConfig):
                fleet.start_preference(cfg)
            else:
                fleet.start_sft(cfg)
        try:
            yield fleet
        except DrumrollError:
            with suppress(Exception):  # the samples tell why a run failed; that they cannot be written is not the reason to show
                fleet.abandon()
            raise
        with rec.phase("finish"):
            fleet.finish()
