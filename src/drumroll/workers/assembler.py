"""The assembler: turns blocks of trajectories into shards of the step for the trainer ranks, beside trainer rank 0.

blocks ──pack──► whole batch ──► shards to score ──► (ref_logp, old_logp, values, what a teacher says) ──finish──► shards to train on
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drumroll.algo.advantage import broadcast
from drumroll.algo.aggregate import token_weights
from drumroll.algo.algorithm import Carried, build_algorithm
from drumroll.algo.critic import critic_report, returns_of
from drumroll.algo.distill import distill, opinion
from drumroll.algo.kl import sampled_kl
from drumroll.algo.masks import counting
from drumroll.algo.scaling import replace_rewards
from drumroll.algo.segments import trajectory_sum
from drumroll.config.models import AlgoConfig
from drumroll.rollout.source import success_rate
from drumroll.text.packing import pack, select, split_balanced, token_indices
from drumroll.types import Batch, RankInfo, SampleInfo, TopLogp, Trajectory, sample_seed
from drumroll.workers.demonstrations import Demonstrations


class Assembler:
    """Holds one step's batch between packing and training, and deals demonstrations to supervised fine-tuning."""

    def __init__(
        self,
        rank: RankInfo,
        *,
        num_shards: int,
        seed: int,
        algo: dict[str, Any] | None = None,
        constant_length: int | None = None,
        demonstrations: dict[str, Any] | None = None,
        num_critic_shards: int = 0,
        critic_lam: float | None = None,
    ) -> None:
        """`num_shards` is how many trainer ranks get different trajectories, `num_critic_shards` how many of the critic's; `algo` is there
        for RL, `demonstrations` for supervised fine-tuning. `critic_lam` is the config's `critic.lam`."""
        torch.set_num_threads(1)
        self._num_shards = num_shards
        self._seed = seed
        self._config = AlgoConfig.model_validate(algo or {})
        self._algorithm = build_algorithm(self._config)
        self._constant_length = constant_length
        self._demonstrations = Demonstrations(**demonstrations, seed=seed) if demonstrations else None
        self._num_critic_shards = num_critic_shards
        self._returns = returns_of(self._config.advantage, critic_lam)
        self._batch: Batch | None = None
        self._witnesses: list[tuple[int, float]] = []
        """Group and reward of trajectories that are compared with the batch's and not in it."""
        self._owners: dict[str, str] = {}
        """Branch of an agent's episode → its main branch."""
        self._ages: dict[str, float] = {}

    def pack(
        self,
        accepted: Collection[tuple[str, int]],
        version: int,
        max_staleness: int,
        *blocks: Sequence[Trajectory],
        witnesses: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Begin a step of the trainers that are at `version`.

        Of the blocks only the accepted attempts, as (sample id, attempt), with a verdict enter; of their tokens only those that are at
        most `max_staleness` versions old. A trajectory that has none left stays out, and its group is compared without it. `witnesses`
        are rewards, by group, of members that were trained on before.
        """
        chosen = [t for t in _attempts(accepted, blocks) if t.trainable]
        young = [_without_older(t, version - max_staleness) for t in chosen]
        fresh = sorted((t for t in young if t.trainable), key=lambda t: t.sample_id)
        branches = [(t.sample_id, _without_older(branch, version - max_staleness)) for t in fresh for branch in t.branches]
        self._owners = {branch.sample_id: owner for owner, branch in branches if branch.trainable}
        self._batch = pack([*fresh, *(branch for _, branch in branches if branch.trainable)])
        numbers = dict(zip(self._batch.sample_ids, self._batch.group_index.tolist(), strict=True))
        groups = {t.group_id: numbers[t.sample_id] for t in fresh}
        self._witnesses = [(groups[name], reward) for name, rewards in (witnesses or {}).items() if name in groups for reward in rewards]
        num_tokens, num_young = (sum(t.num_new_tokens for t in part) for part in (chosen, young))
        masked = (num_tokens - num_young) / max(1, num_tokens)
        self._ages = {"batch/masked_token_ratio": masked, **_staleness(self._batch, version, max_staleness)}
        is_cut_off = {t.sample_id: t.stop_reason == "length" for t in (*fresh, *(branch for _, branch in branches))}
        counts = counting(
            self._batch,
            self._config.masks,
            version,
            is_cut_off_N=torch.tensor([is_cut_off[name] for name in self._batch.sample_ids], dtype=torch.bool),
            rate_G=torch.tensor(_success_rates(fresh, groups)) if self._config.masks.success_rate is not None else None,
            trains_on_greedy="greedy" not in self._algorithm.needs,
        )
        mask = self._batch.loss_mask
        self._ages["batch/uncounted_token_ratio"] = float((mask & ~counts).sum()) / max(1, int(mask.sum()))
        self._batch = self._batch.with_fields(loss_mask=mask & counts)

    def shards(self, count: int) -> list[Batch]:
        """The step's batch in parts of about the same number of tokens, to be scored."""
        batch = self._packed()
        return [select(batch, indices) for indices in split_balanced(batch.lengths, count)]

    def finish(
        self,
        step: int,
        ref_logp: Sequence[Tensor] | None,
        old_logp: Sequence[Tensor] | None,
        values: Sequence[Tensor] | None = None,
        carried: Carried | None = None,
        taught: Sequence[TopLogp] | None = None,
    ) -> tuple[Any, ...]:
        """Advantages over the whole batch, then each trainer rank's shard of every update, then those of the critic's ranks. First comes
        what to report. Part of that is what the algorithm carries on to the next step (names that begin with `algo/`); `carried` is
        what it carried here. `taught` is what a teacher says of the shards."""
        batch = self._packed()
        if ref_logp is not None:
            batch = batch.with_fields(ref_logp=self._whole(ref_logp))
        if old_logp is not None:
            batch = batch.with_fields(old_logp=self._whole(old_logp))
        if values is not None:
            batch = batch.with_fields(values=self._whole(values))
        if taught is not None:
            batch = _taught(batch, taught)
        batch, carried = self._algorithm.penalised(batch, carried or {})
        batch, witnesses, carried = self._scaled_rewards(batch, carried)
        if values is not None:
            batch = batch.with_fields(returns=self._returns(batch))
        advantages, carried = self._algorithm.scaled_advantages(self._advantages(batch, witnesses), batch, carried)
        if (added := self._config.distill) is not None:
            advantages = advantages + added.coef * broadcast(distill(batch, discount=added.discount), batch)
        batch = batch.with_fields(advantages=advantages)
        updates = self._updates(batch.with_fields(token_rewards=None), step)
        self._batch = None
        shards = self._dealt(updates, self._num_shards)
        return {**self._report(batch), **carried}, *shards, *self._dealt(map(_for_critic, updates), self._num_critic_shards)

    def _scaled_rewards(self, batch: Batch, carried: Carried) -> tuple[Batch, list[tuple[int, float]], Carried]:
        """The batch and the witnesses with rewards as `algo.reward_scaling` has them. An episode counts once, whatever its branches."""
        if self._config.reward_scaling is None:
            return batch, self._witnesses, carried
        mains = self._mains(batch)
        rewards, factors, carried = self._algorithm.scaled_rewards(_with_witnesses(select(batch, mains), self._witnesses), carried)
        place = {batch.sample_ids[number]: number_of_main for number_of_main, number in enumerate(mains)}
        mine = torch.tensor([place[self._owners.get(name, name)] for name in batch.sample_ids], dtype=torch.int64)
        witnesses = [(group, float(reward)) for (group, _), reward in zip(self._witnesses, rewards[len(mains) :], strict=True)]
        return replace_rewards(batch, rewards[mine], factors[mine]), witnesses, carried

    def _mains(self, batch: Batch) -> list[int]:
        """The trajectories that are episodes, and no branches of one."""
        return [number for number, sample_id in enumerate(batch.sample_ids) if sample_id not in self._owners]

    def _advantages(self, batch: Batch, witnesses: Sequence[tuple[int, float]]) -> Tensor:
        """[T]. A branch of an agent's episode has the mean of its main branch's: an episode is compared with others once. But what a
        teacher says of a token is the token's own."""
        if "`algo.advantage.kind`" in self._config.teacher_keys:
            return self._algorithm.advantage(batch)
        mains = self._mains(batch)
        own = self._algorithm.advantage(_with_witnesses(select(self._with_rewards_of_branches(batch), mains), witnesses))
        if not self._owners:
            return own
        whole = torch.zeros(batch.num_tokens)
        whole[token_indices(batch, mains)] = own
        place = {sample_id: number for number, sample_id in enumerate(batch.sample_ids)}
        bounds = batch.offsets.tolist()
        for branch, owner in self._owners.items():
            first, end = bounds[place[owner]], bounds[place[owner] + 1]
            of_owner = whole[first:end][batch.loss_mask[first:end]]
            tokens = slice(bounds[place[branch]], bounds[place[branch] + 1])
            whole[tokens] = of_owner.mean() * batch.loss_mask[tokens] if len(of_owner) else 0.0
        return whole

    def _with_rewards_of_branches(self, batch: Batch) -> Batch:
        """The batch with what a branch's tokens earned at the last token of its main branch: both are one episode."""
        if batch.token_rewards is None or not self._owners:
            return batch
        earned = trajectory_sum(batch.token_rewards, batch)
        rewards = batch.token_rewards.clone()
        place = {sample_id: number for number, sample_id in enumerate(batch.sample_ids)}
        for branch, owner in self._owners.items():
            rewards[batch.offsets[place[owner] + 1] - 1] += earned[place[branch]]
        return batch.with_fields(token_rewards=rewards)

    def imitation(self, first: int, count: int, taught: Sequence[Sequence[TopLogp]] | None = None) -> list[list[Batch]]:
        """Each rank's shard of `count` updates on demonstrations; `taught` is what the ranks of a teacher say of `imitation_to_teach`."""
        return self._dealt(_each_taught(self._shown(first, count), taught), self._num_shards)

    def imitation_to_teach(self, first: int, count: int, num_shards: int) -> list[list[Batch]]:
        """The same updates for that many ranks of a teacher."""
        return self._dealt(self._shown(first, count), num_shards)

    def heldout(self, taught: Sequence[Sequence[TopLogp]] | None = None) -> list[Batch]:
        """Each rank's shard of the held-out demonstrations; empty batches when there are none. `taught`: see `imitation`."""
        return [shard for (shard,) in self._dealt(_each_taught(self._heldout(), taught), self._num_shards)]

    def heldout_to_teach(self, num_shards: int) -> list[list[Batch]]:
        """The same for that many ranks of a teacher."""
        return self._dealt(self._heldout(), num_shards)

    def _shown(self, first: int, count: int) -> list[Batch]:
        assert self._demonstrations is not None, "the assembler was started without demonstrations"
        return [self._demonstrations.update(first + offset) for offset in range(count)]

    def _heldout(self) -> list[Batch]:
        assert self._demonstrations is not None, "the assembler was started without demonstrations"
        return [self._demonstrations.heldout()]

    def _dealt(self, updates: Iterable[Batch], num_shards: int) -> list[list[Batch]]:
        """For each of that many ranks its shard of every update."""
        dealt = [[select(update, indices) for indices in split_balanced(update.lengths, num_shards)] for update in updates if num_shards]
        return [[shards[rank] for shards in dealt] for rank in range(num_shards)]

    def _packed(self) -> Batch:
        assert self._batch is not None, "pack begins a step"
        return self._batch

    def _whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Per-token values of `shards`, back in the order of the whole batch."""
        return _joined(self._packed(), parts)

    def _updates(self, batch: Batch, step: int) -> list[Batch]:
        """The parts of the step, each weighted as one update."""
        updates: list[Batch] = []
        for epoch in range(self._config.epochs_per_step):
            generator = torch.Generator().manual_seed(sample_seed(self._seed, "updates", step, epoch))
            order = torch.randperm(batch.num_trajectories, generator=generator).tolist()
            if self._config.updates_per_step == 1:
                order.sort()
            for part in range(self._config.updates_per_step):
                update = select(batch, order[part :: self._config.updates_per_step])
                updates.append(_counted(update.with_fields(weight=self._algorithm.weights(update, self._constant_length))))
        return updates

    def _report(self, batch: Batch) -> dict[str, float]:
        """What the controller logs of the batch."""
        lengths = batch.loss_mask.sum()
        advantages = batch.advantages
        assert advantages is not None
        touched = int((advantages * batch.loss_mask != 0).sum()) if batch.teacher_top_ids is None else int(lengths)
        report = {
            "batch/num_trajectories": float(batch.num_trajectories),
            "batch/num_tokens": float(batch.num_tokens),
            "batch/num_new_tokens": float(lengths),
            "batch/informative_token_ratio": touched / max(1, int(lengths)),
            **self._ages,
        }
        if batch.ref_logp is not None and lengths:
            report["batch/ref_logp_mean"] = float(batch.ref_logp[batch.loss_mask].mean())
        if batch.teacher_logp is not None and lengths:
            report["batch/teacher_kl"] = -float(opinion(batch)[batch.loss_mask].mean())
        if self._config.kl is not None and lengths:
            report["batch/kl_mean"] = float(sampled_kl(batch, self._config.kl.estimator)[batch.loss_mask].mean())
        if batch.values is not None:
            report |= critic_report(batch)
        return report


def _attempts(accepted: Collection[tuple[str, int]], blocks: Sequence[Sequence[Trajectory]]) -> list[Trajectory]:
    """The accepted attempts, in the order of the blocks, which may hold others too."""
    wanted = set(accepted)
    found = [t for block in blocks for t in block if (t.sample_id, t.attempt) in wanted]
    times = Counter((t.sample_id, t.attempt) for t in found)
    missing = sorted(wanted - times.keys())
    assert not missing, f"accepted, but in no block: {_named(missing)}"
    doubled = sorted(pair for pair, count in times.items() if count > 1)
    assert not doubled, f"accepted, and in the blocks more than once: {_named(doubled)}"
    rivals = sorted(sample_id for sample_id, count in Counter(sample_id for sample_id, _ in wanted).items() if count > 1)
    assert not rivals, f"several attempts are accepted of: {', '.join(rivals[:5])}"
    return found


def _counted(update: Batch) -> Batch:
    """The update without trajectories of which no token counts: they would only cost a pass."""
    counts = trajectory_sum(update.loss_mask.double(), update) > 0
    return select(update, counts.nonzero().squeeze(1).tolist())


def _success_rates(trajectories: Sequence[Trajectory], groups: Mapping[str, int]) -> list[float]:
    """Of every group, by its number; NaN where nobody can tell."""
    members: dict[str, list[SampleInfo]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.group_id, []).append(SampleInfo.of(trajectory))
    rates = {groups[name]: success_rate(samples) for name, samples in members.items()}
    return [math.nan if (rate := rates[number]) is None else rate for number in range(len(rates))]


def _joined(batch: Batch, parts: Sequence[Tensor]) -> Tensor:
    """Per-token values of the shards of a batch, back in its order."""
    whole = parts[0].new_zeros(batch.num_tokens, *parts[0].shape[1:])
    for indices, part in zip(split_balanced(batch.lengths, len(parts)), parts, strict=True):
        whole[token_indices(batch, indices)] = part
    return whole


def _taught(batch: Batch, parts: Sequence[TopLogp]) -> Batch:
    """The batch with what a teacher says of its shards."""
    batch = batch.with_fields(teacher_logp=_joined(batch, [part.logp for part in parts]))
    if not parts[0].ids.shape[1]:
        return batch
    return batch.with_fields(
        teacher_top_ids=_joined(batch, [part.ids for part in parts]), teacher_top_logp=_joined(batch, [part.top_logp for part in parts])
    )


def _each_taught(updates: Sequence[Batch], taught: Sequence[Sequence[TopLogp]] | None) -> Sequence[Batch]:
    """The updates with what the ranks of a teacher say of each."""
    if taught is None:
        return updates
    return [_taught(update, parts) for update, parts in zip(updates, zip(*taught, strict=True), strict=True)]


def _for_critic(update: Batch) -> Batch:
    """An update as the critic gets it: every token counts the same, and what only a policy needs is left behind."""
    teachers = ("teacher_logp", "teacher_top_ids", "teacher_top_logp")
    policys = dict.fromkeys(("advantages", "old_logp", "ref_logp", *teachers))
    return update.with_fields(weight=token_weights(update, "token_mean"), **policys)


def _named(pairs: Sequence[tuple[str, int]]) -> str:
    names = [f"{sample_id} (attempt {attempt})" for sample_id, attempt in pairs[:5]]
    return ", ".join(names) + (f" and {len(pairs) - 5} more" if len(pairs) > 5 else "")


def _without_older(trajectory: Trajectory, oldest_version: int) -> Trajectory:
    """The trajectory with tokens of weights before `oldest_version` out of its loss mask."""
    older = trajectory.loss_mask & (trajectory.token_version < oldest_version)
    return replace(trajectory, loss_mask=trajectory.loss_mask & ~older) if older.any() else trajectory


def _staleness(batch: Batch, version: int, max_staleness: int) -> dict[str, float]:
    """How many versions older than the trainers' the tokens of the loss mask are; proves that none is too old."""
    staleness = version - batch.token_version[batch.loss_mask]
    if not len(staleness):
        return {"batch/staleness_mean": 0.0, "batch/staleness_max": 0.0}
    newest, oldest = int(staleness.min()), int(staleness.max())
    assert oldest <= max_staleness, f"a token of version {version - oldest} would be trained on at {version}: {max_staleness} is the limit"
    assert newest >= 0, f"a token of version {version - newest} cannot exist while the trainers are at {version}"
    return {"batch/staleness_mean": float(staleness.double().mean()), "batch/staleness_max": float(oldest)}


def _with_witnesses(batch: Batch, witnesses: Sequence[tuple[int, float]]) -> Batch:
    """The batch with a trajectory without tokens for each witness, at its end: the tokens stay where they are."""
    if not witnesses:
        return batch
    groups, rewards = zip(*witnesses, strict=True)
    end = batch.offsets[-1:].expand(len(witnesses))
    return batch.with_fields(
        sample_ids=(*batch.sample_ids, *(f"witness/{number}" for number in range(len(witnesses)))),
        offsets=torch.cat([batch.offsets, end]),
        rewards=torch.cat([batch.rewards, torch.tensor(rewards, dtype=batch.rewards.dtype)]),
        group_index=torch.cat([batch.group_index, torch.tensor(groups, dtype=batch.group_index.dtype)]),
        temperature=torch.cat([batch.temperature, batch.temperature.new_ones(len(witnesses))]),
        top_p=torch.cat([batch.top_p, batch.top_p.new_ones(len(witnesses))]),
        top_k=torch.cat([batch.top_k, batch.top_k.new_zeros(len(witnesses))]),
    )
