"""One trajectory, from its first prompt to its verdict: environment ↔ engine, turn by turn, token by token.

    start → prompt tokens ─┬→ generate → reply tokens → step ─┬→ done → rewards → Trajectory
                           └──── observation tokens ←─────────┘

What the engine sampled is what the trajectory holds: text is decoded for the environment and never encoded again.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from drumroll.envs.base import Env, Step
from drumroll.errors import DrumrollError, PolicyFault, RewardError, RolloutError
from drumroll.rewards.compose import LARGEST, RewardSet
from drumroll.rollout.lease import Lease
from drumroll.text.renderer import Renderer
from drumroll.types import Chunk, GenRequest, StopReason, Trajectory, Turn

CLOSE_S = 30.0
"""How long an environment may take to close."""


class Engine(Protocol):
    """Where an episode's replies come from."""

    async def generate(self, request: GenRequest) -> Chunk: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one episode."""

    max_turns: int
    max_tokens: int


@dataclass
class _Draft:
    """A trajectory while it grows."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    token_version: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    success: bool | None = None

    def observe(self, ids: Sequence[int], text: str) -> None:
        start = len(self.token_ids)
        self.token_ids += ids
        self.loss_mask += [False] * len(ids)
        self.logp += [0.0] * len(ids)
        self.token_version += [-1] * len(ids)
        self.turns.append(Turn("environment", start, len(self.token_ids), text))

    def reply(self, chunk: Chunk, text: str) -> None:
        start = len(self.token_ids)
        self.token_ids += chunk.token_ids
        self.loss_mask += [True] * len(chunk.token_ids)
        self.logp += chunk.logp
        self.token_version += chunk.token_version
        self.turns.append(Turn("policy", start, len(self.token_ids), text))

    def take(self, step: Step) -> None:
        """Rewards of steps add up; the latest statement about success stands."""
        if step.reward is not None:
            self.reward = (self.reward or 0.0) + step.reward
        if step.success is not None:
            self.success = step.success
        self.metrics.update(step.metrics)


async def run_episode(lease: Lease, env: Env, engine: Engine, renderer: Renderer, rewards: RewardSet, limits: Limits) -> Trajectory:
    """Run one sample to its end. Whatever fails on the way is recorded in the trajectory and never raised."""
    draft = _Draft()
    draft.timings["started"] = time.time()
    error = ""
    stop: StopReason
    late = f"the episode took longer than {lease.deadline_s:g} s"
    deadline = asyncio.timeout(lease.deadline_s)
    try:
        async with deadline:
            try:
                stop = await _converse(lease, env, engine, renderer, limits, draft)
            except PolicyFault as fault:
                stop, error = "policy_fault", fault.reason
                draft.reward = (draft.reward or 0.0) + fault.reward
            draft.timings["generated"] = time.time()
            trajectory = _finish(lease, draft, stop, late if stop == "deadline" else error)
            if stop not in ("aborted", "deadline"):
                trajectory = await _score(trajectory, rewards)
    except Exception as failure:  # the boundary: environments, rewards and engines may raise anything
        if deadline.expired():
            trajectory = _finish(lease, draft, "deadline", late)
        else:
            trajectory = _finish(lease, draft, "failed", _reason(failure, lease, env, draft))
    finally:
        not_closed = await _close(env)
    errors = [text for text in (trajectory.error, not_closed) if text]
    return replace(trajectory, error="\n".join(errors), timings={**trajectory.timings, "ended": time.time()})


async def _close(env: Env) -> str:
    """Close the environment; what goes wrong, if anything. A sample must come back even if its environment does not."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await env.close()
    except Exception as failure:
        return f"closing env {type(env).__name__} failed: {type(failure).__name__}: {failure}"
    return ""


def _reason(failure: Exception, lease: Lease, env: Env, draft: _Draft) -> str:
    """What failed and where; drumroll's own errors say enough without a traceback."""
    reason = f"{type(failure).__name__}: {failure} (task {lease.task.id}, turn {len(draft.turns)}, env {type(env).__name__})"
    if isinstance(failure, DrumrollError):
        return reason
    return reason + "\n" + "".join(traceback.format_tb(failure.__traceback__)[-3:])


