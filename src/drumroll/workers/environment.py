"""The `environment` role: runs many episodes at a time and talks to engines directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from drumroll.agents.endpoint import Endpoint
from drumroll.agents.process import Agent
from drumroll.agents.sessions import SessionResult
from drumroll.cluster.cluster import Handle
from drumroll.config.models import EnvConfig, RewardConfig
from drumroll.envs.blocking import end_processes
from drumroll.registry import REGISTRY
from drumroll.rewards.compose import RewardSet, Verdict
from drumroll.rewards.place import Place
from drumroll.rollout.engine_client import EngineClient, Engines
from drumroll.rollout.episode import Engine, Limits, Setting, Stage, run_episode
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.rollout.reward_client import RewardClient
from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import RankInfo, SampleInfo, Trajectory

STARTED_AT_ONCE = 64
"""Episodes that begin before their requests go to the engines, which are then busy while the next ones begin."""


class LenientRewardSet(RewardSet):
    """Gives 0 where nobody has a verdict, for algorithms that learn from something else."""

    async def score(self, trajectory: Trajectory) -> Verdict:
        verdict = await super().score(trajectory)
        return replace(verdict, reward=0.0) if verdict.reward is None and trajectory.reward is None else verdict


class EnvironmentWorker:
    """Leases in, results out. Nothing here computes on a device."""

    def __init__(
        self,
        rank: RankInfo,
        *,
        model_folder: str,
        domains: Mapping[str, Mapping[str, Any]],
        max_turns: int,
        max_tokens: int,
        env_deadline_s: float = 300.0,
        reward_deadline_s: float = 60.0,
        keeps_cache: bool = True,
        trust_remote_code: bool = False,
        needs_verdict: bool = True,
    ) -> None:
        """`domains` has the sections `env` and `rewards` of each. `env_deadline_s` is for each start and step of an environment,
        `reward_deadline_s` for each reward of a sample. `keeps_cache`: see `Stage`. Where nothing `needs_verdict`, an episode that neither
        its environment nor a reward judges has a reward of 0; otherwise it is not trained on."""
        self._domains = domains
        self._needs_verdict = needs_verdict
        self._reward_deadline_s = reward_deadline_s
        self._place = Place(rank.rank, rank.world)
        self._stage = Stage(
            rank=rank.rank,
            settings={},
            engines=(),
            renderer=Renderer(Tokenizer(Path(model_folder), trust_remote_code=trust_remote_code)),
            limits=Limits(max_turns, max_tokens, env_deadline_s),
            keeps_cache=keeps_cache,
        )
        self._endpoint = Endpoint(self._stage.renderer.tokenizer, keeps_cache=keeps_cache)
        self._client_id = f"environment-{rank.rank}"
        self._engines = Engines(())
        self._reward_pool: RewardClient | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._unwanted: dict[tuple[str, int], asyncio.Future[None]] = {}
        """(sample, attempt) of every episode → done when nobody wants it any more."""
        self._results: list[Trajectory] = []
        self._news = asyncio.Event()
        self._idle = asyncio.Event()

    async def connect(self, engines: Sequence[Handle], reward_workers: Sequence[Handle] = ()) -> None:
        """Say where replies and pooled rewards come from; comes before the first lease."""
        pool = self._reward_pool = RewardClient(reward_workers) if reward_workers else None
        settings = {name: self._setting(name, sections, pool) for name, sections in self._domains.items()}
        # Replies that are taken up elsewhere are the same to the last bit only if they begin anew.
        self._engines = Engines([self._client(handle) for handle in engines], goes_on=self._stage.keeps_cache)
        if any(setting.agent is not None for setting in settings.values()):
            await self._endpoint.start()
        self._stage = replace(self._stage, settings=settings, engines=self._engines)
        for setting in settings.values():
            await setting.rewards.start(self._place)

    async def take_up(self, worker: Handle) -> None:
        """An engine or a reward worker has been replaced, and serves."""
        if worker.role == "actor_infer":
            self._engines.replace(worker.rank, self._client(worker))
        else:
            assert self._reward_pool is not None, f"{worker.where} serves nobody here"
            self._reward_pool.replace(worker.rank, worker)

    def _client(self, engine: Handle) -> EngineClient:
        return EngineClient(engine.call, self._client_id)

    async def lease(self, leases: Sequence[Lease]) -> None:
        """Start an episode for each; returns when all have begun, and does not wait for their ends."""
        for number, lease in enumerate(leases, 1):
            unwanted = self._unwanted[lease.sample_id, lease.attempt] = asyncio.get_running_loop().create_future()
            self._idle.clear()
            task = asyncio.create_task(self._run(lease, unwanted))
            self._running.add(task)
            task.add_done_callback(self._end)
            if number % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def abort(self, samples: Sequence[tuple[str, int]]) -> None:
        """No longer wanted, each by its id and attempt: they end wherever they stand, and come with a poll. Those that have ended
        already, and unknown ones, are ignored."""
        for sample_id, attempt in samples:
            unwanted = self._unwanted.get((sample_id, attempt))
            if unwanted is not None and not unwanted.done():
                unwanted.set_result(None)

    async def poll(self, wait_s: float, linger_s: float = 0.0) -> tuple[WorkerReport, list[Trajectory]]:
        """Results since the last poll: a report for the controller, and the block that it passes on by reference.

        Waits for the first one up to `wait_s`, then `linger_s` for more where there will be more, so that results travel in batches."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return WorkerReport([], time.process_time()), []
        if self._running:
            with suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await self._idle.wait()
        results, self._results = self._results, []
        self._news.clear()
        return WorkerReport([SampleInfo.of(trajectory) for trajectory in results], time.process_time()), results

    def _setting(self, name: str, sections: Mapping[str, Any], pool: RewardClient | None) -> Setting:
        env = REGISTRY.lookup("env", sections["env"]["kind"])
        rewards = [
            REGISTRY.lookup("reward", section["kind"]).schema(RewardConfig).model_validate(section) for section in sections["rewards"]
        ]
        config = env.schema(EnvConfig).model_validate(sections["env"])
        kind = RewardSet if self._needs_verdict else LenientRewardSet
        judges = kind(rewards, self._reward_deadline_s, domain=name, pool=pool)
        if issubclass(cast(type, env.target), Agent):
            is_judged = bool(rewards) or not self._needs_verdict
            return Setting(partial(env.target, config), judges, partial(self._run_agent, config, is_judged))
        return Setting(partial(env.target, config), judges)

    async def _run_agent(self, config: EnvConfig, is_judged: bool, lease: Lease, engine: Engine) -> SessionResult:
        limits = self._stage.limits
        agent = Agent(cast(Agent.Config, config))
        return await agent.run(
            lease,
            self._endpoint,
            engine,
            max_calls=limits.max_turns,
            max_tokens=limits.max_tokens,
            is_judged=is_judged,
            rank=self._stage.rank,
        )

    async def close(self) -> None:
        """End what runs beside this process."""
        await self._endpoint.close()
        await end_processes()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle.set()

    async def _run(self, lease: Lease, unwanted: asyncio.Future[None]) -> None:
        result = await run_episode(lease, self._stage, unwanted)
        self._results.append(result)
        self._unwanted.pop((lease.sample_id, lease.attempt), None)
        self._news.set()
