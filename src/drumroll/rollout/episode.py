"""One trajectory, from its first prompt to its verdict: environment ↔ engine, turn by turn, token by token.

    start → prompt tokens ─┬→ generate → reply tokens → step ─┬→ done → rewards → Trajectory
                           └──── observation tokens ←─────────┘

What the engine sampled is what the trajectory holds: text is decoded for the environment and never encoded again. Every state
that the sample passes through is stamped (see `life`), and whoever keeps it waiting has a deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from drumroll.config.models import ANY
from drumroll.envs.base import Env, Step
from drumroll.errors import DrumrollError, PolicyFault, RewardError, RolloutError, WorkerError
from drumroll.life import State, stamp
from drumroll.rewards.compose import RewardSet, Verdict
from drumroll.rewards.reward import LARGEST
from drumroll.rollout.lease import Lease
from drumroll.text.renderer import Renderer
from drumroll.types import Chunk, Fault, FinishReason, GenRequest, StopReason, Task, Trajectory, Turn

T = TypeVar("T")

CLOSE_S = 30.0
"""How long an environment may take to close."""

GRACE_S = 8.0
"""How long an episode may take to end once it is cut short; what does not end by then is left behind."""


CUT_SHORT: tuple[StopReason, ...] = ("aborted", "deadline", "failed")
"""Ends without a verdict."""


class Engine(Protocol):
    """Where an episode's replies come from (see `EngineClient.generate`)."""

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk: ...


class EnginesByRank(Protocol):
    """See `Engines`."""

    def __getitem__(self, rank: int, /) -> Engine: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one episode."""

    max_turns: int
    max_tokens: int
    env_deadline_s: float = 300.0
    """For each start and step of the environment."""


class AgentResult(Protocol):
    """What an agent's episode comes to (see `agents`)."""

    @property
    def trajectory(self) -> Trajectory: ...

    @property
    def branches(self) -> tuple[Trajectory, ...]: ...

    def judged(self, trajectory: Trajectory) -> AgentResult:
        """The same with this verdict for all branches."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What all episodes of one domain have in common."""

    make_env: Callable[[], Env]
    rewards: RewardSet
    agent: Callable[[Lease, Engine], Awaitable[AgentResult]] | None = None
    """Plays the whole episode by itself, in place of an environment that is asked for its steps."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What all episodes of one environment worker have in common."""

    rank: int
    """Of the worker."""
    settings: Mapping[str, Setting]
    """By domain; `*` is for those that have none of their own."""
    engines: EnginesByRank
    """A lease names one."""
    renderer: Renderer
    limits: Limits
    keeps_cache: bool = True
    """Engines may keep an episode's keys and values from turn to turn. How far they do depends on timing, and so do the last bits of
    what they compute."""

    def setting(self, task: Task) -> Setting:
        setting = self.settings.get(task.domain) or self.settings.get(ANY)
        assert setting is not None, f"task {task.id} of domain {task.domain}: the run has {', '.join(self.settings)}"
        return setting


class _Late(RolloutError):
    """Somebody took longer than allowed."""


