"""Random schedules with faults, in virtual time: one integer seed draws everything, and whatever comes of it must keep the promises.

    python tests/unit/rollout/random_schedules.py --seeds 10000 [--first 0] [--jobs 2]

A schedule is a cluster (engines of two speeds, workers, message delays), a policy, samples that fail or hang, and faults that
strike meanwhile. It is run for several takes with training between them, then stopped. Failing seeds are printed; each
replays exactly with `--first SEED --seeds 1`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from drumroll.data.cursor import TaskCursor
from drumroll.errors import DrumrollError, RolloutError
from drumroll.life import FINAL, Departure, Stamp, State, check_order, unpack_life
from drumroll.rollout.lease import Lease
from drumroll.rollout.ledger import Ledger, Sample
from drumroll.rollout.router import MAX_BENCH_S
from drumroll.rollout.scheduler import CALL_S, Limits, RolloutScheduler
from drumroll.rollout.simulation import Chaos, Script, SimulatedCluster, simulate
from drumroll.rollout.source import GroupRequest, ListSource, TaskSource
from drumroll.rollout.stream import Policy, Rollout, Stream
from drumroll.types import Fault, Group, SampleInfo, Task

RUN_S = 1e5
"""Virtual time in which every schedule is over."""
SPAN_S = 120.0
"""Faults begin within this time."""
EVALUATED = 6
"""Samples of each evaluation."""
LAG_S = 1.0
"""Between the end of a sample and the next lease: messages travel, and a poll lingers."""
REPEAT_EVERY = 10
"""Every such seed is run twice."""


@dataclass(frozen=True)
class Samples:
    """What the samples are like. A pure function of the lease: its `Workload`."""

    seed: int
    mean_tokens: float
    spread: float
    max_turns: int
    env_s: float
    reward_s: float
    failing: float
    """Share of samples whose every attempt fails."""
    flaky: float
    """Share of attempts that fail."""
    hanging: float
    """Share of attempts whose reply stops growing."""

    def __call__(self, lease: Lease) -> Script:
        own = random.Random(lease.seed)
        turns = tuple(
            (max(1, int(self.mean_tokens * own.lognormvariate(0.0, self.spread))), own.expovariate(1.0) * self.env_s)
            for _ in range(own.randint(1, self.max_turns))
        )
        reward, reward_s, always = own.random(), own.expovariate(1.0) * self.reward_s, own.random() < self.failing
        chance = random.Random(lease.seed ^ (self.seed + 7919 * (lease.attempt + 1)))
        faults: list[Fault] = ["environment", "reward", ""]
        return Script(
            turns,
            reward_s=reward_s,
            reward=reward,
            hangs_at=chance.random() if chance.random() < self.hanging else None,
            fails=chance.choice(faults[:2]) if always or chance.random() < self.flaky else "",
        )


@dataclass(frozen=True)
class Rejects:
    """A filter that rejects a share of the groups, by their rewards."""

    share: float

    def __call__(self, group: Group) -> str | None:
        assert all(sample.reward is not None for sample in group.samples)
        digits = sum(sample.reward or 0.0 for sample in group.samples) * 1000.0
        return "unlucky: by its rewards" if digits % 1.0 < self.share else None


@dataclass(frozen=True)
class Schedule:
    """Everything that a seed decides."""

    seed: int
    num_engines: int
    slots: int
    num_workers: int
    speeds: tuple[float, ...]
    delay_s: float
    continues: bool
    samples: Samples
    chaos: Chaos
    policy: Policy
    limits: Limits
    groups: int
    """Of each take."""
    group_size: int
    num_takes: int
    train_s: float
    max_in_flight: int | None
    evaluates: bool

    @property
    def has_faults(self) -> bool:
        chaos = self.chaos
        return bool(
            chaos.engine_kills + chaos.engine_hangs + chaos.worker_kills + chaos.worker_cuts + chaos.node_losses
            or self.samples.failing + self.samples.flaky + self.samples.hanging
        )

    @property
    def lease_s(self) -> float:
        """Longest life of a lease: then the worker has given up, or the scheduler has."""
        return self.limits.deadline_s + CALL_S

    @property
    def patience_s(self) -> float:
        """Longest time between a sample's admission and its end: each of its attempts may wait until one engine, tried again after
        a pause, has run everybody else, one by one."""
        num_groups = self.groups * (1 + self.policy.max_staleness) + self.policy.extra_groups
        num_samples = num_groups * (self.group_size + self.policy.extra_samples) + EVALUATED
        return (self.limits.max_attempts + self.limits.max_mishaps) * num_samples * (self.lease_s + MAX_BENCH_S)


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(("plain", "redundant", "tail", "filtered", "asynchronous", "asynchronous"))
    is_calm = rng.random() < 0.15
    group_size, groups = rng.randint(1, 8), rng.randint(1, 8)
    extra_samples = rng.randint(0, 3) if kind in ("redundant", "tail") else 0
    staleness = rng.randint(1, 4) if kind == "asynchronous" else 0
    rejects = rng.choice((0.1, 0.5, 1.0 if rng.random() < 0.1 else 0.3)) if kind == "filtered" or rng.random() < 0.3 else 0.0
    policy = Policy(
        max_staleness=staleness,
        min_group_size=rng.choice((None, rng.randint(1, group_size))),
        extra_groups=rng.randint(1, 5) if kind in ("redundant", "tail") else 0,
        extra_samples=extra_samples,
        tail_batching=kind == "tail",
        filters=Rejects(rejects) if rejects else None,
        max_rejected=10 * groups,
        max_failed=5 * groups,
        keeps_stragglers=rng.random() < 0.7,
    )
    samples = Samples(
        seed=seed,
        mean_tokens=rng.choice((20.0, 100.0, 300.0)),
        spread=rng.choice((0.0, 0.5, 1.0)),
        max_turns=rng.choice((1, 1, 2, 4)),
        env_s=rng.choice((0.0, 0.5, 4.0)),
        reward_s=rng.choice((0.0, 0.5, 4.0)),
        failing=0.0 if is_calm else rng.choice((0.0, 0.0, 0.02)),
        flaky=0.0 if is_calm else rng.choice((0.0, 0.05, 0.2)),
        hanging=0.0 if is_calm else rng.choice((0.0, 0.02, 0.1)),
    )

    def faults(most: int) -> int:
        return 0 if is_calm else max(0, rng.randint(-most, most))

    chaos = Chaos(
        seed=rng.randrange(2**32),
        span_s=SPAN_S,
        engine_kills=faults(4),
        engine_hangs=faults(4),
        engine_slowdowns=faults(2),
        worker_kills=faults(2),
        worker_cuts=faults(4),
        node_losses=faults(2),
        lasts_s=rng.choice((5.0, 20.0, 60.0)),
    )
    return Schedule(
        seed=seed,
        num_engines=rng.choice((1, 2, rng.randint(1, 8), rng.randint(1, 40))),
        slots=rng.choice((1, 2, rng.randint(1, 16))),
        num_workers=rng.randint(1, 6),
        speeds=(1.0, rng.choice((0.25, 1.0, 3.0))),
        delay_s=rng.choice((0.0, 0.0, 0.01, 0.3)),
        continues=rng.random() < 0.5,
        samples=samples,
        chaos=chaos,
        policy=policy,
        limits=Limits(
            deadline_s=1e4 if is_calm else rng.choice((120.0, 240.0)), stall_s=rng.choice((5.0, 15.0)), max_attempts=rng.randint(2, 4)
        ),
        groups=groups,
        group_size=group_size,
        num_takes=rng.randint(2, 8),
        train_s=rng.choice((0.0, 1.0, 5.0, 30.0)),
        max_in_flight=rng.choice((None, None, rng.randint(group_size + extra_samples, 40))),
        evaluates=rng.random() < 0.2,
    )


class WatchedLedger(Ledger):
    """Sees what the scheduler's own bookkeeping might not."""

    def __init__(self, clock: Callable[[], float], max_in_flight: int | None) -> None:
        super().__init__(clock)
        self._max_in_flight = max_in_flight
        self._lines: dict[tuple[Stream, bool], dict[str, None]] = {}
        """Who waits for a lease, of each stream: those admitted, and those that came back."""
        self.admitted: dict[str, str] = {}
        """Sample id to group id, of every sample ever."""

    def admit(self, sample: Sample) -> None:
        assert sample.sample_id not in self.admitted, f"{sample.sample_id} was admitted twice"
        self.admitted[sample.sample_id] = sample.group_id
        super().admit(sample)
        self._line(sample)[sample.sample_id] = None
        stream = sample.group.stream
        policy = stream.policy
        allowed = stream.step_size * (policy.max_staleness + 1) + policy.extra_groups
        assert len(stream.running) + len(stream.ready) <= allowed, f"more than {allowed} groups are under way"
        assert stream.is_taking or policy.max_staleness, "a synchronous stream admits only while it is taken from"

    def move(self, sample: Sample, state: State, place: int = -1) -> None:
        if sample.state == "admitted":
            line = self._line(sample)
            assert state != "leased" or next(iter(line)) == sample.sample_id, f"{sample.sample_id} went before {next(iter(line))}"
            del line[sample.sample_id]
        super().move(sample, state, place)
        if state == "admitted":
            self._line(sample)[sample.sample_id] = None
        if state == "leased" and self._max_in_flight is not None:
            assert self.counts["leased"] <= self._max_in_flight, f"{self.counts['leased']} samples are leased, of {self._max_in_flight}"

    def _line(self, sample: Sample) -> dict[str, None]:
        came_back = sample.num_failures + sample.num_mishaps > 0 or sample.company < sys.maxsize
        return self._lines.setdefault((sample.group.stream, came_back), {})


