"""What an agent did with the policy in one episode: every call with its tokens, and how calls become trajectories.

Calls form a tree. A call whose prompt begins with all tokens of an earlier call, its prompt and its reply, continues that call;
any other begins a branch of its own: an agent that rewrites its history, runs sub-agents, or tries again.

    prompt a ─ reply a ─┬─ tool result ─ reply b ─ question ─ reply c      the main branch: all three replies are trained on
                        └─ tool result ─ reply d                           branch 1: reply d; reply a is its context
    prompt e ─ reply e                                                     branch 2

What was sampled is never tokenised again. When the messages of a call begin with those of an earlier call and the reply to it,
the earlier tokens stay, and only what the chat template puts behind that reply is added. Messages that continue nothing are
rendered anew.

Nothing here waits, and nothing here talks to anybody: see `endpoint`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from drumroll.agents.protocol import ChatRequest, Refusal, Reply, RewardPost
from drumroll.life import stamp
from drumroll.text.chat import continuation_ids, messages_to_ids
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, Fault, Message, Sampling, StopReason, Task, Trajectory, Turn, sample_seed


class Order(Protocol):
    """Which sample a session is for, and how the policy is sampled: a lease."""

    @property
    def sample_id(self) -> str: ...
    @property
    def group_id(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def seed(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def engine(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def stall_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Budgets of one session."""

    context_tokens: int
    """Prompt and reply of one call."""
    session_tokens: int
    """All calls together. A call that continues an earlier one counts with what is new in it."""
    max_calls: int
    max_parallel: int = 8
    """Calls at a time; others wait for their turn."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a session gives no verdict."""

    stop: Literal["failed", "deadline", "aborted"]
    reason: str
    fault: Fault = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call shows to the policy."""

    ids: list[int]
    parent: Call | None
    """The call that it continues."""
    shown: str
    """Text of what is new behind the parent."""
    digest: str
    """Of the tokens."""
    talk: bytes
    """Of the messages and tools."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of an agent: what the engine was given and what it sampled."""

    number: int
    """In the order of their beginnings."""
    name: str
    """Sixteen hexadecimal digits, the same whenever the sample is tried again: they depend on what was asked and not on when."""
    parent: Call | None
    added_ids: list[int]
    """Tokens of the prompt behind those of the parent."""
    shown: str
    sampling: Sampling
    trains: bool
    """Whether it was sampled from the distribution that the order names; the trainer knows one for a trajectory."""
    seed: int
    prompt_digest: str
    talk: bytes
    asked: float
    """When, in seconds since the epoch."""
    chunk: Chunk | None = None
    """What the engine gave; None while it is at work."""
    text: str = ""
    reward: float = 0.0
    """What the agent posted after it, and before the next reply."""
    tokens_digest: str = ""
    """Of prompt and reply."""

    @property
    def answered(self) -> bool:
        """Whether the agent got a reply."""
        return self.chunk is not None and self.chunk.finish in ("stop", "length")

    @property
    def dropped(self) -> bool:
        return self.chunk is not None and self.chunk.finish == "aborted"

    @property
    def reply_ids(self) -> list[int]:
        return self.chunk.token_ids if self.chunk is not None else []

    @property
    def path(self) -> list[Call]:
        """From the first call of its branch to this one."""
        path, call = [self], self.parent
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine was given."""
        before = self.parent.token_ids if self.parent is not None else []
        return before + self.added_ids

    @property
    def token_ids(self) -> list[int]:
        """Prompt and reply."""
        return [token for call in self.path for token in (*call.added_ids, *call.reply_ids)]

    @property
    def num_tokens(self) -> int:
        return sum(len(call.added_ids) + len(call.reply_ids) for call in self.path)


@dataclass(frozen=True, slots=True)
class SessionResult:
    """What a session leaves behind."""

    trajectory: Trajectory
    """The main branch, the one with the most sampled tokens, under the sample's own id."""
    branches: tuple[Trajectory, ...] = ()
    """The others, as `<sample>/b1`, `<sample>/b2`, …, of the same group and with the same verdict. A reply that an earlier branch
    has is context here: every sampled token is trained on exactly once."""

    def judged(self, trajectory: Trajectory) -> SessionResult:
        """With the verdict of `trajectory`, which is the main branch after its rewards."""
        return SessionResult(trajectory, tuple(_with_verdict(branch, trajectory) for branch in self.branches))


