"""The `environment` role: runs many episodes at a time and talks to engines directly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drumroll.cluster.cluster import Handle
from drumroll.config.models import EnvConfig, RewardConfig
from drumroll.envs.base import Env
from drumroll.registry import REGISTRY
from drumroll.rewards.compose import RewardSet
from drumroll.rollout.engine_client import EngineClient
from drumroll.rollout.episode import Limits, run_episode, unfinished
from drumroll.rollout.lease import Lease
from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import RankInfo, SampleInfo, Trajectory

STARTED_AT_ONCE = 64
"""Episodes that begin before their requests go to the engines, which are then busy while the next ones begin."""

LINGER_S = 0.01
"""After the first result, a poll waits this long for more, so that results travel in batches."""


class EnvironmentWorker:
    """Leases in, results out. Nothing here computes on a device."""

    def __init__(
        self,
        rank: RankInfo,
        *,
        model_folder: str,
        env: dict[str, Any],
        rewards: Sequence[dict[str, Any]],
        max_turns: int,
        max_tokens: int,
        trust_remote_code: bool = False,
    ) -> None:
        entry = REGISTRY.lookup("env", env["kind"])
        self._env_class: type[Env] = entry.target  # type: ignore[assignment]
        self._env_config = entry.schema(EnvConfig).model_validate(env)
        self._rewards = RewardSet([REGISTRY.lookup("reward", r["kind"]).schema(RewardConfig).model_validate(r) for r in rewards])
        self._renderer = Renderer(Tokenizer(Path(model_folder), trust_remote_code=trust_remote_code))
        self._limits = Limits(max_turns, max_tokens)
        self._client_id = f"environment-{rank.rank}"
        self._engines: list[EngineClient] = []
        self._running: set[asyncio.Task[None]] = set()
        self._results: list[Trajectory] = []
        self._news = asyncio.Event()

    async def connect(self, engines: Sequence[Handle]) -> None:
        """Say where replies come from; comes before the first lease."""
        self._engines = [EngineClient(handle.call, self._client_id) for handle in engines]

    async def lease(self, leases: Sequence[Lease]) -> None:
        """Start an episode for each; returns when all have begun, and does not wait for their ends."""
        for number, lease in enumerate(leases, 1):
            task = asyncio.create_task(self._run(lease))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            if number % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def poll(self, wait_s: float) -> tuple[list[SampleInfo], list[Trajectory]]:
        """Results since the last poll: metadata for the controller, and the block that it passes on by reference."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return [], []
        if self._running:
            await asyncio.sleep(LINGER_S)
        results, self._results = self._results, []
        self._news.clear()
        return [SampleInfo.of(trajectory) for trajectory in results], results

    async def _run(self, lease: Lease) -> None:
        try:
            env = self._env_class(self._env_config)
        except Exception as error:  # an environment's constructor is the user's code
            result = unfinished(lease, f"{type(error).__name__}: {error} (while building env {self._env_class.__name__})")
        else:
            result = await run_episode(lease, env, self._engines[lease.engine], self._renderer, self._rewards, self._limits)
        self._results.append(result)
        self._news.set()
