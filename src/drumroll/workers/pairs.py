"""The assembler of preference learning: rows of preferences as updates, beside trainer rank 0.

begin ──► updates ──► shards to score ──► (ref_logp; KTO: log-probabilities of mismatched replies) ──finish──► shards to train on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumroll.algo.preference import preference_weights
from drumroll.algo.segments import trajectory_sum
from drumroll.backends.classifier import subject_ids
from drumroll.backends.infer.chat import Defuser
from drumroll.config.models import PreferenceConfig, SourceConfig
from drumroll.data.pairs import load_judgements, load_pairs
from drumroll.errors import DataError
from drumroll.registry import REGISTRY
from drumroll.rewards.markers import defuse
from drumroll.text.episode import episode_ids
from drumroll.text.packing import pack_episodes, select, split_balanced, token_indices
from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Batch, Exchange, RankInfo
from drumroll.workers.demonstrations import Episode, Order


@dataclass(frozen=True, slots=True)
class Unit:
    """What is compared in one piece: the two replies of a pair, chosen first, or a single reply."""

    exchanges: tuple[Exchange, ...]
    episodes: tuple[Episode, ...]
    rewards: tuple[float, ...]
    margin: float = 0.0


class PairAssembler:
    """Encodes every row once. Update u is a function of the seed and u alone."""

    def __init__(
        self, rank: RankInfo, *, num_shards: int, seed: int, model_folder: str, preference: dict[str, Any], trust_remote_code: bool = False
    ) -> None:
        """`num_shards` is how many trainer ranks get different rows; `preference` is the section of the config."""
        torch.set_num_threads(1)
        self._config = REGISTRY.lookup("preference_loss", preference["kind"]).schema(PreferenceConfig).model_validate(preference)
        self._num_shards = num_shards
        self._encode = encoder(self._config, Path(model_folder), trust_remote_code=trust_remote_code)
        self._units = self._load(self._config.data)
        self._heldout = self._load(self._config.heldout) if self._config.heldout else []
        self._order = Order(len(self._units), self._config.batch_size, seed, "preferences")
        self._updates: list[Batch] = []
        self._mismatched: list[Batch] = []

    def begin(self, first: int, count: int) -> None:
        """Make `count` updates, which are then scored and finished."""
        self._prepare([[self._units[place] for place in self._order.places(number)] for number in range(first, first + count)])

    def begin_heldout(self) -> None:
        """The same of all held-out rows, in one batch."""
        self._prepare([self._heldout])

    def _prepare(self, updates: Sequence[Sequence[Unit]]) -> None:
        self._updates = [self._batch(units) for units in updates]
        self._mismatched = [self._mismatch(units) for units in updates] if "reference_point" in self._config.needs else []

    def shards(self, count: int, *, mismatched: bool = False) -> list[list[Batch]]:
        """For each of `count` ranks its share of every update, or of the update's mismatched replies, to be scored."""
        return _dealt(self._mismatched if mismatched else self._updates, count)

    def finish(
        self,
        ref_logp: Sequence[Sequence[Tensor]] | None,
        mismatched_logp: Sequence[Sequence[Tensor]] | None,
        mismatched_ref_logp: Sequence[Sequence[Tensor]] | None,
    ) -> list[list[Batch]]:
        """Each trainer rank's shard of every update, with what `shards` were scored at, by rank and update."""
        updates = self._updates
        if ref_logp is not None:
            updates = [update.with_fields(ref_logp=logp) for update, logp in zip(updates, _whole(updates, ref_logp), strict=True)]
        if mismatched_logp is not None:
            assert mismatched_ref_logp is not None, "the reference scores what the policy does"
            policy, reference = (_whole(self._mismatched, parts) for parts in (mismatched_logp, mismatched_ref_logp))
            points = [reference_point(*scored) for scored in zip(self._mismatched, policy, reference, strict=True)]
            updates = [u.with_fields(baseline=torch.full((u.num_trajectories,), point)) for u, point in zip(updates, points, strict=True)]
        return _dealt(updates, self._num_shards)

    def _batch(self, units: Sequence[Unit]) -> Batch:
        sizes = torch.tensor([len(unit.episodes) for unit in units])
        batch = pack_episodes([episode for unit in units for episode in unit.episodes]).with_fields(
            rewards=torch.tensor([reward for unit in units for reward in unit.rewards]),
            group_index=torch.arange(len(units)).repeat_interleave(sizes),
            keeps_groups="pairs" in self._config.needs,
        )
        if self._config.margin_field is not None:
            batch = batch.with_fields(baseline=torch.tensor([m for unit in units for m in (unit.margin, 0.0)]))
        return batch.with_fields(weight=preference_weights(batch))

    def _mismatch(self, units: Sequence[Unit]) -> Batch:
        """Every prompt with the reply to the next one."""
        exchanges = [unit.exchanges[0] for unit in units]
        replies = [exchange.reply for exchange in (*exchanges[1:], exchanges[0])]
        return pack_episodes([self._encode(replace(exchange, reply=reply)) for exchange, reply in zip(exchanges, replies, strict=True)])

    def _load(self, source: SourceConfig) -> list[Unit]:
        if "pairs" in self._config.needs:
            pairs = load_pairs(self._config, source)
            return [self._unit((pair.chosen, pair.rejected), (1.0, -1.0), pair.margin) for pair in pairs]
        return [self._unit((each.exchange,), (1.0 if each.is_wanted else -1.0,)) for each in load_judgements(self._config, source)]

    def _unit(self, exchanges: tuple[Exchange, ...], rewards: tuple[float, ...], margin: float = 0.0) -> Unit:
        return Unit(exchanges, tuple(map(self._encode, exchanges)), rewards, margin)