@dataclass
class Session:
    """One episode of an agent, as the policy's side sees it.

    Example: `prompt = session.compose(request, tokenizer)`, `call = session.begin(prompt, request)`; the engine samples; then
    `session.finish(call, chunk, reply, text)`.
    """

    order: Order
    limits: SessionLimits
    is_judged: bool = False
    """Whether reward functions follow: a session without a posted reward is then no failure."""
    obeys_sampling: bool = False
    """Whether an agent's own temperature and top_p count. Calls that they change are not trained on."""
    rank: int = -1
    """Of the environment worker."""
    calls: list[Call] = field(default_factory=list)
    failure: Failure | None = None
    """Of the infrastructure: it never trains."""
    ended: bool = False
    reward: float | None = None
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests that got an error, by its code."""
    last_refusal: str = ""
    opened: float = field(default_factory=time.time)
    _by_talk: dict[bytes, Call] = field(default_factory=dict)
    """Messages with the reply to them → the call."""
    _spent: int = 0
    """Of `session_tokens`, counting what calls under way may still take."""
    _last_answered: Call | None = None

    def compose(self, request: ChatRequest, tokenizer: Tokenizer) -> Prompt:
        """The tokens of a call. It changes nothing, so that it may run in a thread."""
        talks = _talks(request)
        known = next(((size, call) for size in range(len(talks) - 1, 0, -1) if (call := self._by_talk.get(talks[size]))), None)
        if known is None:
            ids = messages_to_ids(tokenizer, request.messages, tools=request.tools)
        else:
            size, call = known
            last_token = call.reply_ids[-1] if call.reply_ids else None
            ids = call.token_ids + continuation_ids(tokenizer, request.messages[size:], last_token)
        parent, digest = _longest_beginning(ids, [call for call in tuple(self.calls) if call.answered])
        start = parent.num_tokens if parent is not None else 0
        return Prompt(ids, parent, tokenizer.decode(ids[start:], after=ids[:start]), digest, talks[-1])

    def begin(self, prompt: Prompt, request: ChatRequest) -> Call:
        """A call begins, with its share of the budgets; a `Refusal` when there is none left."""
        self.check_open()
        limits, added = self.limits, prompt.ids[prompt.parent.num_tokens if prompt.parent is not None else 0 :]
        if len(self.calls) >= limits.max_calls:
            raise Refusal(400, "session_budget_exceeded", f"the session has made all of its {limits.max_calls} calls.")
        room = limits.context_tokens - len(prompt.ids)
        if room < 1:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"the messages have {len(prompt.ids)} tokens, and the model's context has room for {limits.context_tokens} with the reply.",
                "messages",
            )
        left = limits.session_tokens - self._spent - len(added)
        if left < 1:
            raise Refusal(
                400,
                "session_budget_exceeded",
                f"the session has spent {self._spent} of its {limits.session_tokens} tokens, and these messages add {len(added)}.",
            )
        own = self.order.sampling
        wished = own
        if self.obeys_sampling:
            wished = replace(
                own,
                temperature=own.temperature if request.temperature is None else request.temperature,
                top_p=own.top_p if request.top_p is None else request.top_p,
            )
        budget = min(own.max_new_tokens, room, left, request.max_new_tokens or room)
        earlier = sum(call.prompt_digest == prompt.digest and not call.dropped for call in self.calls)
        seed = sample_seed(self.order.seed, "call", prompt.digest, earlier)
        call = Call(
            number=len(self.calls),
            name=f"{seed:016x}",
            parent=prompt.parent,
            added_ids=added,
            shown=prompt.shown,
            sampling=replace(wished, max_new_tokens=budget, stop=tuple(dict.fromkeys((*own.stop, *request.stop)))),
            trains=wished == own,
            seed=seed,
            prompt_digest=prompt.digest,
            talk=prompt.talk,
            asked=time.time(),
        )
        self._spent += len(added) + budget
        self.calls.append(call)
        return call

    def finish(self, call: Call, chunk: Chunk, reply: Reply, text: str) -> None:
        """The engine has ended a call; `text` is all that the policy said, and `reply` what the agent gets of it."""
        call.chunk, call.text = chunk, text
        self._spent -= call.sampling.max_new_tokens - len(chunk.token_ids)
        if not call.answered:
            return
        call.tokens_digest = _digest(call.token_ids).hexdigest()
        self._last_answered = call
        self._by_talk[_talk(call.talk, reply.message)] = call
        if reply.calls:  # many agents leave out the text beside tool calls when they send them back
            self._by_talk[_talk(call.talk, {**reply.message, "content": ""})] = call

    def fail(self, failure: Failure) -> None:
        """The infrastructure failed; the first failure is the one that is told."""
        self.failure = self.failure or failure

    def post(self, posted: RewardPost) -> None:
        """Rewards add up, and belong to the reply before; the latest statement about success stands."""
        self.check_open()
        self.reward = (self.reward or 0.0) + posted.reward
        if self._last_answered is not None:
            self._last_answered.reward += posted.reward
        if posted.success is not None:
            self.success = posted.success
        self.metrics.update(posted.metrics)
        self.ended = posted.done

    def note_refusal(self, refusal: Refusal) -> None:
        self.refusals[refusal.code] += 1
        self.last_refusal = refusal.message

    def result(self, failure: Failure | None = None) -> SessionResult:
        """All branches as trajectories; `failure` is what its owner has to say, unless the infrastructure failed before."""
        failure = self.failure or failure or self._lack()
        owned: set[Call] = set()
        trajectories: list[Trajectory] = []
        for leaf in self._leaves():
            sample_id = f"{self.order.sample_id}/b{len(trajectories)}" if trajectories else self.order.sample_id
            trajectory = self._trajectory(leaf.path, owned, sample_id, failure)
            if trajectory.loss_mask.any() or not trajectories:
                trajectories.append(trajectory)
                owned.update(leaf.path)
        if not trajectories:
            trajectories.append(self._trajectory([], owned, self.order.sample_id, failure))
        main, *branches = trajectories
        life = self._life(self._leaves()[:1])
        return SessionResult(replace(main, life=life, metrics=self._metrics(len(trajectories))), tuple(branches))

    def check_open(self) -> None:
        """A `Refusal` where the session takes nothing any more."""
        if self.failure is not None:
            raise Refusal(503, "session_failed", f"the session has failed: {self.failure.reason}")
        if self.ended:
            raise Refusal(401, "session_ended", "the session of this key has ended.")

    def _leaves(self) -> list[Call]:
        """The last call of every branch, the main branch's first. Their order depends on what was said and not on when."""
        continued = {call.parent for call in self.calls if call.answered}
        leaves = [call for call in self.calls if call.answered and call not in continued]
        return sorted(leaves, key=lambda leaf: (-sum(len(call.reply_ids) for call in leaf.path if call.trains), leaf.token_ids))

    def _lack(self) -> Failure | None:
        """What a session that its owner has no complaint about still lacks."""
        refused = f" Requests refused: {self.refusals.total()}; the last one because: {self.last_refusal}" if self.refusals else ""
        if not any(call.answered for call in self.calls):
            return Failure("failed", f"the agent got no reply from the policy.{refused}", "environment")
        if self.reward is None and not self.is_judged:
            return Failure("failed", f"the agent ended without posting a reward, and no reward is configured.{refused}", "environment")
        if not any(call.answered and call.trains and call.reply_ids for call in self.calls):
            return Failure("failed", "no reply was sampled with the settings in `rollout.sampling`, so there is nothing to train on.")
        return None

    def _trajectory(self, path: Sequence[Call], owned: set[Call], sample_id: str, failure: Failure | None) -> Trajectory:
        ids: list[int] = []
        mask: list[bool] = []
        logp: list[float] = []
        version: list[int] = []
        turns: list[Turn] = []
        for call in path:
            assert call.chunk is not None, f"{sample_id}: a call without a reply cannot be part of a branch"
            if call.added_ids:
                turns.append(Turn("environment", len(ids), len(ids) + len(call.added_ids), call.shown))
            ids += call.added_ids
            mask += [False] * len(call.added_ids)
            logp += [0.0] * len(call.added_ids)
            version += [-1] * len(call.added_ids)
            size, trains = len(call.reply_ids), call.trains and call not in owned
            if size and call not in owned:
                turns.append(Turn("policy", len(ids), len(ids) + size, call.text, call.reward, _state_name(call.shown)))
            elif size:
                turns.append(Turn("environment", len(ids), len(ids) + size, call.text))
            ids += call.reply_ids
            mask += [trains] * size
            logp += call.chunk.logp if trains else [0.0] * size
            version += call.chunk.token_version if trains else [-1] * size
        return Trajectory(
            sample_id=sample_id,
            group_id=self.order.group_id,
            task=self.order.task,
            turns=tuple(turns),
            token_ids=np.asarray(ids, dtype=np.int32),
            loss_mask=np.asarray(mask, dtype=np.bool_),
            logp=np.asarray(logp, dtype=np.float32),
            token_version=np.asarray(version, dtype=np.int32),
            sampling=self.order.sampling,
            seed=self.order.seed,
            reward=self.reward if failure is None else None,
            stop_reason=self._stop_reason(path) if failure is None else failure.stop,
            success=self.success,
            error=failure.reason if failure is not None else "",
            attempt=self.order.attempt,
            fault=failure.fault if failure is not None else "",
        )

    def _stop_reason(self, path: Sequence[Call]) -> StopReason:
        """A budget that cut the last reply or refused the next one is told; otherwise the agent came to its own end."""
        chunk = path[-1].chunk
        if self.refusals["session_budget_exceeded"]:
            return "turns" if len(self.calls) >= self.limits.max_calls else "length"
        return "length" if chunk is not None and chunk.finish == "length" else "done"

    def _metrics(self, num_branches: int) -> dict[str, float]:
        own = {
            "agent_calls": sum(call.answered for call in self.calls),
            "agent_branches": num_branches,
            "agent_refusals": self.refusals.total(),
            "agent_dropped_calls": sum(call.dropped for call in self.calls),
        }
        return {**self.metrics, **{name: float(value) for name, value in own.items()}}

    def _life(self, leaves: Iterable[Call]) -> bytes:
        """The states that the main branch passed through, up to where the agent ended (see `life`)."""
        life, now = stamp("environment", self.opened, place=self.rank), self.opened
        for call in (call for leaf in leaves for call in leaf.path):
            assert call.chunk is not None
            now = max(now, call.asked)
            life += stamp("waiting", now, place=self.order.engine)
            if call.chunk.slot >= 0:
                first_version = call.chunk.token_version[0] if call.chunk.token_version else -1
                now = max(now, call.chunk.started)
                life += stamp("generating", now, first_version, self.order.engine, call.chunk.slot)
                now = max(now, call.chunk.ended)
            life += stamp("environment", now, place=self.rank)
        return life


