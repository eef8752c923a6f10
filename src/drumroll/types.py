"""The nouns that every part of drumroll shares: task → trajectory (of turns) → group → batch.

Shapes are written once, here. Legend: L tokens of one trajectory, T tokens of a batch, N trajectories of a batch.
A value "of token t" stands at index t, so `logp[t]` is the log-probability of token t given all tokens before it.
This module imports neither torch nor ray; `Batch` holds tensors that others made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat message, for example `{"role": "user", "content": "2+2?"}`."""

StopReason = Literal["stop", "length", "done", "turns", "policy_fault", "aborted", "deadline", "failed"]
"""Why a trajectory ended.

stop: the policy ended its last reply by a stop token or string and the environment was done; length: the token budget was
spent; done: the environment ended the episode; turns: the turn budget was spent; policy_fault: the policy's action broke the
environment; aborted: no longer wanted; deadline and failed: infrastructure, never trained on."""


Fault = Literal["", "engine", "environment", "reward", "worker"]
"""Who failed where `stop_reason` is `failed` or `deadline`; worker: one that computes rewards or runs episodes, and not what it was asked
to do; empty: nobody, or not known."""

MISHAPS: tuple[Fault, ...] = ("engine", "worker")
"""Faults that say nothing about the task: the sample is tried again elsewhere."""


class Version(NamedTuple):
    """Published weights. Resume and rollback raise the incarnation, so that older leftovers are recognised."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class Parcel:
    """Base of dataclasses that cross processes by the thousand: pickled as one call with their values, in the order of their
    fields, at a third of what the general way costs."""

    __slots__ = ()
    __match_args__: tuple[str, ...]

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        kind = type(self)
        return kind, _values_of(kind)(self)


_getters: dict[type[Parcel], Callable[[Any], tuple[Any, ...]]] = {}


def _values_of(kind: type[Parcel]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads all fields of a parcel in one call."""
    getter = _getters.get(kind)
    if getter is None:
        names = kind.__match_args__
        getter = _getters[kind] = attrgetter(*names) if len(names) > 1 else lambda parcel: (getattr(parcel, names[0]),)
    return getter


@dataclass(frozen=True, slots=True)
class Task(Parcel):
    """One problem: a dataset row or an environment seed.

    Example: `Task(id="train-17", prompt="sort 3142=", data={"answer": "1234"})`.
    """

    id: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    domain: str = "default"
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange(Parcel):
    """What was shown, as text or as chat messages, and the reply to it: one turn of a demonstration.

    Example: `Exchange("2+2=", None, "4")`.
    """

    prompt: str | None
    messages: tuple[Message, ...] | None
    reply: str
    is_imitated: bool = True
    """Whether the loss is on the reply."""


@dataclass(frozen=True, slots=True)
class Sampling(Parcel):
    """How tokens are drawn. The defaults sample from the model's own distribution."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end tokens."""


@dataclass(frozen=True, slots=True)
class Turn(Parcel):
    """A stretch of a trajectory's tokens, `token_ids[start:end]`, by one author."""

    author: Literal["environment", "policy"]
    start: int
    end: int
    text: str
    reward: float = 0.0
    """Of a policy's turn: what the environment gave for it."""
    state: str = ""
    """Of a policy's turn: name of the state that it was played in; equal states of a group have equal names."""