@dataclass
class _Draft:
    """A trajectory while it grows."""

    lease: Lease
    rank: int
    env: Env | None = None
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    token_version: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    success: bool | None = None
    life: bytes = b""
    now: float = 0.0
    """Time of the last stamp."""
    waits_for: Fault = ""
    """Whose answer the episode waits for, or whose failure ended it."""

    def stamp(self, state: State, at: float | None = None, version: int = -1, place: int = -1, slot: int = -1) -> None:
        """A state begins. The clocks of two machines differ a little: no stamp is earlier than the one before it."""
        self.now = max(self.now, time.time() if at is None else at)
        self.life += stamp(state, self.now, version, place, slot)

    @contextmanager
    def waiting_for(self, whom: Fault) -> Iterator[None]:
        """What fails inside is their fault."""
        self.waits_for = whom
        yield
        self.waits_for = ""

    def observe(self, ids: Sequence[int], text: str) -> None:
        start = len(self.token_ids)
        self.token_ids += ids
        self.loss_mask += [False] * len(ids)
        self.logp += [0.0] * len(ids)
        self.token_version += [-1] * len(ids)
        self.turns.append(Turn("environment", start, len(self.token_ids), text))

    def reply(self, chunk: Chunk, text: str, state: str) -> None:
        """The policy's turn, whole or cut short. The sample has left its slot, if it had one, and is back in its worker."""
        if chunk.slot >= 0:
            version = chunk.token_version[0] if chunk.token_version else -1
            self.stamp("generating", chunk.started, version, self.lease.engine, chunk.slot)
        self.stamp("environment", chunk.ended if chunk.slot >= 0 else None, place=self.rank)
        if not chunk.token_ids:
            return
        start = len(self.token_ids)
        self.token_ids += chunk.token_ids
        self.loss_mask += [True] * len(chunk.token_ids)
        self.logp += chunk.logp
        self.token_version += chunk.token_version
        self.turns.append(Turn("policy", start, len(self.token_ids), text, state=state))

    def take(self, step: Step) -> None:
        """Rewards of steps add up, and belong to the reply before; the latest statement about success stands."""
        if step.reward is not None:
            self.reward = (self.reward or 0.0) + step.reward
            if self.turns and self.turns[-1].author == "policy":
                self.turns[-1] = replace(self.turns[-1], reward=step.reward)
        if step.success is not None:
            self.success = step.success
        self.metrics.update(step.metrics)

    def without_verdict(self, stop: StopReason, error: str = "", fault: Fault = "") -> Trajectory:
        """What there is of a sample that was cut short; rewards of its steps are no verdict."""
        return replace(self.trajectory(stop, error), reward=None, fault=fault)

    def trajectory(self, stop: StopReason, error: str) -> Trajectory:
        return Trajectory(
            sample_id=self.lease.sample_id,
            group_id=self.lease.group_id,
            task=self.lease.task,
            turns=tuple(self.turns),
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask=np.asarray(self.loss_mask, dtype=np.bool_),
            logp=np.asarray(self.logp, dtype=np.float32),
            token_version=np.asarray(self.token_version, dtype=np.int32),
            sampling=self.lease.sampling,
            seed=self.lease.seed,
            reward=self.reward,
            stop_reason=stop,
            success=self.success,
            error=error,
            metrics=dict(self.metrics),
            attempt=self.lease.attempt,
        )


async def run_episode(lease: Lease, stage: Stage, unwanted: asyncio.Future[None]) -> Trajectory:
    """Run one sample to its end. Whatever fails on the way is recorded in the trajectory and never raised.

    Once `unwanted` is done, the sample comes back as aborted from wherever it stands, with the tokens that it has. The life of a
    sample that got no verdict stays open: what becomes of it is decided elsewhere.
    """
    draft = _Draft(lease, stage.rank)
    play = asyncio.create_task(_play(stage, draft))
    ends: set[asyncio.Future[Any]] = {play, unwanted}
    await asyncio.wait(ends, timeout=lease.deadline_s, return_when=asyncio.FIRST_COMPLETED)
    if play.done():
        trajectory = _outcome(play, draft)
    else:
        aborted, waited_for = unwanted.done(), draft.waits_for
        play.cancel()
        await asyncio.wait({play}, timeout=GRACE_S)  # the engine still tells what it has sampled
        trajectory = draft.without_verdict("aborted") if aborted else draft.without_verdict("deadline", _overdue(lease), waited_for)
    not_closed = await _close(draft.env)
    errors = [text for text in (trajectory.error, not_closed) if text]
    return replace(trajectory, error="\n".join(errors), life=draft.life)


async def _play(stage: Stage, draft: _Draft) -> Trajectory:
    """The conversation, then the verdict on it."""
    agent = stage.setting(draft.lease.task).agent
    if agent is not None:
        return await _play_agent(agent, stage, draft)
    error = ""
    stop: StopReason
    try:
        stop = await _converse(stage, draft)
    except PolicyFault as fault:
        stop, error = "policy_fault", fault.reason
        draft.reward = (draft.reward or 0.0) + fault.reward
    return draft.without_verdict(stop) if stop == "aborted" else await _score(draft.trajectory(stop, error), stage, draft)


