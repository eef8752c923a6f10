"""Trajectories → `Batch`, and parts of a batch: which trajectories go to which rank and into which pass.

Everything here is deterministic: the same trajectories give the same batch whatever order they arrived in, and the same
lengths give the same split.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from drumroll.types import Batch, Trajectory, Turns


def pack(trajectories: Sequence[Trajectory]) -> Batch:
    """All trajectories end to end, ordered by sample id; groups are numbered in that order and every weight is 0."""
    ordered = sorted(trajectories, key=lambda trajectory: trajectory.sample_id)
    groups: dict[str, int] = {}
    for trajectory in ordered:
        assert trajectory.reward is not None, f"{trajectory.sample_id} has no verdict ({trajectory.stop_reason}): it must not be packed"
        groups.setdefault(trajectory.group_id, len(groups))
    return _assemble(
        turns=_turns(ordered),
        sample_ids=[trajectory.sample_id for trajectory in ordered],
        token_ids=[trajectory.token_ids for trajectory in ordered],
        loss_mask=[trajectory.loss_mask for trajectory in ordered],
        behaviour_logp=_joined([trajectory.logp for trajectory in ordered], np.float32),
        token_version=_joined([trajectory.token_version for trajectory in ordered], np.int64),
        rewards=torch.tensor([trajectory.reward for trajectory in ordered], dtype=torch.float32),
        group_index=torch.tensor([groups[trajectory.group_id] for trajectory in ordered], dtype=torch.int64),
        temperature=torch.tensor([trajectory.sampling.temperature for trajectory in ordered], dtype=torch.float32),
        top_p=torch.tensor([trajectory.sampling.top_p for trajectory in ordered], dtype=torch.float32),
        top_k=torch.tensor([trajectory.sampling.top_k for trajectory in ordered], dtype=torch.int64),
    )


def pack_demonstrations(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], ids: Sequence[str] | None = None) -> Batch:
    """(prompt ids, completion ids) → a batch to imitate: the loss is on the completions, in the order given."""
    return pack_episodes([([*prompt, *done], [False] * len(prompt) + [True] * len(done)) for prompt, done in pairs], ids)


def pack_episodes(episodes: Sequence[tuple[Sequence[int], Sequence[bool]]], ids: Sequence[str] | None = None) -> Batch:
    """(token ids, loss mask) → a batch to imitate, in the order given.

    Every episode is a group of its own, with the model's own distribution as its sampling settings.
    """
    size = len(episodes)
    num_tokens = sum(len(tokens) for tokens, _ in episodes)
    return _assemble(
        sample_ids=ids if ids is not None else [f"demonstration/{number}" for number in range(size)],
        token_ids=[np.asarray(tokens, dtype=np.int32) for tokens, _ in episodes],
        loss_mask=[np.asarray(mask, dtype=np.bool_) for _, mask in episodes],
        behaviour_logp=torch.zeros(num_tokens),
        token_version=torch.full((num_tokens,), -1),
        rewards=torch.zeros(size),
        group_index=torch.arange(size),
        temperature=torch.ones(size),
        top_p=torch.ones(size),
        top_k=torch.zeros(size, dtype=torch.int64),
    )


def select(batch: Batch, indices: Sequence[int]) -> Batch:
    """The trajectories at these indices, in this order; also none."""
    if list(indices) == list(range(batch.num_trajectories)):
        return batch
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=batch.offsets.device)
    tokens = token_indices(batch, indices)
    places = {**dict.fromkeys(_PER_TOKEN, tokens), **dict.fromkeys(_PER_TRAJECTORY, chosen)}
    offsets = pad(batch.offsets.diff()[chosen].cumsum(0), (1, 0))
    return batch.with_fields(
        sample_ids=tuple(batch.sample_ids[index] for index in indices),
        offsets=offsets,
        turns=None if batch.turns is None else _select_turns(batch.turns, chosen, batch.offsets, offsets),
        **{name: None if (value := getattr(batch, name)) is None else value[place] for name, place in places.items()},
    )


def _select_turns(turns: Turns, chosen: Tensor, offsets: Tensor, new_offsets: Tensor) -> Turns:
    """The turns of the chosen trajectories, whose tokens have moved from `offsets` to `new_offsets`."""
    chosen = chosen.to(turns.trajectory.device)
    new_place = turns.trajectory.new_full((len(offsets) - 1,), -1)
    new_place[chosen] = torch.arange(len(chosen))
    of_turn = new_place[turns.trajectory]
    order = of_turn.argsort(stable=True)
    order = order[of_turn[order] >= 0]
    moved = new_offsets.cpu()[of_turn[order]] - offsets.cpu()[turns.trajectory[order]]
    return Turns(turns.starts[order] + moved, turns.ends[order] + moved, of_turn[order], turns.rewards[order], turns.state[order])


def token_indices(batch: Batch, indices: Sequence[int]) -> Tensor:
    """Where the tokens of `select(batch, indices)` lie in the batch, [t]."""
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=batch.offsets.device)
    lengths = batch.offsets.diff()[chosen]
    starts = lengths.cumsum(0) - lengths
    # Token i of the selection lies at (start in the batch) + (i - start in the selection).
    shift = (batch.offsets[chosen] - starts).repeat_interleave(lengths)
    return shift + torch.arange(len(shift), device=shift.device)


def split_balanced(lengths: Sequence[int], parts: int, units: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of `lengths` in `parts` shards with about equally many tokens each; a shard may be empty.

    Trajectories with the same number in `units` (see `Batch.units`) stay together."""
    if units is not None:
        members = _members(units)
        return _of_units(split_balanced([sum(lengths[index] for index in unit) for unit in members], parts), members)
    shards: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]
    for index in _longest_first(lengths):
        tokens, part = heapq.heappop(lightest)
        shards[part].append(index)
        heapq.heappush(lightest, (tokens + lengths[index], part))
    return [sorted(shard) for shard in shards]