@dataclass
class Outcome:
    """What came of a schedule."""

    rollouts: list[tuple[int, Stream, Rollout]] = field(default_factory=list)
    """With the learner's version."""
    leftovers: list[Rollout] = field(default_factory=list)
    admitted: dict[str, str] = field(default_factory=dict)
    error: DrumrollError | None = None
    ended_s: float = 0.0

    @property
    def departures(self) -> list[Departure]:
        everything = [rollout for _, _, rollout in self.rollouts] + self.leftovers
        return [departure for rollout in everything for departure in rollout.departures]


def run(schedule: Schedule) -> Outcome:
    """Carry a schedule out, and check what holds at every moment of it and at its end."""
    return simulate(_run(schedule))


async def _run(schedule: Schedule) -> Outcome:
    seeds: dict[str, tuple[int, int]] = {}

    def workload(lease: Lease) -> Script:
        seed, attempt = seeds.get(lease.sample_id, (lease.seed, -1))
        assert lease.seed == seed, f"{lease.sample_id} has another seed at attempt {lease.attempt}"
        assert lease.attempt > attempt, f"attempt {lease.attempt} of {lease.sample_id} began after attempt {attempt}"
        seeds[lease.sample_id] = seed, lease.attempt
        return schedule.samples(lease)

    cluster = SimulatedCluster(
        workload,
        num_engines=schedule.num_engines,
        slots=schedule.slots,
        num_workers=schedule.num_workers,
        speeds=schedule.speeds,
        continues=schedule.continues,
        delay_s=schedule.delay_s,
    )
    scheduler = RolloutScheduler(
        cluster, seed=schedule.seed, limits=schedule.limits, max_in_flight=schedule.max_in_flight, clock=cluster.clock
    )
    ledger = WatchedLedger(cluster.clock, schedule.max_in_flight)
    scheduler.ledger = ledger
    schedule.chaos.unleash(cluster)
    tasks = [Task(id=f"t{number}", prompt="?") for number in range(7)]
    source = TaskSource(TaskCursor(tasks, schedule.seed), groups_per_round=schedule.groups, group_size=schedule.group_size)
    outcome = Outcome(admitted=ledger.admitted)
    stream = scheduler.open(source, schedule.policy)
    async with asyncio.timeout(RUN_S):
        try:
            for version in range(schedule.num_takes):
                rollout = await scheduler.take(stream, schedule.groups, version)
                outcome.rollouts.append((version, stream, rollout))
                await asyncio.sleep(schedule.train_s / 2)
                if schedule.evaluates:
                    await _evaluate(scheduler, outcome, version)
                await asyncio.sleep(schedule.train_s / 2)
                cluster.push(version + 1)
        except DrumrollError as error:
            outcome.error = error
            _check_legitimate(schedule, error)
        outcome.leftovers.append(await scheduler.stop())
        outcome.ended_s = cluster.loop.now
        _check_rest(schedule, cluster, scheduler)
        await asyncio.sleep(schedule.chaos.lasts_s * 20 + schedule.limits.deadline_s + CALL_S)
        _check_silence(cluster)
    _check_source(source, outcome)
    return outcome