async def _play_agent(agent: Callable[[Lease, Engine], Awaitable[AgentResult]], stage: Stage, draft: _Draft) -> Trajectory:
    """An agent asks the policy what it likes; then its episode is judged like any other."""
    result = await agent(draft.lease, stage.engines[draft.lease.engine])
    draft.life, draft.now = result.trajectory.life, time.time()
    if result.trajectory.stop_reason in CUT_SHORT:
        return result.trajectory
    scored = await _score(result.trajectory, stage, draft)
    return replace(scored, branches=result.judged(scored).branches)


async def _converse(stage: Stage, draft: _Draft) -> StopReason:
    """Prompt, reply, observation, reply, … until the environment is done or a budget is spent."""
    limits, renderer = stage.limits, stage.renderer
    draft.stamp("environment", place=stage.rank)
    env, step = await _ask_env(_start(stage, draft), limits, draft)
    ids, text = renderer.first(step.prompt, step.messages, step.tools)
    draft.observe(ids, text)
    state = _state_name(step, text)
    if len(ids) >= limits.max_tokens:
        raise RolloutError(
            f"the prompt has {len(ids)} tokens, and an episode may have {limits.max_tokens} (`rollout.max_tokens`, `engine.context_tokens`)"
        )
    for turn in range(limits.max_turns):
        reply, finish = await _generate(stage, draft, turn, state, step.max_new_tokens)
        if finish == "aborted":
            return "aborted"
        step = await _ask_env(env.step(reply), limits, draft)
        draft.take(step)
        if step.done:
            return "length" if finish == "length" else "stop" if limits.max_turns == 1 else "done"
        if turn + 1 < limits.max_turns:
            ids, text = renderer.next(step.prompt, step.messages, draft.token_ids[-1])
            if len(draft.token_ids) + len(ids) >= limits.max_tokens:
                return "length"  # no room for a reply to it
            draft.observe(ids, text)
            state = _state_name(step, text)
    return "turns"


def _state_name(step: Step, shown: str) -> str:
    """A short name: what it is made of may be long, and every trajectory carries one for each turn."""
    name = shown if step.state is None else step.state
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()


async def _start(stage: Stage, draft: _Draft) -> tuple[Env, Step]:
    env = draft.env = stage.setting(draft.lease.task).make_env()
    return env, await env.start(draft.lease.task)


async def _ask_env(call: Awaitable[T], limits: Limits, draft: _Draft) -> T:
    """The environment's answer, in time."""
    with draft.waiting_for("environment"):
        deadline = asyncio.timeout(limits.env_deadline_s)
        try:
            async with deadline:
                answer = await call
        except Exception as error:
            if deadline.expired():
                raise _Late(f"{_env_name(draft)} took longer than {limits.env_deadline_s:g} s for one answer") from error
            raise
    episode = asyncio.current_task()
    if episode is not None and episode.cancelling():  # the environment caught what was meant for the episode
        raise asyncio.CancelledError
    return answer


async def _generate(stage: Stage, draft: _Draft, turn: int, state: str, budget: int | None) -> tuple[str, FinishReason | None]:
    """One reply: its text, and why it ended. Its tokens are in the draft, also if it was cut short."""
    lease = draft.lease
    room = stage.limits.max_tokens - len(draft.token_ids)
    if budget is not None:
        room = min(room, budget)
    request = GenRequest(
        id=f"{lease.sample_id}/{lease.attempt}/{turn}",
        token_ids=list(draft.token_ids),
        sampling=replace(lease.sampling, max_new_tokens=min(lease.sampling.max_new_tokens, room)),
        seed=_turn_seed(lease.seed, turn),
        deadline_s=lease.deadline_s,
        session=f"{lease.sample_id}/{lease.attempt}" if stage.keeps_cache and stage.limits.max_turns > 1 else "",
    )
    draft.stamp("waiting", place=lease.engine)
    with draft.waiting_for("engine"):
        chunk = await stage.engines[lease.engine].generate(request, lease.stall_s)
        reply = stage.renderer.reply_text(chunk.token_ids, lease.sampling.stop, draft.token_ids)
        draft.reply(chunk, reply, state)
        if chunk.finish == "deadline":
            raise _Late(chunk.error or _overdue(lease))
        if chunk.finish in ("error", "lost"):
            raise RolloutError(f"no reply from the engine: {chunk.error}")
    return reply, chunk.finish