def micro_batches(lengths: Sequence[int], max_tokens: int, units: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of `lengths` in few passes of at most `max_tokens` each; a longer trajectory gets a pass of its own.

    Trajectories with the same number in `units` (see `Batch.units`) stay together."""
    if units is not None:
        members = _members(units)
        return _of_units(micro_batches([sum(lengths[index] for index in unit) for unit in members], max_tokens), members)
    passes: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that still fit, pass), only where the shortest trajectory still fits
    shortest = min(lengths, default=0)
    for index in _longest_first(lengths):
        slot = next((slot for slot, (free, _) in enumerate(room) if free >= lengths[index]), None)
        if slot is None:
            room.append((max_tokens, len(passes)))
            passes.append([])
            slot = len(room) - 1
        free, number = room[slot]
        passes[number].append(index)
        room[slot] = (free - lengths[index], number)
        if room[slot][0] < shortest:
            del room[slot]
    return [sorted(indices) for indices in passes]


_PER_TOKEN = (
    "token_ids",
    "position_ids",
    "loss_mask",
    "weight",
    "behaviour_logp",
    "token_version",
    "advantages",
    "old_logp",
    "ref_logp",
    "values",
    "returns",
    "token_rewards",
    "kl_coef",
    "entropy",
    "teacher_logp",
    "teacher_top_ids",
    "teacher_top_logp",
    "top_logp",
)
_PER_TRAJECTORY = ("rewards", "group_index", "temperature", "top_p", "top_k", "baseline", "teacher_temperature")


def _turns(trajectories: Sequence[Trajectory]) -> Turns:
    """The policy's turns of all trajectories. What is left of a reward after its turns' rewards belongs to the last one."""
    spans: list[tuple[int, int, int]] = []
    rewards: list[float] = []
    states: dict[tuple[str, str], int] = {}
    numbers: list[int] = []
    offset = 0
    for number, trajectory in enumerate(trajectories):
        played = [turn for turn in trajectory.turns if turn.author == "policy"]
        for turn in played:
            spans.append((offset + turn.start, offset + turn.end, number))
            rewards.append(turn.reward)
            numbers.append(states.setdefault((trajectory.group_id, turn.state), len(states)))
        if played:
            rewards[-1] += (trajectory.reward or 0.0) - sum(turn.reward for turn in played)
        offset += len(trajectory.token_ids)
    starts, ends, owners = np.array(spans, np.int64).reshape(-1, 3).T
    return Turns(
        starts=torch.from_numpy(starts.copy()),
        ends=torch.from_numpy(ends.copy()),
        trajectory=torch.from_numpy(owners.copy()),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        state=torch.tensor(numbers, dtype=torch.int64),
    )


def _assemble(
    sample_ids: Sequence[str],
    token_ids: Sequence[np.ndarray],
    loss_mask: Sequence[np.ndarray],
    turns: Turns | None = None,
    **fields: Any,
) -> Batch:
    lengths = [len(ids) for ids in token_ids]
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)], dtype=torch.int64)
    position_ids = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(offsets.diff())
    mask = _joined(loss_mask, np.bool_)
    return Batch(
        sample_ids=tuple(sample_ids),
        token_ids=_joined(token_ids, np.int64),
        position_ids=position_ids,
        offsets=offsets,
        loss_mask=mask & (position_ids > 0),  # nothing predicts a trajectory's first token
        weight=torch.zeros(len(mask)),
        turns=turns,
        **fields,
    )


def _joined(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype))


def _members(units: Sequence[int]) -> list[list[int]]:
    """Indices of each unit, in the order of their first ones."""
    members: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        members.setdefault(unit, []).append(index)
    return list(members.values())


def _of_units(parts: Sequence[Sequence[int]], members: Sequence[Sequence[int]]) -> list[list[int]]:
    """The indices in the units of each part."""
    return [sorted(index for unit in part for index in members[unit]) for part in parts]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