async def _evaluate(scheduler: RolloutScheduler, outcome: Outcome, version: int) -> None:
    """A second stream, in front of the first."""
    requests = [GroupRequest(f"eval/{version}/{n}", Task(id=f"e{n}", prompt="?"), 2, ("eval", n)) for n in range(EVALUATED // 2)]
    policy = Policy(is_urgent=True, min_group_size=0, max_rejected=len(requests), max_failed=len(requests), min_share=0.5)
    stream = scheduler.open(ListSource(requests), policy)
    outcome.rollouts.append((version, stream, await scheduler.take(stream, len(requests), version)))
    outcome.leftovers.append(scheduler.close(stream))


def _check_legitimate(schedule: Schedule, error: DrumrollError) -> None:
    """Whether what was drawn explains that the rollouts gave up."""
    if not isinstance(error, RolloutError) or ("rejected" not in str(error) and "failed" not in str(error)):
        raise error
    explained = {
        "unlucky": schedule.policy.filters is not None,
        "failed": schedule.has_faults,
        "stale": schedule.policy.max_staleness > 0,
    }
    told = {kind: int(count) for count, kind in re.findall(r"(\d+) (?:× (\w+)|groups failed)", str(error))}
    told = {kind or "failed": count for kind, count in told.items()}
    policy = schedule.policy
    has_met_cap = sum(told.values()) > policy.max_rejected or told.get("failed", 0) > policy.max_failed
    has_no_more = "no more groups" in str(error) and told.get("failed", 0) > 0  # every task is quarantined, or half of an evaluation's
    assert has_met_cap or has_no_more, f"gave up too soon, by its own words: {error}"
    assert all(explained[kind] for kind in told), f"nothing that was drawn explains this: {error}"
    accepted = re.search(r"while (\d+) of the (\d+) ", str(error))
    if accepted and told.get("failed", 0) <= policy.max_failed:
        assert int(accepted[1]) < int(accepted[2]), f"gave up, and had what it needed: {error}"


def _check_rest(schedule: Schedule, cluster: SimulatedCluster, scheduler: RolloutScheduler) -> None:
    """After `stop` the scheduler holds nothing and waits for nothing; whoever heard of it has stopped, too."""
    router, workers = scheduler.router, scheduler._workers
    assert len(scheduler.ledger) == 0, f"{len(scheduler.ledger)} samples are left in the ledger"
    assert not scheduler._leased, "leases outlive the scheduler"
    assert not any(scheduler._leased_to), "leases outlive the scheduler"
    assert not any(router.engines.in_flight), f"samples in flight on engines: {router.engines.in_flight}"
    assert not any(workers.in_flight), f"samples in flight on workers: {workers.in_flight}"
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not tasks, f"tasks outlive the scheduler: {tasks}"
    if not schedule.has_faults:
        assert not any(worker.episodes for worker in cluster.workers), "episodes go on after the end"


def _check_silence(cluster: SimulatedCluster) -> None:
    """Whatever did not hear of the end has come to its own end meanwhile."""
    for worker in cluster.workers:
        assert not worker.episodes, f"worker {worker.rank} still runs {list(worker.episodes)}"
    for engine in cluster.engines:
        assert not engine.running, f"engine {engine.rank} still runs {engine.running}"
        assert not engine.waiting, f"requests still wait at engine {engine.rank}"
        assert len(engine.free) == engine.num_slots, f"engine {engine.rank} has lost slots"


def _check_source(source: TaskSource, outcome: Outcome) -> None:
    """Consumed groups are settled; groups with members that were neither consumed nor rejected are only settled as surplus."""
    waiting = {group_id for group_id, _ in source.state()["waiting"]}
    for _, stream, rollout in outcome.rollouts:
        if stream.source is source:
            consumed = {group.group_id.partition("+")[0] for group in rollout.groups}
            assert not consumed & waiting, f"consumed, and to be drawn again: {consumed & waiting}"


def check(seed: int) -> Outcome:
    """Run a seed's schedule; an `AssertionError` where a promise is broken."""
    schedule = draw(seed)
    outcome = run(schedule)
    check_outcome(schedule, outcome)
    if seed % REPEAT_EVERY == 0:
        again = run(schedule)
        assert again.departures == outcome.departures, "a second run of the same seed went another way"
        assert str(again.error) == str(outcome.error)
    return outcome


def check_outcome(schedule: Schedule, outcome: Outcome) -> None:
    _check_exactly_once(outcome)
    lives = [unpack_life(departure.life) for departure in outcome.departures]
    for departure, stamps in zip(outcome.departures, lives, strict=True):
        _check_life(schedule, departure, stamps)
    if not schedule.has_faults:
        _check_waits(schedule, lives)
    seen: set[str] = set()
    for version, stream, rollout in outcome.rollouts:
        _check_rollout(schedule, version, stream, rollout)
        names = {group.group_id for group in rollout.groups if not group.witnesses}
        assert not names & seen, f"taken twice: {names & seen}"
        late = {group.group_id for group in rollout.groups if group.witnesses}
        assert late <= seen, f"stragglers of groups that were never taken: {late - seen}"
        seen |= names
    if not schedule.has_faults and not schedule.policy.filters and not schedule.policy.max_staleness:
        assert outcome.error is None, f"nothing went wrong, and yet: {outcome.error}"


def _check_exactly_once(outcome: Outcome) -> None:
    left = Counter(departure.sample_id for departure in outcome.departures)
    twice = [sample_id for sample_id, count in left.items() if count > 1]
    assert not twice, f"left twice: {twice}"
    assert set(left) == set(outcome.admitted), f"admitted and never left, or the reverse: {set(left) ^ set(outcome.admitted)}"
    for departure in outcome.departures:
        assert departure.state in FINAL
        assert departure.group_id == outcome.admitted[departure.sample_id]
        assert departure.reason or departure.state == "consumed", f"{departure.sample_id} left as {departure.state} for no reason"


def _check_waits(schedule: Schedule, lives: list[list[Stamp]]) -> None:
    """Without faults nobody waits longer than it takes to lease all of its group, and an evaluation before it, one by one."""
    waits, leases = [0.0], [0.0]
    for stamps in lives:
        leased_at = next((stamp.time for stamp in stamps if stamp.state == "leased"), stamps[-1].time)
        ended_at = next((stamp.time for stamp in stamps if stamp.state == "done"), stamps[-1].time)
        waits.append(leased_at - stamps[0].time)
        leases.append(ended_at - leased_at + LAG_S)
    in_line = schedule.group_size + schedule.policy.extra_samples + EVALUATED
    assert max(waits) <= in_line * max(leases), f"a sample waited {max(waits):.0f} s, and no lease lasted longer than {max(leases):.0f} s"


def _check_life(schedule: Schedule, departure: Departure, stamps: list[Stamp]) -> None:
    assert stamps[0].state == "admitted"
    assert check_order("admitted", departure.life[len(departure.life) // len(stamps) :]) == departure.state
    assert all(before.time <= after.time for before, after in pairwise(stamps)), f"{departure.sample_id}: {stamps}"
    assert sum(stamp.state == "leased" for stamp in stamps) == departure.attempt + 1
    leased_at: float | None = None
    for stamp in stamps:
        if stamp.state == "leased":
            leased_at = stamp.time
        elif stamp.state in ("admitted", "done", "aborted", "failed") and leased_at is not None:
            assert stamp.time <= leased_at + schedule.lease_s + 1e-6, f"a lease of {departure.sample_id} lasted too long: {stamps}"
            leased_at = None
    ended = next((stamp.time for stamp in stamps if stamp.state == "done"), stamps[-1].time)
    assert ended - stamps[0].time <= schedule.patience_s, f"{departure.sample_id} starved for {ended - stamps[0].time:.0f} s: {stamps}"


def _check_rollout(schedule: Schedule, version: int, stream: Stream, rollout: Rollout) -> None:
    policy = stream.policy
    consumed = {departure.sample_id: departure.attempt for departure in rollout.departures if departure.state == "consumed"}
    assert consumed == {sample.sample_id: sample.attempt for sample in rollout.samples}, "what was consumed is not what was taken"
    num_groups = len([group for group in rollout.groups if not group.witnesses])
    assert num_groups == stream.step_size or (schedule.has_faults and stream.least <= num_groups < stream.step_size)
    size = schedule.group_size if policy is schedule.policy else 2
    least = size if policy.min_group_size is None else policy.min_group_size
    for group in rollout.groups:
        if group.witnesses:
            assert policy.keeps_stragglers
            assert 0 < len(group.samples) <= size - len(group.witnesses), f"{group.group_id}: {len(group.samples)} stragglers"
        else:
            assert least <= len(group.samples) <= size, f"{group.group_id} has {len(group.samples)} members, not {least} to {size}"
            assert policy.filters is None or policy.filters(group) is None, f"{group.group_id} was to be rejected"
        assert {sample.group_id for sample in group.samples} <= {group.group_id}
        assert len({sample.sample_id for sample in group.samples}) == len(group.samples)
        for sample in group.samples:
            _check_sample(policy, version, sample)
    if not policy.tail_batching:
        names = [group.group_id for group in rollout.groups]
        assert names == sorted(names), f"not in the order of admission: {names}"
    _check_blocks(rollout)


def _check_sample(policy: Policy, version: int, sample: SampleInfo) -> None:
    assert sample.stop_reason == "stop", f"{sample.sample_id} was taken and had ended by {sample.stop_reason}"
    oldest = version - policy.max_staleness
    assert sample.newest_version >= oldest, f"{sample.sample_id} is of version {sample.newest_version}, older than {oldest}"
    if not policy.max_staleness and not policy.is_urgent:
        assert sample.oldest_version == version, f"{sample.sample_id} is of version {sample.oldest_version}, not {version}"


def _check_blocks(rollout: Rollout) -> None:
    """Every trajectory that somebody will ask for is where the rollout says."""
    held = {(info.sample_id, info.attempt) for block in rollout.blocks for info in block}
    assert held >= {(sample.sample_id, sample.attempt) for sample in rollout.samples}
    departed = {(info.sample_id, info.attempt) for block in rollout.departed_blocks for info in block}
    ended = {(d.sample_id, d.attempt) for d in rollout.departures if d.state in ("consumed", "filtered")}
    assert departed >= ended, f"no block holds {ended - departed}"


def replay_command(seed: int) -> str:
    return f"python tests/unit/rollout/random_schedules.py --first {seed} --seeds 1"


def _try(seed: int) -> tuple[int, str, str]:
    """The seed, how it ended, and a traceback where a promise was broken."""
    try:
        outcome = check(seed)
    except Exception:
        return seed, "broken", traceback.format_exc()
    return seed, "gave up" if outcome.error else "ended", ""


def _try_all(seeds: range, jobs: int) -> Iterator[tuple[int, str, str]]:
    if jobs == 1:
        yield from map(_try, seeds)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(_try, seeds, chunksize=20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    began = time.monotonic()
    endings: Counter[str] = Counter()
    if options.seeds == 1:
        print(draw(options.first))
    for seed, ending, trace in _try_all(range(options.first, options.first + options.seeds), options.jobs):
        endings[ending] += 1
        if trace:
            print(f"seed {seed} failed:\n{trace}replay it: {replay_command(seed)}\n", flush=True)
    told = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    print(f"{options.seeds} schedules in {time.monotonic() - began:.0f} s: {told}")
    return 1 if endings["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
