"""The `reward` role: computes the rewards that take long or need a device, away from the episodes.

Plain functions run in child processes, one trajectory at a time, and are killed at their deadline. `async` ones (sandboxes, judges,
models) run on the event loop, as many at a time as they choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from drumroll.config.models import RewardConfig
from drumroll.registry import REGISTRY
from drumroll.rewards.compose import unique_names
from drumroll.rewards.place import Place
from drumroll.rewards.process import RewardProcesses
from drumroll.rewards.reward import Parts, Reward
from drumroll.types import RankInfo, Trajectory


class RewardWorker:
    """Trajectories in, parts of their rewards out."""

    def __init__(self, rank: RankInfo, *, rewards: Mapping[str, Sequence[dict[str, Any]]], deadline_s: float = 60.0) -> None:
        """`rewards` are all rewards of every domain; those that are computed beside the episode are left alone here."""
        self._rank = rank
        self._deadline_s = deadline_s
        self._here: dict[tuple[str, int], Reward] = {}
        self._child_number: dict[tuple[str, int], int] = {}
        configs: dict[int, RewardConfig] = {}
        names: dict[int, str] = {}
        for domain, sections in rewards.items():
            of_domain = [REGISTRY.lookup("reward", section["kind"]).schema(RewardConfig).model_validate(section) for section in sections]
            for number, (config, name) in enumerate(zip(of_domain, unique_names(of_domain), strict=True)):
                if config.seat == "inline":
                    continue
                reward = self._here[domain, number] = Reward(config, name)
                if not reward.is_async:
                    child = self._child_number[domain, number] = len(configs)
                    configs[child], names[child] = config, name
        self._processes = RewardProcesses(configs, names)

    async def open(self) -> None:
        """Get everything ready: child process, sandboxes, models."""
        place = Place(self._rank.rank, self._rank.world)
        if any(reward.config.seat == "device" for reward in self._here.values()):
            from drumroll.backends.classifier import open_scorer  # imports torch
            from drumroll.backends.infer.chat import open_chat

            device = self._rank.device
            place = Place(
                self._rank.rank,
                self._rank.world,
                open_chat=partial(open_chat, device=device),
                open_scorer=partial(open_scorer, device=device),
            )
        for key, reward in self._here.items():
            if key not in self._child_number:
                await reward.start(place)
        if self._child_number:
            await self._processes.start()

    async def close(self) -> None:
        """End what runs beside this process."""
        await self._processes.close()
        for reward in self._here.values():
            await reward.close()

    async def judge(self, domain: str, number: int, trajectory: Trajectory) -> Parts:
        """What one reward of the trajectory's domain says of it."""
        reward = self._here[domain, number]
        deadline_s = reward.config.deadline_s or self._deadline_s
        child = self._child_number.get((domain, number))
        if child is not None:
            return await self._processes.ask(child, trajectory, deadline_s)
        return await reward.ask(trajectory, deadline_s)