async def _converse(lease: Lease, env: Env, engine: Engine, renderer: Renderer, limits: Limits, draft: _Draft) -> StopReason:
    """Prompt, reply, observation, reply, … until the environment is done or a budget is spent."""
    step = await env.start(lease.task)
    ids, text = renderer.first(step.prompt, step.messages)
    draft.observe(ids, text)
    if len(ids) >= limits.max_tokens:
        raise RolloutError(
            f"the prompt has {len(ids)} tokens, and an episode may have {limits.max_tokens} (`rollout.max_tokens`, `engine.context_tokens`)"
        )
    generate_s = 0.0
    for turn in range(limits.max_turns):
        room = limits.max_tokens - len(draft.token_ids)
        request = GenRequest(
            id=f"{lease.sample_id}/{lease.attempt}/{turn}",
            token_ids=list(draft.token_ids),
            sampling=replace(lease.sampling, max_new_tokens=min(lease.sampling.max_new_tokens, room)),
            seed=_turn_seed(lease.seed, turn),
            deadline_s=lease.deadline_s,
        )
        started = time.perf_counter()
        chunk = await engine.generate(request)
        generate_s += time.perf_counter() - started
        draft.timings["generate_s"] = generate_s
        if chunk.finish == "error":
            raise RolloutError(f"the engine refused the request: {chunk.error}")
        reply = renderer.reply_text(chunk.token_ids, lease.sampling.stop, draft.token_ids)
        draft.reply(chunk, reply)
        if chunk.finish in ("aborted", "deadline"):
            return chunk.finish
        step = await env.step(reply)
        draft.take(step)
        if step.done:
            return "length" if chunk.finish == "length" else "stop" if limits.max_turns == 1 else "done"
        if turn + 1 < limits.max_turns:
            ids, text = renderer.next(step.prompt, step.messages, draft.token_ids[-1])
            if len(draft.token_ids) + len(ids) >= limits.max_tokens:
                return "length"  # no room for a reply to it
            draft.observe(ids, text)
    return "turns"


async def _score(trajectory: Trajectory, rewards: RewardSet) -> Trajectory:
    """Add the reward functions' verdict to what the environment gave."""
    if trajectory.reward is not None and not abs(trajectory.reward) <= LARGEST:  # NaN is not either
        raise RewardError(f"the environment's rewards add up to {trajectory.reward}; a number between ±{LARGEST:g} was expected.")
    started = time.perf_counter()
    verdict = await rewards.score(trajectory)
    given = [reward for reward in (trajectory.reward, verdict.reward) if reward is not None]
    parts = dict(verdict.parts)
    if trajectory.reward is not None:
        parts["environment"] = trajectory.reward
    return replace(
        trajectory,
        reward=sum(given) if given else None,
        reward_parts=parts,
        success=trajectory.success if verdict.success is None else verdict.success,
        timings={**trajectory.timings, "reward_s": time.perf_counter() - started},
    )


def _finish(lease: Lease, draft: _Draft, stop: StopReason, error: str) -> Trajectory:
    return Trajectory(
        sample_id=lease.sample_id,
        group_id=lease.group_id,
        task=lease.task,
        turns=tuple(draft.turns),
        token_ids=np.asarray(draft.token_ids, dtype=np.int32),
        loss_mask=np.asarray(draft.loss_mask, dtype=np.bool_),
        logp=np.asarray(draft.logp, dtype=np.float32),
        token_version=np.asarray(draft.token_version, dtype=np.int32),
        sampling=lease.sampling,
        seed=lease.seed,
        reward=draft.reward,
        stop_reason=stop,
        success=draft.success,
        error=error,
        timings=dict(draft.timings),
        metrics=dict(draft.metrics),
    )


def unfinished(lease: Lease, error: str) -> Trajectory:
    """The record of a sample that never got as far as an episode."""
    return _finish(lease, _Draft(), "failed", error)


def _turn_seed(seed: int, turn: int) -> int:
    """Each turn draws its own noise; the first turn's seed is the sample's."""
    return seed if turn == 0 else (seed ^ (turn * 0x9E3779B97F4A7C15)) & 0x7FFFFFFFFFFFFFFF
