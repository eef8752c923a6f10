"""A stream: one demand for groups, and what it has at this moment. Nothing here waits or talks to anybody."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, get_args

from drumroll.life import Departure
from drumroll.rollout.ledger import Sample
from drumroll.rollout.population import kept_length_ratio
from drumroll.rollout.source import GroupRequest, Source
from drumroll.types import Fault, Group, Quarantined, SampleInfo

NUM_FAILED = tuple(f"rollout/num_failed_{fault}" for fault in get_args(Fault) if fault)
"""Attempts that failed, by whose fault it was."""

BlockRef = Any
"""Opaque reference to a block: a list of trajectories somewhere in the cluster."""

WINDOW_STEPS = 16
"""Takes over which lengths are compared with those of all samples that were begun."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a stream accepts."""

    max_staleness: int = 0
    min_group_size: int | None = None
    """None: groups must be whole."""
    keeps_stragglers: bool = True
    """Where a group must be used before its last members have ended: whether these go on, and are compared with the others when they
    end. That needs engines whose unfinished replies go on with new weights; otherwise they are aborted."""
    extra_groups: int = 0
    extra_samples: int = 0
    tail_batching: bool = False
    filters: Callable[[Group], str | None] | None = None
    max_rejected: int = 0
    """Groups rejected in one take before it gives up."""
    max_failed: int = 0
    """Groups among those that failed; then the take goes on with fewer, if `min_share` allows it."""
    min_share: float = 1.0
    """Share of the groups asked for that a take must have, whatever failed."""
    waits: bool = False
    """Whether a take that has less goes on drawing groups, rather than giving up."""
    is_urgent: bool = False
    """Whether its samples go before those of other streams."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a take brings: groups in the order of admission, and where their trajectories are."""

    groups: tuple[Group, ...]
    blocks: tuple[BlockRef, ...]
    """Every block that holds a sample of `groups`; they hold others as well."""
    departures: tuple[Departure, ...] = ()
    """Every sample that has left the ledger since the last take, those of `groups` included."""
    departed_blocks: tuple[BlockRef, ...] = ()
    """Where those samples' trajectories are, as far as there are any."""
    report: dict[str, float] = field(default_factory=dict)
    quarantined: tuple[Quarantined, ...] = ()
    """Tasks that will not be drawn again, found since the last take."""

    @property
    def samples(self) -> list[SampleInfo]:
        return [sample for group in self.groups for sample in group.samples]


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group while its samples are under way, or while it waits to be taken."""

    stream: Stream
    request: GroupRequest
    number: int
    """Counts admissions of the stream."""
    version: int
    """The learner's when it was admitted."""
    open: list[Sample]
    """Members that have not ended."""
    done: list[Sample] = field(default_factory=list)
    engine: int = -1
    """That holds the prompt's cache."""
    witnesses: tuple[float, ...] = ()
    """Rewards of members that have been taken already; the others are stragglers."""
    num_failed: int = 0
    """Members that have left because they failed by themselves too often."""

    @property
    def is_poisoned(self) -> bool:
        """Whether it seems to be the task that fails: of no attempt at it is a result known, and of most members that were begun a
        failure."""
        begun = [sample for sample in self.open if sample.attempt >= 0]
        num_failed = self.num_failed + sum(sample.num_failures > 0 for sample in begun)
        return not self.done and not self.witnesses and 2 * num_failed >= self.num_failed + len(begun)

    @property
    def is_suspect(self) -> bool:
        """Whether a member has failed by itself too often, and of the others nothing is known yet that says more about the task."""
        return self.num_failed > 0 and not self.done and not self.witnesses and any(sample.attempt >= 0 for sample in self.open)

    @property
    def min_size(self) -> int:
        """Members that it must have to be used. Stragglers are welcome one by one."""
        least = self.stream.policy.min_group_size
        return 1 if self.witnesses else self.request.size if least is None else min(least, self.request.size)

    @property
    def metadata(self) -> Group:
        members = sorted(self.done, key=lambda sample: sample.number)
        return Group(self.request.name, tuple([sample.info for sample in members if sample.info is not None]), self.witnesses)

    def split(self) -> OpenGroup:
        """The members that have ended, as a group of their own; the stragglers stay."""
        part = OpenGroup(self.stream, self.request, self.number, self.version, [], self.done, self.engine, self.witnesses)
        rewards = [sample.info.reward for sample in self.done if sample.info is not None]
        self.witnesses += tuple([reward for reward in rewards if reward is not None])
        self.done = []
        return part


