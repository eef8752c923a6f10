"""Every sample lives its own life: admitted, leased, run, judged, accepted or rejected, the moment that it can be.

                 draw                lease                            poll
    source ──► stream ──► queue ──► router ──► environment workers ──► results ──► group complete? ──► filters ──► ready ──► take
                 ▲                     ▲            (engines, rewards)     │                              │
                 │                     └── room ◄──────────────────────────┤                              │ rejected
                 │                                                         └── failed: queue again        │
                 └────────────────────────────── a replacement is drawn ◄─────────────────────────────────┘

A `Stream` is one demand for groups: training without end, or one evaluation. How many groups of it may be unfinished or unread
makes the mode. Synchronous: as many as the `take` that waits asked for, and none between two takes. Asynchronous with staleness k:
(k + 1) × a step's groups at any time, so that the last of them is trained on at most k versions after it was begun.

Pure asyncio: time is the event loop's, stamps come from `clock`, chance from `rng`, workers are reached through `Transport` alone.
The same code runs against Ray and inside `rollout.simulation`. It sees metadata alone; blocks of trajectories travel by reference.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from drumroll.errors import RolloutError, WorkerLost
from drumroll.life import STATES, State
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.rollout.ledger import Ledger, Sample
from drumroll.rollout.router import Pool, Router
from drumroll.rollout.source import Fate, Source
from drumroll.rollout.stream import BlockRef, OpenGroup, Policy, Rollout, Stream
from drumroll.types import MISHAPS, Quarantined, SampleInfo, sample_seeds

POLL_WAIT_S = 5.0
"""How long a poll may wait for its first result."""
CALL_S = 30.0
"""How long a worker may take to answer, beyond what it was asked to wait."""
STOP_S = 2.0
"""How long the end waits until the workers have heard of it."""
LINGER_S = 0.01
"""After its first result a poll waits this long for more, for each few workers: results of many workers come in larger batches."""
WORKERS_PER_LINGER = 2
MAX_IN_A_ROW = 32
"""Samples that one worker gets before another one is looked for: a sixteenth of what it has under way, but not more than this."""


Blame = Literal["itself", "others", "nobody"]
"""Whose fault it is that an attempt came to nothing: the sample's, an engine's or a worker's, or not known yet."""


