"""Several rewards as one verdict: each is asked where it is computed, beside the episode or in the reward workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drumroll.config.models import RewardConfig
from drumroll.errors import DrumrollError
from drumroll.registry import REGISTRY
from drumroll.rewards.place import Place
from drumroll.rewards.reward import Parts, Reward
from drumroll.types import Trajectory


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rewards say of a trajectory.

    Example: exact_match with weight 2 and a mapping: `Verdict(2.5, {"exact_match": 1.0, "style/short": 0.5}, True)`.
    """

    reward: float | None = None
    """Weighted sum; None when no reward applies."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Every reward by its name, before its weight; the parts of a mapping as `name/part`."""
    success: bool | None = None
    """Whether every applicable reward with `success_at` reached it; None when there is none."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each reward took to answer, by its name."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """How often each failed before it answered, of those that did."""


class RewardPool(Protocol):
    """Whoever computes the pooled rewards, elsewhere."""

    async def ask(self, domain: str, number: int, trajectory: Trajectory, asked: list[int]) -> Parts:
        """What the domain's reward with this number says; raises when it has no verdict.

        Ranks in `asked` have been asked before, and are again only if there is no other; the one that is asked now is added."""
        ...


class RewardSet:
    """The rewards of one domain, ready to judge."""

    def __init__(
        self, configs: Sequence[RewardConfig], deadline_s: float = 60.0, *, domain: str = "", pool: RewardPool | None = None
    ) -> None:
        """`deadline_s` is for one reward and one trajectory. Pooled rewards are asked here, too, where there is no `pool`."""
        self._configs = tuple(configs)
        self._deadline_s = deadline_s
        self._domain = domain
        self._pool = pool
        self.names = unique_names(configs)
        """Of the rewards, in the order of the config."""
        self._here = {
            number: Reward(config, name)
            for number, (config, name) in enumerate(zip(configs, self.names, strict=True))
            if pool is None or config.seat == "inline"
        }

    async def start(self, place: Place) -> None:
        """Let the rewards that are computed here get ready."""
        for reward in self._here.values():
            await reward.start(place)

    async def score(self, trajectory: Trajectory) -> Verdict:
        """Ask every reward; a `RewardError` when one fails, takes too long, or returns something that is no reward."""
        answers = await asyncio.gather(*(self._insist(number, trajectory) for number in range(len(self._configs))))
        parts: dict[str, float] = {}
        total: float | None = None
        success: bool | None = None
        for config, (named, _, _) in zip(self._configs, answers, strict=True):
            if not named:
                continue
            parts |= named
            value = sum(named.values())
            total = (total or 0.0) + config.weight * value
            if config.success_at is not None:
                success = success is not False and value >= config.success_at
        return Verdict(
            total,
            parts,
            success,
            seconds={name: seconds for name, (_, seconds, _) in zip(self.names, answers, strict=True)},
            failures={name: times for name, (_, _, times) in zip(self.names, answers, strict=True) if times},
        )

    async def _insist(self, number: int, trajectory: Trajectory) -> tuple[Parts, float, int]:
        """Its answer, how long it took, and how often it failed before."""
        config, started, asked = self._configs[number], time.monotonic(), list[int]()
        for failures in range(config.retries + 1):
            try:
                return await self._ask(number, trajectory, asked), time.monotonic() - started, failures
            except DrumrollError:
                if failures == config.retries:
                    raise
        raise AssertionError("unreachable")

    async def _ask(self, number: int, trajectory: Trajectory, asked: list[int]) -> Parts:
        reward = self._here.get(number)
        if reward is not None:
            return await reward.ask(trajectory, self._configs[number].deadline_s or self._deadline_s)
        assert self._pool is not None
        return await self._pool.ask(self._domain, number, trajectory, asked)


def unique_names(configs: Sequence[RewardConfig]) -> list[str]:
    """What each reward is called: its own name, with a number behind it where that is taken."""
    names: list[str] = []
    for config in configs:
        name = REGISTRY.lookup("reward", config.kind).short_name
        candidates = (name if count == 1 else f"{name}_{count}" for count in range(1, len(names) + 2))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names