def encoder(cfg: PreferenceConfig, model_folder: Path, *, trust_remote_code: bool = False) -> Callable[[Exchange], Episode]:
    """How a prompt with its reply becomes tokens: for a policy as they are sampled; for a reward model as the reward `reward_model` shows
    them to it, with the loss on the token where the score is read."""
    tokenizer = Tokenizer(model_folder, trust_remote_code=trust_remote_code)
    if "scores" in cfg.needs:
        encode = _scored(tokenizer, _padding(model_folder, trust_remote_code))
    else:
        encode = partial(_sampled, Renderer(tokenizer), cfg.end_token)

    def checked(exchange: Exchange) -> Episode:
        ids, mask = encode(exchange)
        if not any(mask[1:]):
            raise DataError(f"the reply {exchange.reply!r} has no token that could be learnt from: nothing stands before it.")
        return ids, mask

    return checked


def _sampled(renderer: Renderer, end_token: bool, exchange: Exchange) -> Episode:
    return episode_ids(renderer, (exchange,), end_token=end_token)


def _scored(tokenizer: Tokenizer, padding: int | None) -> Callable[[Exchange], Episode]:
    """A classifier reads its score at the last token that is not padding, which in some models also ends every message."""
    control = Defuser(tokenizer)

    def encode(exchange: Exchange) -> Episode:
        ids = subject_ids(tokenizer, control, _subject(exchange))
        last = max((place for place, token in enumerate(ids) if token != padding), default=0)
        return ids, [place == last for place in range(len(ids))]

    return encode


def _padding(model_folder: Path, trust_remote_code: bool) -> int | None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=trust_remote_code)
    padding: int | None = config.get_text_config().pad_token_id
    return padding


def reference_point(batch: Batch, logp: Tensor, ref_logp: Tensor) -> float:
    """KTO's estimate of the KL to the reference: the mean log-ratio of replies to other prompts, and not below 0."""
    log_ratio = (logp - ref_logp).masked_fill(~batch.loss_mask, 0.0)
    return max(0.0, float(trajectory_sum(log_ratio, batch).double().mean()))


def _subject(exchange: Exchange) -> list[Any] | str:
    """What a reward model sees of it; as `rewards.reward_model.subject_of` an episode."""
    reply = defuse(exchange.reply)
    return (
        [*exchange.messages, {"role": "assistant", "content": reply}] if exchange.messages is not None else (exchange.prompt or "") + reply
    )


def _dealt(updates: Sequence[Batch], count: int) -> list[list[Batch]]:
    """For each of `count` ranks its shard of every update."""
    dealt = [[select(update, indices) for indices in _split(update, count)] for update in updates]
    return [[shards[rank] for shards in dealt] for rank in range(count)]


def _whole(updates: Sequence[Batch], parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Per-token values of the ranks' shards, back in the order of each update."""
    joined = [torch.zeros(update.num_tokens) for update in updates]
    for number, update in enumerate(updates):
        for rank, indices in enumerate(_split(update, len(parts))):
            joined[number][token_indices(update, indices)] = parts[rank][number]
    return joined


def _split(update: Batch, count: int) -> list[list[int]]:
    return split_balanced(update.lengths, count, update.units)