@dataclass(frozen=True, slots=True)
class Trajectory(Parcel):
    """One attempt at a task, exactly as it was sampled.

    Example: prompt tokens [5, 6, 7], reply tokens [8, 2]: `token_ids` = [5, 6, 7, 8, 2], `loss_mask` = [0, 0, 0, 1, 1].
    """

    sample_id: str
    """`<phase>/<step>/<task id>/<sample>`: unique in a run."""
    group_id: str
    task: Task
    turns: tuple[Turn, ...]
    token_ids: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L] True where the policy sampled the token."""
    logp: NDArray[np.float32]
    """[L] Log-probability each token was really sampled at; 0 where `loss_mask` is False."""
    token_version: NDArray[np.int32]
    """[L] `Version.step` of the weights that sampled each token; -1 where `loss_mask` is False."""
    sampling: Sampling
    seed: int
    reward: float | None
    """Weighted sum of the reward parts; None when there is no verdict."""
    stop_reason: StopReason
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_stats: Mapping[str, float] = field(default_factory=dict)
    """What its rewards cost: seconds as `<reward>_s`, and failures before an answer, where there were any, as `<reward>_failures`."""
    success: bool | None = None
    """The environment's or the rewards' own statement; never inferred from the episode having ended."""
    error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    life: bytes = b""
    """When it passed through which state in its worker (see `life`)."""
    attempt: int = 0
    """Leases of the sample before this one."""
    fault: Fault = ""
    branches: tuple[Trajectory, ...] = ()
    """Of an agent that rewrote its history or ran several conversations: the others, with the same verdict. Each sampled token is in
    the loss mask of one of them."""

    @property
    def last_reply(self) -> str:
        """Text of the policy's last turn, without end tokens and stop strings."""
        return next((turn.text for turn in reversed(self.turns) if turn.author == "policy"), "")

    @property
    def text(self) -> str:
        """All turns joined."""
        return "".join(turn.text for turn in self.turns)

    @property
    def num_new_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def trainable(self) -> bool:
        """Whether it has a verdict and tokens of the policy: nothing else enters training."""
        return self.reward is not None and self.stop_reason not in ("aborted", "deadline", "failed") and bool(self.loss_mask.any())


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task that an advantage is computed over, as metadata; their tokens travel by reference."""

    group_id: str
    samples: tuple[SampleInfo, ...]
    witnesses: tuple[float, ...] = ()
    """Rewards of members that an earlier step has trained on: these samples are compared with them too."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A task that fails by itself, whoever attempts it."""

    task_id: str
    domain: str
    attempts: int
    """Of one of its samples."""
    reason: str
    """Of the last failure."""


@dataclass(slots=True)
class SampleInfo(Parcel):
    """What the controller knows of a sample: a few hundred bytes, never its tokens. Not frozen, because that makes building one,
    which happens for every sample on its way through the controller, several times as slow; nobody changes it."""

    sample_id: str
    group_id: str
    task_id: str
    domain: str
    reward: float | None
    success: bool | None
    stop_reason: StopReason
    num_prompt_tokens: int
    num_new_tokens: int
    oldest_version: int
    """Of its tokens; -1 where it has none."""
    newest_version: int
    reward_parts: Mapping[str, float]
    metrics: Mapping[str, float]
    error: str = ""
    life: bytes = b""
    attempt: int = 0
    fault: Fault = ""
    reward_stats: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, trajectory: Trajectory) -> SampleInfo:
        versions = trajectory.token_version[trajectory.loss_mask]
        num_new_tokens = trajectory.num_new_tokens
        return cls(
            sample_id=trajectory.sample_id,
            group_id=trajectory.group_id,
            task_id=trajectory.task.id,
            domain=trajectory.task.domain,
            reward=trajectory.reward,
            success=trajectory.success,
            stop_reason=trajectory.stop_reason,
            num_prompt_tokens=len(trajectory.token_ids) - num_new_tokens,
            num_new_tokens=num_new_tokens,
            oldest_version=int(versions.min()) if len(versions) else -1,
            newest_version=int(versions.max()) if len(versions) else -1,
            reward_parts=trajectory.reward_parts,
            metrics=trajectory.metrics,
            error=trajectory.error,
            life=trajectory.life,
            attempt=trajectory.attempt,
            fault=trajectory.fault,
            reward_stats=trajectory.reward_stats,
        )