async def _score(trajectory: Trajectory, stage: Stage, draft: _Draft) -> Trajectory:
    """Add the reward functions' verdict to what the environment gave."""
    with draft.waiting_for("environment"):
        if trajectory.reward is not None and not abs(trajectory.reward) <= LARGEST:  # NaN is not either
            raise RewardError(f"the environment's rewards add up to {trajectory.reward}; a number between ±{LARGEST:g} was expected.")
    draft.stamp("reward", place=stage.rank)
    with draft.waiting_for("reward"):
        verdict = await stage.setting(trajectory.task).rewards.score(trajectory)
    given = [reward for reward in (trajectory.reward, verdict.reward) if reward is not None]
    parts = dict(verdict.parts)
    if trajectory.reward is not None:
        parts["environment"] = trajectory.reward
    return replace(
        trajectory,
        reward=sum(given) if given else None,
        reward_parts=parts,
        reward_stats=_stats(verdict),
        success=trajectory.success if verdict.success is None else verdict.success,
    )


def _stats(verdict: Verdict) -> dict[str, float]:
    """How long each reward took, and how often those failed that answered in the end."""
    return {
        **{f"{name}_s": seconds for name, seconds in verdict.seconds.items()},
        **{f"{name}_failures": float(times) for name, times in verdict.failures.items()},
    }


def _outcome(play: asyncio.Task[Trajectory], draft: _Draft) -> Trajectory:
    """How an episode that came to its own end ended. This is the boundary: environments, rewards and engines may raise anything."""
    try:
        trajectory = play.result()
    except _Late as late:
        return draft.without_verdict("deadline", str(late), draft.waits_for)
    except (Exception, asyncio.CancelledError) as failure:
        fault: Fault = "worker" if isinstance(failure, WorkerError) else draft.waits_for
        return draft.without_verdict("failed", _reason(failure, draft), fault)
    if trajectory.stop_reason not in CUT_SHORT:
        draft.stamp("done")
    return trajectory


async def _close(env: Env | None) -> str:
    """Close the environment; what goes wrong, if anything. A sample must come back even if its environment does not."""
    if env is None:
        return ""
    closing = asyncio.create_task(env.close())
    await asyncio.wait({closing}, timeout=CLOSE_S)
    if not closing.done():
        closing.cancel()
        return f"closing env {type(env).__name__} took longer than {CLOSE_S:g} s"
    try:
        closing.result()
    except (Exception, asyncio.CancelledError) as failure:
        return f"closing env {type(env).__name__} failed: {type(failure).__name__}: {failure}"
    return ""


def _reason(failure: BaseException, draft: _Draft) -> str:
    """What failed and where; drumroll's own errors say enough without a traceback."""
    place = f"(task {draft.lease.task.id}, turn {len(draft.turns)}, {_env_name(draft)})"
    reason = f"{type(failure).__name__}: {failure} {place}"
    if isinstance(failure, DrumrollError):
        return reason
    return reason + "\n" + "".join(traceback.format_tb(failure.__traceback__)[-3:])


def _env_name(draft: _Draft) -> str:
    return "building the environment" if draft.env is None else f"env {type(draft.env).__name__}"


def _overdue(lease: Lease) -> str:
    return f"the episode took longer than {lease.deadline_s:g} s"


def _turn_seed(seed: int, turn: int) -> int:
    """Each turn draws its own noise; the first turn's seed is the sample's."""
    return seed if turn == 0 else (seed ^ (turn * 0x9E3779B97F4A7C15)) & 0x7FFFFFFFFFFFFFFF
