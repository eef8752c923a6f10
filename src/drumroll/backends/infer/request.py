"""One request inside the engine: its tokens, where it stands, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from drumroll.types import Chunk, FinishReason, GenRequest, Sampling


@dataclass(slots=True, eq=False)
class Request:
    """A request that the engine accepted. Its last token is never in the cache: the next decode step computes it."""

    id: str
    tokens: list[int]
    """Prompt and reply so far."""
    num_prompt_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: Collection[int]
    context: int
    decode_text: Callable[[list[int]], str] | None
    """Present when there are stop strings."""
    deadline: float | None
    """On the monotonic clock."""
    session: str
    """Whose next request may go on from here; nobody's if empty."""
    slot: int = -1
    """Where its keys and values are; they may be moved."""
    lane: int = -1
    """One of as many as there are slots, which it has to itself from the beginning to the end."""
    started: float = 0.0
    """When it took its slot, in seconds since the epoch."""
    num_cached: int = 0
    """Tokens whose keys and values are in the slot, counted while it is filled."""
    fresh: Chunk = field(init=False)
    """What the next poll takes away."""

    def __post_init__(self) -> None:
        self.fresh = Chunk(self.id, [], [], [])

    @classmethod
    def of(
        cls, request: GenRequest, end_ids: frozenset[int], context: int, decode_text: Callable[[list[int]], str] | None, now: float
    ) -> Request:
        return cls(
            id=request.id,
            tokens=[int(token) for token in (*request.token_ids, *request.sampled)],
            num_prompt_tokens=len(request.token_ids),
            sampling=request.sampling,
            seed=request.seed,
            stop_ids=end_ids.union(request.sampling.stop_token_ids),
            context=context,
            decode_text=decode_text,
            deadline=None if request.deadline_s is None else now + request.deadline_s,
            session=request.session,
        )

    @property
    def num_sampled(self) -> int:
        """Tokens of the reply, the ones that came with the request included: the next token's index."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens that the reply may still have."""
        return min(self.sampling.max_new_tokens - self.num_sampled, self.context - len(self.tokens))

    @property
    def num_to_fill(self) -> int:
        """Tokens that a prefill must still compute."""
        return len(self.tokens) - 1 - self.num_cached

    def extend(self, ids: Sequence[int], logp: Sequence[float], version: int) -> FinishReason | None:
        """Take these tokens, up to the one that ends the reply, and say whether and how it ended; a log-probability that is no number
        ends it with an error."""
        fresh = self.fresh
        for token, value in zip(ids, logp, strict=True):
            if value != value:
                return "error"
            self.tokens.append(token)
            fresh.token_ids.append(token)
            fresh.logp.append(value)
            fresh.token_version.append(version)
            outcome = self.outcome()
            if outcome is not None:
                return outcome
        return None

    def take_fresh(self, finish: FinishReason | None = None, error: str = "") -> Chunk:
        """The tokens since the last call; with a finish reason, also which lane the request leaves now."""
        fresh, self.fresh = self.fresh, Chunk(self.id, [], [], [])
        if finish is None:
            return fresh
        ended = max(self.started, time.time()) if self.lane >= 0 else 0.0
        return Chunk(fresh.id, fresh.token_ids, fresh.logp, fresh.token_version, finish, error, self.lane, self.started, ended)

    def begins_with(self, tokens: list[int]) -> bool:
        """Whether these come first, and at least one after them."""
        return len(tokens) < len(self.tokens) and self.tokens[: len(tokens)] == tokens

    def take_slot(self, slot: int, num_cached: int = 0) -> None:
        """A slot that holds keys and values of its first tokens already, or of none."""
        self.slot = slot
        self.num_cached = num_cached

    def lose_slot(self) -> None:
        self.slot = self.lane = -1
        self.num_cached = 0

    def outcome(self) -> FinishReason | None:
        """Whether the reply so far is complete."""
        num_sampled = self.num_sampled
        if num_sampled and (self.tokens[-1] in self.stop_ids or self._ends_in_stop_string()):
            return "stop"
        if num_sampled >= self.sampling.max_new_tokens or len(self.tokens) >= self.context:
            return "length"
        return None

    def _ends_in_stop_string(self) -> bool:
        """Decodes only the tail: a character is at most four tokens (its bytes), and an earlier match would have ended the reply."""
        if self.decode_text is None:
            return False
        longest = max(map(len, self.sampling.stop))
        text = self.decode_text(self.tokens[max(self.num_prompt_tokens, len(self.tokens) - 4 * longest - 8) :])
        return any(stop in text for stop in self.sampling.stop)