class Transport(Protocol):
    """How leases reach environment workers and results come back. A call may raise: `WorkerLost` when the worker is gone for good."""

    @property
    def num_workers(self) -> int: ...

    @property
    def slots(self) -> Sequence[int]:
        """Of each engine: requests that it decodes at the same time."""
        ...

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None: ...

    async def abort(self, worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        """These are no longer wanted (sample id, attempt). Each still ends with a result."""
        ...

    async def poll(self, worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, BlockRef]:
        """Results since the last poll: waits for the first up to `wait_s`, then `linger_s` for more."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, and how often they may fail."""

    deadline_s: float = 600.0
    stall_s: float = 60.0
    max_attempts: int = 2
    """Times that a sample may fail by itself."""
    max_mishaps: int = 6
    """Times that it may be taken from engines and workers that failed."""


class RolloutScheduler:
    """Runs streams of groups on the workers behind a transport. All methods belong to one event loop.

    scheduler = RolloutScheduler(transport, seed=1, limits=Limits())
    stream = scheduler.open(source, Policy(max_staleness=1, max_rejected=100))
    rollout = await scheduler.take(stream, 64, version=step)
    """

    def __init__(
        self,
        transport: Transport,
        *,
        seed: int,
        limits: Limits,
        max_in_flight: int | None = None,
        is_supervised: bool = False,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        """`is_supervised`: somebody replaces engines and workers that are lost, tells of it here, and says when there is no hope."""
        rng = rng or random.Random(seed)
        self.ledger = Ledger(clock)
        self.router = Router(transport.slots, rng, max_in_flight)
        self._transport = transport
        self._seed = seed
        self._limits = limits
        self._is_supervised = is_supervised
        self._clock = clock
        self._workers = Pool([1] * transport.num_workers, rng, bench_after=1)
        self._linger_s = LINGER_S * max(1, transport.num_workers // WORKERS_PER_LINGER)
        self._max_in_a_row = max(1, min(MAX_IN_A_ROW, sum(transport.slots) // (16 * transport.num_workers)))
        self._streams: list[Stream] = []
        self._closing: list[Stream] = []
        """Closed, with samples whose abort is still under way."""
        self._again: deque[Sample] = deque()
        """Samples that came back, first in line."""
        self._leased: dict[str, Sample] = {}
        """In the order of their leases."""
        self._leased_to: list[dict[str, Sample]] = [{} for _ in range(transport.num_workers)]
        self._company = [sys.maxsize] * transport.num_workers
        """Samples that each worker may have at a time, for the sake of those that it has."""
        self._outbox: dict[int, list[Lease]] = {}
        self._is_pumping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._pollers: dict[int, asyncio.Task[None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        """Why nothing can go on."""
        self._cpu_s = 0.0
        self._cpu_until = [0.0] * transport.num_workers
        self._spent_s: dict[State, float] = dict.fromkeys(STATES, 0.0)
        self._num_outdated = 0
        self._marked_at = clock()

    # Demands.

    def open(self, source: Source, policy: Policy) -> Stream:
        """Begin a demand; its first samples are admitted with its first take."""
        stream = Stream(source, policy, error=self._error)
        self._streams.append(stream)
        self._streams.sort(key=lambda stream: not stream.policy.is_urgent)
        return stream

    async def take(self, stream: Stream, num_groups: int, version: int) -> Rollout:
        """The next groups for a learner at `version`, none of whose tokens is older than the policy allows.

        Waits for that many groups that are complete and that the filters accept; what unblocks it is a result of any worker. Where too
        many groups fail, it may be fewer (`Policy.min_share`).
        Raises a `RolloutError` with counts when too many groups were rejected, or when the source has no more."""
        self.ledger.version = version
        stream.step_size = num_groups
        stream.is_taking = True
        stream.is_exhausted = False
        stream.is_long_round = stream.policy.tail_batching and len(stream.put_off) >= num_groups
        stream.rejected.clear()
        stream.is_short = False
        self._drop_stale(stream)
        stream.late = {group.number: group for group in stream.running.values() if self._is_last_chance(group)}
        self._pump_soon()
        try:
            while (chosen := self._choose(stream, num_groups)) is None:
                if stream.error is not None:
                    raise stream.error
                if stream.is_exhausted and not stream.is_short and len(stream.ready) >= stream.least:
                    stream.is_short = True
                    continue
                if stream.is_exhausted and not stream.running:
                    raise RolloutError(
                        f"there are no more groups: {len(stream.ready)} of {num_groups} are complete. {self._tell_rejected(stream)}"
                    )
                stream.changed.clear()
                await stream.changed.wait()
        finally:
            stream.is_taking = False
        self._consume(stream, chosen)
        if stream.policy.max_staleness == 0:
            self._dismiss_surplus(stream)
        self._pump_soon()
        return self._rollout(stream, chosen)

    def close(self, stream: Stream, reason: str = "no longer wanted") -> Rollout:
        """End a demand: whatever is under way is aborted. Returns what has left the ledger meanwhile, without groups."""
        if stream in self._streams:
            self._streams.remove(stream)
        stream.error = stream.error or RolloutError(f"the stream was closed: {reason}")
        stream.changed.set()
        for group in [*stream.running.values(), *stream.ready, *stream.stragglers]:
            self._dismiss(group, "aborted", reason)
        stream.running.clear()
        stream.ready.clear()
        stream.stragglers.clear()
        if any(sample.group.stream is stream for sample in self._leased.values()):
            self._closing.append(stream)
        return self._rollout(stream, [])

    async def stop(self) -> Rollout:
        """Abort everything and end every task. The ledger is empty afterwards; returns who was still in it, without groups."""
        leftovers = [self.close(stream, "the run ended") for stream in list(self._streams)]
        await _cancel([*self._pollers.values(), *([self._sweeper] if self._sweeper else [])])
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)  # so that the workers hear of it
        await _cancel(list(self._tasks))
        for sample in list(self._leased.values()):
            self._release(sample)
        for sample in self.ledger:
            self._leave(sample, "aborted", "the run ended")
        leftovers += [self._rollout(stream, []) for stream in self._closing]
        return Rollout(
            groups=(),
            blocks=(),
            departures=tuple([departure for rollout in leftovers for departure in rollout.departures]),
            departed_blocks=_unique([block for rollout in leftovers for block in rollout.departed_blocks]),
        )

    # Who is there.

    def engine_out(self, rank: int) -> None:
        """Nothing more goes to an engine. What is under way there comes back, or goes on elsewhere, by itself."""
        self.router.engines.lose(rank)

    def engine_back(self, rank: int) -> None:
        """An engine serves, with the current weights."""
        self.router.engines.regain(rank)
        self._pump_soon()

    def worker_out(self, rank: int, error: WorkerLost) -> None:
        """An environment worker is gone: its samples go elsewhere."""
        self._worker_failed(rank, error)

    def worker_back(self, rank: int) -> None:
        """Another worker has taken its place."""
        self._cpu_until[rank] = 0.0
        self._workers.regain(rank)
        self._pump_soon()

    def fail(self, error: Exception) -> None:
        """Nothing can go on: every take raises this."""
        self._error = self._error or error
        for stream in self._streams:
            stream.error = stream.error or error
            stream.changed.set()

    # Choosing what a step trains on.

    def _choose(self, stream: Stream, num_groups: int) -> list[OpenGroup] | None:
        """The groups of this take, or None while there are too few. Older groups go before younger ones.

        A group whose finished members would be too old for the next step is taken without those that are still under way. These come
        as stragglers with the first take after their end, in addition to the groups that it asks for."""
        needed = stream.least if stream.is_short and (stream.policy.waits or not stream.running) else num_groups
        if len(stream.ready) + len(stream.late) < needed:
            return None
        for group in list(stream.late.values()):
            if not group.witnesses and (reason := self._judge(group)) is not None:
                self._reject(group, reason)
        candidates = stream.ready + [group for group in stream.late.values() if not group.witnesses]
        if len(candidates) < needed:
            return None
        if stream.policy.extra_groups == 0 or stream.policy.max_staleness:
            candidates.sort(key=lambda group: group.number)
        chosen = candidates[:num_groups]
        stream.ready = [group for group in candidates[num_groups:] if group.number not in stream.late]
        chosen += [group for group in stream.late.values() if group.witnesses] + stream.stragglers
        stream.stragglers = []
        return sorted([self._finished_part(group) for group in chosen], key=lambda group: group.number)

    def _finished_part(self, group: OpenGroup) -> OpenGroup:
        """The group, or of a late one the members that have ended."""
        if not group.open:
            return group
        if group.stream.policy.keeps_stragglers:
            del group.stream.late[group.number]
            return group.split()
        self._cut(group)
        return group

    def _is_last_chance(self, group: OpenGroup) -> bool:
        """Whether a group is worth training on now, incomplete as it is, and less so one version later."""
        oldest = self.ledger.version - group.stream.policy.max_staleness
        if group.version > oldest or not group.stream.policy.max_staleness or len(group.done) < group.min_size:
            return False
        return min(sample.info.oldest_version for sample in group.done if sample.info is not None) <= oldest

    def _drop_stale(self, stream: Stream) -> None:
        """Members whose every token is too old leave their groups; a group that has too few left is replaced."""
        if not stream.policy.max_staleness:
            return
        oldest = self.ledger.version - stream.policy.max_staleness
        for group in [*stream.ready, *stream.stragglers, *stream.running.values()]:
            if group.version >= oldest:
                continue
            stale = [sample for sample in group.done if self._is_stale(sample)]
            if not stale:
                continue
            group.done = [sample for sample in group.done if sample not in stale]
            for sample in stale:
                self._drop(sample)
            if len(group.done) + len(group.open) < group.min_size:
                self._reject(group, "stale")
            elif not group.open and not group.witnesses and (reason := self._judge(group)) is not None:  # it is another group without them
                self._reject(group, reason)

    def _is_stale(self, sample: Sample) -> bool:
        """Whether its every token is older than its stream allows."""
        max_staleness, info = sample.group.stream.policy.max_staleness, sample.info
        return max_staleness > 0 and info is not None and 0 <= info.newest_version < self.ledger.version - max_staleness

    def _drop(self, sample: Sample) -> None:
        """It is done, and too old to be trained on."""
        assert sample.info is not None
        sample.group.stream.tally["stale_tokens"] += sample.info.num_new_tokens
        self._leave(sample, "filtered", "stale")

    def _consume(self, stream: Stream, chosen: Sequence[OpenGroup]) -> None:
        for group in chosen:
            for sample in group.done:
                assert sample.info is not None
                stream.lengths[-1][0].append(sample.info.num_new_tokens)
                self._leave(sample, "consumed")
            if not group.witnesses:
                stream.source.settle(group.request.group_id, "consumed", group.metadata.samples)

    def _dismiss_surplus(self, stream: Stream) -> None:
        """What a synchronous step did not need: the next one has other weights."""
        for group in stream.ready:
            self._dismiss(group, "aborted", "surplus")
            if stream.policy.tail_batching:
                stream.again.append(replace(group.request, times_put_off=group.request.times_put_off + 1))
            else:
                stream.source.settle(group.request.group_id, "surplus", ())
        stream.ready.clear()
        for group in stream.running.values():
            if stream.policy.tail_batching:
                stream.put_off.append(replace(group.request, times_put_off=group.request.times_put_off + 1))
            else:
                stream.source.settle(group.request.group_id, "surplus", ())
            self._dismiss(group, "aborted", "put off" if stream.policy.tail_batching else "surplus")
        stream.running.clear()

    # Results.

    def _collect(self, worker: int, report: WorkerReport, block: BlockRef) -> None:
        """Take a poll's results in: each sample goes on by itself."""
        self._cpu_s += max(0.0, report.cpu_s - self._cpu_until[worker])
        self._cpu_until[worker] = report.cpu_s
        now = self._clock()
        if report.infos:
            self._workers.succeeded(worker)
        for info in report.infos:
            sample = self._leased.get(info.sample_id)
            if sample is None or sample.attempt != info.attempt:
                self._num_outdated += 1  # an attempt that was given up, or whose sample has left
                continue
            self._release(sample)
            seconds = self.ledger.follow(sample, info.life)
            for state, spent_s in seconds.items():
                self._spent_s[state] += spent_s
            if info.fault == "engine":
                self._give_pause(self.router.engines, sample.engine)
            elif info.stop_reason != "aborted":
                self.router.engines.succeeded(sample.engine)
            if sample.is_unwanted:
                self._cut_off(sample, info, block)
            elif info.stop_reason in ("failed", "deadline", "aborted"):
                blame: Blame = "others" if info.fault in MISHAPS else "itself"
                self._come_back(sample, blame, f"{info.stop_reason}: {info.error.strip()}", info, block)
            else:
                self.router.observe(now - sample.leased_at, seconds.get("waiting", 0.0), seconds.get("generating", 0.0))
                sample.info, sample.block = info, block
                self._end(sample)
        self._pump_soon()

    def _end(self, sample: Sample) -> None:
        """A sample is done: perhaps its group is, too."""
        group: OpenGroup = sample.group
        stream = group.stream
        assert sample.info is not None
        stream.lengths[-1][1].append(sample.info.num_new_tokens)
        group.open.remove(sample)
        if self._is_stale(sample):  # the learner has moved on meanwhile
            self._drop(sample)
            self._settle_group(group, "stale")
            return
        group.done.append(sample)
        if len(group.done) + len(group.witnesses) == group.request.size:
            self._cut(group)
        self._settle_group(group, "failed")

    def _settle_group(self, group: OpenGroup, loss: str) -> None:
        """Accept or reject a group that is complete, or that can no longer be, because it has lost members by `loss`. Where it may be the
        task that fails, the next word of a member is waited for."""
        stream = group.stream
        if len(group.done) + len(group.open) < group.min_size:
            if not group.is_suspect:
                self._reject(group, loss)
        elif not group.open and group.witnesses:
            stream.forget(group)
            stream.stragglers.append(group)
        elif not group.open:
            stream.forget(group)
            reason = self._judge(group)
            if reason is None:
                stream.ready.append(group)
            else:
                self._reject(group, reason)
        elif self._is_last_chance(group):
            stream.late[group.number] = group
        if stream.is_taking:
            stream.changed.set()

    def _judge(self, group: OpenGroup) -> str | None:
        filters = group.stream.policy.filters
        if filters is None:
            return None
        try:
            return filters(group.metadata)
        except Exception as error:
            group.stream.error = group.stream.error or error
            return "error"

    def _come_back(self, sample: Sample, blame: Blame, why: str, info: SampleInfo | None = None, block: BlockRef = None) -> None:
        """An attempt has failed: the sample is leased again, with the same seed, unless it has had its chances."""
        group: OpenGroup = sample.group
        stream = group.stream
        if info is not None and info.fault:
            stream.tally[f"rollout/num_failed_{info.fault}"] += 1
            stream.tally[f"domain/{info.domain}/num_failed_{info.fault}"] += 1
        sample.num_failures += blame == "itself"
        sample.num_mishaps += blame == "others"
        if blame == "others":
            group.engine = -1
        limits = self._limits
        if sample.num_failures < limits.max_attempts and sample.num_mishaps < limits.max_mishaps:
            stream.tally["retried"] += 1
            self.ledger.move(sample, "admitted")
            self._again.append(sample)
            if group.is_suspect and group.is_poisoned:
                self._quarantine(group, why)
            return
        is_own_fault = sample.num_failures >= limits.max_attempts
        times, key = (sample.num_failures, "max_attempts") if is_own_fault else (sample.num_mishaps, "max_mishaps")
        stream.last_failure = f"sample {sample.sample_id} of task '{sample.task_id}' failed {times} times (`rollout.{key}`); last: {why}"
        sample.info, sample.block = info, block
        self._leave(sample, "failed", why)
        group.open.remove(sample)
        group.num_failed += is_own_fault
        if is_own_fault and group.is_poisoned:
            self._quarantine(group, why)
        else:
            self._settle_group(group, "failed")

    def _quarantine(self, group: OpenGroup, why: str) -> None:
        """It is the task that fails: it is not drawn again."""
        task = group.request.task
        group.stream.quarantined.append(Quarantined(task.id, task.domain, self._limits.max_attempts, why))
        self._reject(group, "failed", "quarantined")

    def _cut_off(self, sample: Sample, info: SampleInfo, block: BlockRef) -> None:
        """The result of an abort."""
        stream: Stream = sample.group.stream
        stream.tally["wasted_tokens"] += info.num_new_tokens
        if not stream.policy.tail_batching:  # what is put off comes back and is counted then
            stream.lengths[-1][2].append(info.num_new_tokens)
        sample.info, sample.block = info, block
        self._leave(sample, "aborted", "no longer wanted")

    # Groups.

    def _admit(self, stream: Stream) -> bool:
        request = stream.draw()
        if request is None:
            if stream.is_exhausted and stream.is_taking:
                stream.changed.set()
            return False
        group = OpenGroup(stream, request, stream.num_admitted, self.ledger.version, [])
        stream.num_admitted += 1
        stream.running[group.number] = group
        name, task = request.name, request.task
        size = request.size + (0 if stream.is_long_round else stream.policy.extra_samples)
        for number, seed in enumerate(sample_seeds(self._seed, (*request.seed_parts, task.id), range(size))):
            sample = Sample(f"{name}/{number:03d}", group, number, name, task.id, task.domain, seed)
            sample.attempt = self._part_with_namesake(sample.sample_id)
            self.ledger.admit(sample)
            group.open.append(sample)
        stream.queue.extend(group.open)
        return True

    def _part_with_namesake(self, sample_id: str) -> int:
        """A run that has gone back draws samples again of which an attempt may still be under way: nobody waits for that any more, and a
        later attempt tells them apart. Returns its number, or -1."""
        namesake = self._leased.get(sample_id)
        if namesake is None or not namesake.is_unwanted:
            return -1
        self._take_back(namesake, "drawn again")
        return namesake.attempt

    def _cut(self, group: OpenGroup) -> None:
        """The group goes on without the members that are still under way."""
        self._abort(group.open)
        group.open = []
        group.stream.forget(group)

    def _reject(self, group: OpenGroup, reason: str, fate: Fate = "rejected") -> None:
        """The group is of no use; a replacement is drawn, unless too many have been. Stragglers need none."""
        stream = group.stream
        stream.forget(group)
        for place in (stream.ready, stream.stragglers):
            if group in place:
                place.remove(group)
        samples = group.metadata.samples
        self._dismiss(group, "filtered", reason)
        if group.witnesses:
            return
        stream.source.settle(group.request.group_id, fate, samples)
        kind = reason.partition(":")[0]
        stream.rejected[kind] += 1
        stream.tally[f"rejected_{kind}"] += 1
        stream.tally[f"domain/{group.request.task.domain}/num_rejected"] += 1
        policy, num_failed = stream.policy, stream.rejected["failed"]
        stream.is_short = stream.is_short or num_failed > policy.max_failed
        is_hopeless = stream.is_short and not policy.waits and len(stream.ready) + len(stream.running) < stream.least
        is_needed = len(stream.ready) < stream.step_size  # otherwise this was a hunt for later steps
        num_rejected = stream.rejected.total() - (num_failed if policy.waits else 0)
        if stream.error is None and (is_hopeless or (is_needed and num_rejected > policy.max_rejected)):
            stream.error = RolloutError(self._tell_rejected(stream))
        if stream.is_taking:
            stream.changed.set()
        self._pump_soon()

    def _tell_rejected(self, stream: Stream) -> str:
        """How many groups were rejected and why, and what can be done."""
        total = stream.rejected.total()
        if total == 0:
            return "None was rejected."
        if stream.rejected["failed"] == total:
            return f"{stream.last_failure} ({total} groups failed in this step.)"
        counts = ", ".join(f"{count} × {reason}" for reason, count in stream.rejected.most_common())
        failure = f" Last failure: {stream.last_failure}" if stream.last_failure else ""
        return (
            f"{total} groups were rejected in one step, while {len(stream.ready)} of the {stream.step_size} that it needs were accepted: "
            f"{counts}. Choose tasks of another difficulty or filters that let more through, or raise `rollout.max_rejected`.{failure}"
        )

    def _dismiss(self, group: OpenGroup, state: State, reason: str) -> None:
        """Everybody leaves: those who are done as `state`, those under way by an abort."""
        for sample in group.done:
            assert sample.info is not None
            group.stream.tally["wasted_tokens"] += sample.info.num_new_tokens
            self._leave(sample, state, reason)
        group.done = []
        self._abort(group.open)
        group.open = []

    def _abort(self, samples: Sequence[Sample]) -> None:
        """Samples that are no longer wanted: those that are leased end with their workers' word, the others at once."""
        attempts: dict[int, list[tuple[str, int]]] = {}
        for sample in samples:
            sample.is_unwanted = True
            if sample.sample_id in self._leased:
                attempts.setdefault(sample.worker, []).append((sample.sample_id, sample.attempt))
            else:  # in a queue, which skips it when its turn comes
                self._leave(sample, "aborted", "no longer wanted")
        for worker, unwanted in attempts.items():
            self._spawn(self._send_abort(worker, unwanted))

    def _leave(self, sample: Sample, state: State, reason: str = "") -> None:
        departure = self.ledger.leave(sample, state, reason)
        sample.group.stream.left.append((departure, sample.block))
        sample.group = None  # a circle would have to wait for the garbage collector

    # Leases.

    def _pump_soon(self) -> None:
        """Hand out samples at the end of this turn of the event loop, once for everything that happened in it."""
        if not self._is_pumping:
            self._is_pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Lease what there is room for, then send each worker its leases in one call."""
        self._is_pumping = False
        try:
            self._hand_out()
        except Exception as error:  # of a source, say: nobody else would hear of it
            self.fail(error)
        for worker, leases in self._outbox.items():
            self._spawn(self._send_leases(worker, leases))
        self._outbox = {}

    def _hand_out(self) -> None:
        """Lease samples as long as there are some, and room for them. A worker gets several in a row, which then travel together."""
        router, workers = self.router, self._workers
        worker, num_in_a_row = workers.least_loaded(), 0
        while (sample := self._next_sample()) is not None:
            engine = router.pick(sample.group.engine)
            if num_in_a_row == self._max_in_a_row or worker is None or not (workers.is_usable(worker) and self._has_place(worker, sample)):
                worker, num_in_a_row = self._worker_for(sample), 0
            if engine is None or worker is None:
                self._again.appendleft(sample)
                break
            self._lease(sample, engine, worker)
            num_in_a_row += 1

    def _worker_for(self, sample: Sample) -> int | None:
        """The least loaded worker that has a place for a sample."""
        worker = self._workers.least_loaded()
        if worker is None or self._has_place(worker, sample):
            return worker
        ranks = range(self._transport.num_workers)
        fitting = [rank for rank in ranks if self._workers.is_usable(rank) and self._has_place(rank, sample)]
        return min(fitting, key=self._workers.in_flight.__getitem__, default=None)

    def _has_place(self, worker: int, sample: Sample) -> bool:
        return len(self._leased_to[worker]) < min(self._company[worker], sample.company)

    def _next_sample(self) -> Sample | None:
        """Those that came back first, then what is admitted, then a new group; urgent streams before others."""
        again = self._again
        while again:
            sample = again.popleft()
            if not sample.is_unwanted:
                return sample
        for stream in self._streams:
            queue = stream.queue
            while True:
                while queue:
                    sample = queue.popleft()
                    if not sample.is_unwanted:
                        return sample
                if not self._has_room() or not self._admit(stream):
                    break
        return None

    def _has_room(self) -> bool:
        return len(self._workers) > 0 and self.router.pick() is not None

    def _lease(self, sample: Sample, engine: int, worker: int) -> None:
        group: OpenGroup = sample.group
        request = group.request
        if group.engine < 0:
            group.engine = engine
        sample.attempt += 1
        sample.engine, sample.worker = engine, worker
        self.ledger.move(sample, "leased", worker)
        self._leased[sample.sample_id] = self._leased_to[worker][sample.sample_id] = sample
        self._company[worker] = min(self._company[worker], sample.company)
        sample.leased_at = self._clock()
        self.router.leased(engine)
        self._workers.add(worker)
        if worker not in self._pollers:
            self._pollers[worker] = asyncio.create_task(self._poll(worker))
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())
            self._sweeper.add_done_callback(self._hear)
        lease = Lease(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            task=request.task,
            seed=sample.seed,
            sampling=request.sampling_of(sample.number),
            engine=engine,
            attempt=sample.attempt,
            deadline_s=self._limits.deadline_s,
            stall_s=self._limits.stall_s,
        )
        self._outbox.setdefault(worker, []).append(lease)

    def _release(self, sample: Sample) -> None:
        """The lease is over, one way or another."""
        del self._leased[sample.sample_id]
        others = self._leased_to[sample.worker]
        del others[sample.sample_id]
        if sample.company <= self._company[sample.worker] < sys.maxsize:
            self._company[sample.worker] = min((other.company for other in others.values()), default=sys.maxsize)
        self.router.ended(sample.engine)
        self._workers.remove(sample.worker)

    def _take_back(self, sample: Sample, why: str, blame: Blame = "others") -> None:
        """A lease that will not end by itself."""
        self._release(sample)
        if sample.is_unwanted:
            self._leave(sample, "aborted", why)
        else:
            self._come_back(sample, blame, why)

    def _take_back_from_lost(self, worker: int, why: str) -> None:
        """One of a lost worker's samples may be what ended it. They are tried again, each among half as many, until one is found that was
        alone with its worker."""
        aboard = list(self._leased_to[worker].values())
        for sample in aboard:
            blame: Blame = "itself" if sample.company == 1 else "nobody"
            sample.company = max(1, len(aboard) // 2)
            self._take_back(sample, why, blame)

    # Talking to workers.

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._hear)

    def _hear(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits these tasks: what one of them raises must not be lost."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.fail(error)

    async def _send_leases(self, worker: int, leases: Sequence[Lease]) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                await self._transport.lease(worker, leases)
        except Exception as error:  # whatever the transport says, these samples must go elsewhere
            for lease in leases:
                sample = self._leased.get(lease.sample_id)
                if sample is not None and sample.attempt == lease.attempt:
                    self._take_back(sample, f"the lease did not arrive: {error}")
            self._worker_failed(worker, error)

    async def _send_abort(self, worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                await self._transport.abort(worker, attempts)
        except Exception:  # nobody wants them; whether the worker is well shows in its polls
            pass

    async def _poll(self, worker: int) -> None:
        """Fetch a worker's results as long as it has samples. A worker that fails is tried again later, one that is gone is not."""
        try:
            while self._leased_to[worker]:
                try:
                    async with asyncio.timeout(POLL_WAIT_S + CALL_S):
                        report, block = await self._transport.poll(worker, POLL_WAIT_S, self._linger_s)
                except Exception as error:
                    self._worker_failed(worker, error)
                    return
                self._collect(worker, report, block)
        except Exception as error:
            self.fail(error)
        finally:
            del self._pollers[worker]

    def _worker_failed(self, worker: int, error: Exception) -> None:
        """Its samples go elsewhere at once, and nothing goes to it for a while."""
        why = f"environment worker {worker} failed: {type(error).__name__}: {error}"
        if isinstance(error, WorkerLost):
            self._take_back_from_lost(worker, why)
            self._workers.failed(worker)
            self._workers.lose(worker)
            if not len(self._workers) and not self._is_supervised:
                self.fail(error)
        else:
            for sample in list(self._leased_to[worker].values()):
                self._take_back(sample, why)
            self._give_pause(self._workers, worker)
        self._pump_soon()

    def _give_pause(self, pool: Pool, rank: int) -> None:
        """A member has failed: perhaps it gets nothing for a while."""
        pause_s = pool.failed(rank)
        if pause_s is not None:
            asyncio.get_running_loop().call_later(pause_s, self._back, pool, rank)

    def _back(self, pool: Pool, rank: int) -> None:
        pool.back(rank)
        self._pump_soon()

    async def _sweep(self) -> None:
        """Take leases back whose worker did not keep their deadline."""
        patience_s = self._limits.deadline_s + CALL_S
        while self._leased:
            oldest = next(iter(self._leased.values()))
            left_s = oldest.leased_at + patience_s - self._clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                self._take_back(oldest, f"no word of it within {patience_s:g} s")
                self._pump_soon()
        self._sweeper = None

    # Reporting.

    def _rollout(self, stream: Stream, chosen: Sequence[OpenGroup]) -> Rollout:
        left, stream.left = stream.left, []
        quarantined, stream.quarantined = stream.quarantined, []
        report = {**stream.report(chosen, self.ledger.version), **self._report(stream)} if chosen else {}
        return Rollout(
            groups=tuple([group.metadata for group in chosen]),
            blocks=_unique([sample.block for group in chosen for sample in group.done]),
            departures=tuple([departure for departure, _ in left]),
            departed_blocks=_unique([block for _, block in left if block is not None]),
            report=report,
            quarantined=tuple(quarantined),
        )

    def _report(self, stream: Stream) -> dict[str, float]:
        """How busy everybody was since the last report. These figures depend on timing."""
        now = self._clock()
        span_s = max(1e-9, now - self._marked_at)
        spent_s, cpu_s, num_outdated = self._spent_s, self._cpu_s, self._num_outdated
        self._spent_s, self._cpu_s, self._num_outdated, self._marked_at = dict.fromkeys(STATES, 0.0), 0.0, 0, now
        return {
            "utilisation/actor_infer": spent_s["generating"] / span_s / self.router.num_slots,
            "utilisation/environment": cpu_s / span_s / self._transport.num_workers,
            "queue/waiting_for_slot_mean": spent_s["waiting"] / span_s,
            "queue/in_environment_mean": spent_s["environment"] / span_s,
            "queue/in_reward_mean": spent_s["reward"] / span_s,
            "queue/limit": float(self.router.limit),
            "queue/num_outdated": float(num_outdated),
            "queue/num_ready": float(len(stream.ready)),
            "queue/num_running": float(len(stream.running)),
        }


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _unique(blocks: Sequence[BlockRef]) -> tuple[BlockRef, ...]:
    return tuple({id(block): block for block in blocks}.values())