@dataclass(frozen=True, slots=True)
class Turns:
    """The M turns of the policy in a batch, in the order of their tokens.

    Example: two trajectories, the first of two turns: `trajectory` = [0, 0, 1].
    """

    starts: Tensor
    """[M] int64: turn m owns the batch's tokens starts[m]:ends[m]."""
    ends: Tensor
    """[M] int64"""
    trajectory: Tensor
    """[M] int64: number of its trajectory."""
    rewards: Tensor
    """[M] float32: what it was given. A trajectory's last turn has what reward functions gave, too: their sum is the trajectory's."""
    state: Tensor
    """[M] int64: turns with the same number were played in equal states of the same group."""


@dataclass(frozen=True, slots=True)
class Batch:
    """N trajectories packed end to end into T tokens; nothing is padded.

    Example: two trajectories of 3 and 2 tokens: `offsets` = [0, 3, 5], `position_ids` = [0, 1, 2, 0, 1].
    """

    sample_ids: tuple[str, ...]
    token_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, from 0 in every trajectory."""
    offsets: Tensor
    """[N+1] int64: trajectory n owns tokens offsets[n]:offsets[n+1]."""
    loss_mask: Tensor
    """[T] bool: tokens that the loss may touch. The first token of a trajectory never is."""
    weight: Tensor
    """[T] float32: what each token's loss counts for in the update. 0 outside `loss_mask`. Because it is fixed before
    the batch is split, the gradient does not depend on how it is split."""
    behaviour_logp: Tensor
    """[T] float32: log-probability each token was sampled at."""
    token_version: Tensor
    """[T] int64"""
    rewards: Tensor
    """[N] float32"""
    group_index: Tensor
    """[N] int64: trajectories with the same number belong to one group."""
    temperature: Tensor
    """[N] float32: the sampling settings, so that the trainer's log-probabilities are of the sampled distribution."""
    top_p: Tensor
    """[N] float32"""
    top_k: Tensor
    """[N] int64"""
    advantages: Tensor | None = None
    """[T] float32"""
    old_logp: Tensor | None = None
    """[T] float32: the trainer's log-probabilities before the step's first update."""
    ref_logp: Tensor | None = None
    """[T] float32: the reference model's log-probabilities."""
    values: Tensor | None = None
    """[T] float32: the critic's value of the state before each token."""
    returns: Tensor | None = None
    """[T] float32: what the critic is trained towards."""
    token_rewards: Tensor | None = None
    """[T] float32: rewards that single tokens have of their own, such as a KL penalty, 0 outside `loss_mask`. Rewards of trajectories
    and turns come on top."""
    kl_coef: Tensor | None = None
    """[T] float32: what each token's KL term counts for in the loss, where that changes from step to step."""
    entropy: Tensor | None = None
    """[T] float32, with gradient: of the distribution that each token was drawn from. Filled in by the trainer where the loss needs it."""
    teacher_logp: Tensor | None = None
    """[T] float32: the teacher's log-probabilities."""
    teacher_top_ids: Tensor | None = None
    """[T, K] int32: the K tokens that the teacher finds likeliest in each token's place, the likeliest first."""
    teacher_top_logp: Tensor | None = None
    """[T, K] float32: the teacher's log-probabilities of those, normalised over the whole vocabulary."""
    teacher_temperature: Tensor | None = None
    """[N] float32: what the logits of teacher and student are divided by where they are compared; `temperature` where it is None."""
    top_logp: Tensor | None = None
    """[T, K] float32, with gradient: the trained model's log-probabilities of `teacher_top_ids`. Filled in by the trainer where the loss
    needs it."""
    turns: Turns | None = None
    """The policy's turns; None for demonstrations. Stays on the host."""
    baseline: Tensor | None = None
    """[N] float32, of preferences: what is subtracted from a trajectory's score before it is compared."""
    keeps_groups: bool = False
    """Whether the trajectories of a group are always computed in the same pass, for a loss that compares them."""

    @property
    def num_trajectories(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each trajectory."""
        bounds = self.offsets.tolist()
        return [end - start for start, end in pairwise(bounds)]

    @property
    def units(self) -> list[int] | None:
        """For each trajectory the number of its unit, where units of several must not be split; None where each is one by itself."""
        return self.group_index.tolist() if self.keeps_groups else None

    def with_fields(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Self:
        moved = {f.name: value.to(device) for f in fields(self) if hasattr(value := getattr(self, f.name), "to")}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class TopLogp:
    """What a model says of every token of a batch, and of the K likeliest in its place. Where nothing was asked, outside the loss mask,
    everything is 0.

    Example: with a vocabulary of 3, K of 2, and a token 1 of probability 0.3: `logp` = [-1.2], `ids` = [[2, 1]],
    `top_logp` = [[-0.5, -1.2]].
    """

    logp: Tensor
    """[T] float32"""
    ids: Tensor
    """[T, K] int32, the likeliest first."""
    top_logp: Tensor
    """[T, K] float32"""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What a loss says of a batch: a loss for every token, and named values of every token to report."""

    loss: Tensor
    """[T]; the trainer sums it with `batch.weight`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, without gradient; reported as means over the loss mask."""
    weighted: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, without gradient; reported as sums with `batch.weight`, as the loss is: means over whatever has the weights."""


@dataclass(frozen=True, slots=True)
class GenRequest(Parcel):
    """One reply to generate: after `token_ids` (prompt) and `sampled` (tokens of this reply that exist already)."""

    id: str
    token_ids: Sequence[int]
    sampling: Sampling
    seed: int
    sampled: Sequence[int] = ()
    """Already sampled prefix of the reply; noise continues at index len(sampled), and the budget counts them."""
    deadline_s: float | None = None
    """Seconds from submission after which the engine gives up with finish reason `deadline`."""
    session: str = ""
    """Requests of one session follow each other, each beginning with the tokens of the one before: an engine may keep keys and values
    for the next. Without a name nothing follows."""


FinishReason = Literal["stop", "length", "aborted", "deadline", "error", "lost"]
"""Why a reply ended. lost: its engine is out of reach; another one can go on from the tokens that arrived."""


@dataclass(frozen=True, slots=True)
class Chunk(Parcel):
    """Tokens of one request since the last poll. The last chunk of a request has a finish reason, and comes exactly once."""

    id: str
    token_ids: list[int]
    logp: list[float]
    token_version: list[int]
    finish: FinishReason | None = None
    error: str = ""
    slot: int = -1
    """Of the last chunk: the slot that the request ran in; -1 when it never got one."""
    started: float = 0.0
    """Of the last chunk: when it took its slot, in seconds since the epoch."""
    ended: float = 0.0
    """Of the last chunk: when it left its slot, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine reports of itself."""

    num_running: int
    num_waiting: int
    num_slots: int
    version: Version
    paused: bool = False
    num_tokens_total: int = 0
    """Tokens generated since the start."""
    busy_s_total: float = 0.0
    """Seconds spent computing since the start."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A worker's place in its role."""

    role: str
    rank: int
    world: int
    device: str
    """`cpu` or `cuda:0`."""
    node: str = ""
    rendezvous: str = ""
    """`host:port` where the role's ranks meet; empty when there is one rank."""
    num_devices: int = 1
    """How many it computes on, `device` being the first."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate over a phase of training."""

    lr: float
    """The peak."""
    total_updates: int
    """Where a decay ends."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    min_lr_ratio: float = 0.0


def sample_seed(root_seed: int, *parts: str | int) -> int:
    """A 63-bit seed that depends on every part and on nothing else: the same on every machine and in every process."""
    return sample_seeds(root_seed, parts[:-1], parts[-1:])[0]


def sample_seeds(root_seed: int, parts: Sequence[str | int], last_parts: Iterable[str | int]) -> list[int]:
    """`sample_seed(root_seed, *parts, last)` for each of the last parts, at a fraction of the cost."""
    common = hashlib.blake2b("\x1f".join([str(root_seed), *map(str, parts)]).encode(), digest_size=8)
    seeds = []
    for last in last_parts:
        each = common.copy()
        each.update(f"\x1f{last}".encode())
        seeds.append(int.from_bytes(each.digest(), "little") >> 1)
    return seeds