def _with_verdict(branch: Trajectory, main: Trajectory) -> Trajectory:
    return replace(
        branch,
        reward=main.reward,
        reward_parts=main.reward_parts,
        success=main.success,
        stop_reason=main.stop_reason,
        error=main.error,
        fault=main.fault,
    )


def _talks(request: ChatRequest) -> list[bytes]:
    """Digests of the tools with the first 0, 1, … messages of a request."""
    talks = [hashlib.blake2b(_canonical(list(request.tools)), digest_size=16).digest()]
    for message in request.messages:
        talks.append(_talk(talks[-1], message))
    return talks


def _talk(before: bytes, message: Message) -> bytes:
    """Digest of a conversation with one more message. White space around what an assistant said makes no difference."""
    if message["role"] == "assistant":
        message = {**message, "content": message["content"].strip()}
    return hashlib.blake2b(before + _canonical(message), digest_size=16).digest()


def _canonical(value: list[Any] | Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(ids: Sequence[int]) -> hashlib.blake2b:
    return hashlib.blake2b(np.asarray(ids, dtype=np.int32).tobytes(), digest_size=16)


def _longest_beginning(ids: Sequence[int], calls: Iterable[Call]) -> tuple[Call | None, str]:
    """The call whose tokens are the longest beginning of `ids`, and the digest of `ids`. One pass over them, however many calls."""
    by_tokens: dict[tuple[int, str], Call] = {}
    for call in calls:
        by_tokens.setdefault((call.num_tokens, call.tokens_digest), call)
    data = np.asarray(ids, dtype=np.int32)
    digest, done, longest = hashlib.blake2b(digest_size=16), 0, None
    for size in sorted({size for size, _ in by_tokens}):
        if size > len(ids):
            break
        digest.update(data[done:size].tobytes())
        done = size
        longest = by_tokens.get((size, digest.hexdigest()), longest)
    digest.update(data[done:].tobytes())
    return longest, digest.hexdigest()


def _state_name(shown: str) -> str:
    """Equal states of a group, which are those that show the same, have equal names."""
    return hashlib.blake2b(shown.encode(errors="surrogatepass"), digest_size=8).hexdigest()
