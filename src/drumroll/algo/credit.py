"""Which turn of an episode deserves the credit: advantages that differ from turn to turn, registered as `advantage`.

Shape suffixes: N trajectories, M turns, T tokens of the batch. Trajectory-level credit, one value for all turns, is what the
estimators of `advantage` give. Rewards of an environment belong to the turn that they were given for, those of reward functions to the
last turn.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import PositiveFloat
from torch import Tensor

from drumroll.algo.advantage import grpo, standardised
from drumroll.algo.segments import turn_rewards
from drumroll.config.models import Fraction, NonNegativeFloat
from drumroll.registry import register
from drumroll.types import Batch, Turns


@register.advantage("step_level")
def step_level(batch: Batch, *, discount: Fraction = 1.0, scale_by_std: bool = True, eps: PositiveFloat = 1e-6) -> Tensor:
    """One advantage per turn, [T]: its discounted return, compared with those of all turns of the group.

    Options:
        discount: Weight of the next turn's return in a turn's own.
        scale_by_std: Divide by the standard deviation of the group's turns; false: only subtract their mean.
        eps: Added to the standard deviation, so that tiny ones do not blow the advantage up.
    """
    turns = _turns(batch)
    return_M, group_M = returns(turns, discount), batch.group_index[turns.trajectory]
    return over_tokens(standardised(return_M, group_M, scale_by_std=scale_by_std, eps=eps), turns, batch)


@register.advantage("gigpo", needs=("groups",))
def gigpo(
    batch: Batch,
    *,
    discount: Fraction = 0.95,
    step_weight: NonNegativeFloat = 1.0,
    scale_by_std: bool = True,
    eps: PositiveFloat = 1e-6,
) -> Tensor:
    """GiGPO (arXiv 2505.10978), [T]: GRPO's advantage of the episode plus `step_weight` × that of the turn, whose discounted return is
    compared with those of the group's turns in the same state; a state that occurs once gives 0.

    Options:
        discount: Weight of the next turn's return in a turn's own.
        step_weight: Weight of the turn's advantage beside the episode's.
        scale_by_std: Divide both by the standard deviation of what they are compared with; false: only subtract its mean.
        eps: Added to the standard deviation, so that tiny ones do not blow the advantage up.
    """
    turns = _turns(batch)
    episode_N = grpo(batch, scale_by_std=scale_by_std, eps=eps)
    step_M = standardised(returns(turns, discount), turns.state, scale_by_std=scale_by_std, eps=eps)
    return over_tokens(episode_N[turns.trajectory] + step_weight * step_M, turns, batch)


def returns(turns: Turns, discount: float) -> Tensor:
    """[M]: a turn's reward plus `discount` × the return of the trajectory's next turn."""
    rewards, owners = turns.rewards.tolist(), turns.trajectory.tolist()
    values = list(rewards)
    for turn in range(len(values) - 2, -1, -1):
        if owners[turn] == owners[turn + 1]:
            values[turn] += discount * values[turn + 1]
    return torch.tensor(values, dtype=turns.rewards.dtype, device=turns.rewards.device)


def over_tokens(value_M: Tensor, turns: Turns, batch: Batch) -> Tensor:
    """[T]: every token has its turn's value; 0 where it belongs to no turn."""
    turn_T = torch.zeros(batch.num_tokens, dtype=torch.int64, device=value_M.device)
    lengths_M = turns.ends - turns.starts
    first_M = lengths_M.cumsum(0) - lengths_M
    within = torch.arange(int(lengths_M.sum()), device=value_M.device) - first_M.repeat_interleave(lengths_M)
    places = turns.starts.repeat_interleave(lengths_M) + within
    turn_T[places] = torch.arange(1, len(value_M) + 1, device=value_M.device).repeat_interleave(lengths_M)
    return torch.cat([value_M.new_zeros(1), value_M])[turn_T]


def _turns(batch: Batch) -> Turns:
    """The batch's turns, each with what its single tokens earned."""
    assert batch.turns is not None, "credit for turns is given before the batch is divided"
    return replace(batch.turns, rewards=turn_rewards(batch, batch.turns))