@dataclass(eq=False)
class Stream:
    """One demand for groups, from `RolloutScheduler.open` to `RolloutScheduler.close`."""

    source: Source
    policy: Policy
    step_size: int = 0
    """Groups that the latest take asked for."""
    is_taking: bool = False
    is_long_round: bool = False
    queue: deque[Sample] = field(default_factory=deque)
    """Admitted, and not yet leased."""
    running: dict[int, OpenGroup] = field(default_factory=dict)
    """Groups under way by number, in the order of admission."""
    late: dict[int, OpenGroup] = field(default_factory=dict)
    """Those of them that the take under way would rather have incomplete than leave to the next one."""
    ready: list[OpenGroup] = field(default_factory=list)
    stragglers: list[OpenGroup] = field(default_factory=list)
    """What is left of groups that were taken before, ready for the next take in addition to its groups."""
    put_off: deque[GroupRequest] = field(default_factory=deque)
    """For a round of their own."""
    again: deque[GroupRequest] = field(default_factory=deque)
    """Complete, but more than a step needed: begun again in the next one."""
    num_admitted: int = 0
    is_exhausted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""
    quarantined: list[Quarantined] = field(default_factory=list)
    is_short: bool = False
    """Whether so many groups failed that the take under way may go on with fewer than it asked for."""
    tally: Counter[str] = field(default_factory=Counter)
    left: list[tuple[Departure, BlockRef | None]] = field(default_factory=list)
    lengths: deque[tuple[list[int], list[int], list[int]]] = field(init=False)
    """Of each of the latest takes: lengths that were kept, complete, and cut off."""

    def __post_init__(self) -> None:
        # Where nothing is ever cut off, each take tells all by itself.
        policy = self.policy
        is_selective = policy.extra_groups or policy.extra_samples or policy.max_staleness
        self.lengths = deque([([], [], [])], maxlen=WINDOW_STEPS if is_selective else 1)

    @property
    def capacity(self) -> int:
        """Groups that may be unfinished or unread at this moment."""
        policy = self.policy
        if policy.max_staleness:
            return (policy.max_staleness + 1) * self.step_size
        if not self.is_taking:
            return 0
        return self.step_size + (0 if self.is_long_round else policy.extra_groups)

    @property
    def least(self) -> int:
        """Groups that a take must have at least."""
        return max(1, ceil(self.policy.min_share * self.step_size))

    def draw(self) -> GroupRequest | None:
        """The next group, if there is room for one and one to be had."""
        if self.is_short and not self.policy.waits:
            return None
        if self.error is not None or len(self.running) + len(self.ready) >= self.capacity:
            return None
        if self.is_long_round and self.put_off:
            return self.put_off.popleft()
        if self.again:
            return self.again.popleft()
        request = self.source.draw()
        if request is None:
            self.is_exhausted = True
        return request

    def forget(self, group: OpenGroup) -> None:
        """The group is no longer under way."""
        self.running.pop(group.number, None)
        self.late.pop(group.number, None)

    def report(self, chosen: Sequence[OpenGroup], version: int) -> dict[str, float]:
        """What happened since the last take, which chose these groups for a learner at `version`."""
        kept, complete, cut_off = ([length for take in self.lengths for length in take[kind]] for kind in range(3))
        self.lengths.append(([], [], []))
        tally, self.tally = self.tally, Counter()
        rejections = {name: count for name, count in tally.items() if name.startswith("rejected_")}
        report = {
            "rollout/num_retried": float(tally["retried"]),
            **dict.fromkeys(NUM_FAILED, 0.0),
            **{name: float(count) for name, count in tally.items() if "/" in name},
            "rollout/num_rejected": float(sum(rejections.values())),
            **{f"rollout/num_{name}": float(count) for name, count in rejections.items()},
            "rollout/wasted_tokens": float(tally["wasted_tokens"]),
            "rollout/kept_length_ratio": kept_length_ratio(kept, complete, cut_off),
        }
        if self.policy.max_staleness:
            ages = [version - sample.info.oldest_version for group in chosen for sample in group.done if sample.info is not None]
            report |= {
                "rollout/age_max": float(max(ages, default=0)),
                "rollout/age_mean": sum(ages) / max(1, len(ages)),
                "rollout/stale_tokens": float(tally["stale_tokens"]),
            }
        return report
