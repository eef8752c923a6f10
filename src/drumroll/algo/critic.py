"""What a critic gives and what it learns: generalised advantage estimation (arXiv 1506.02438), returns, the loss of values.

A *decision* is a token of the policy, or a whole turn of it. What the environment says in between is none: the next decision follows the
last one directly. With v the critic's value of the state before a decision (0 after a trajectory's last one) and r what follows it:

    δ_d = r_d + gamma v_d+1 - v_d        A_d = δ_d + gamma lam A_d+1        R_d = A_d + v_d

A turn's reward is given for its last token, what reward functions gave for the trajectory's last one, `token_rewards` where they stand.
Shape suffixes: N trajectories, D decisions, P tokens in the loss mask, T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from drumroll.algo.advantage import whitened
from drumroll.algo.credit import over_tokens
from drumroll.algo.segments import rewards_by_token, trajectory_of
from drumroll.config.models import AdvantageConfig, Fraction
from drumroll.registry import register
from drumroll.types import Batch, TokenLoss


@register.advantage("gae", needs=("values",))
def gae(
    batch: Batch, *, gamma: Fraction = 1.0, lam: Fraction = 0.95, by_turn: bool = False, whiten: bool = True, eps: float = 1e-6
) -> Tensor:
    """How much better each token, or each turn, was than the critic expected, [T].

    Options:
        gamma: Discount: weight of the next decision's value in a decision's own.
        lam: 0: after one decision only the critic's value counts; 1: only the rewards, to the end of the trajectory; between: a mixture.
        by_turn: A whole turn is one decision; false: every token is.
        whiten: Give the advantages of the batch mean 0 and standard deviation 1.
        eps: With `whiten`, added to the standard deviation, so that tiny ones do not blow the advantage up.
    """
    advantage_T = _estimate(batch, gamma, lam, by_turn)[0]
    return (whitened(advantage_T, batch, eps=eps) if whiten else advantage_T).float()


def lambda_returns(batch: Batch, *, gamma: float = 1.0, lam: float = 0.95, by_turn: bool = False) -> Tensor:
    """What a critic is trained towards, [T], 0 outside the loss mask: with `lam` 1 the rewards that really followed."""
    advantage_T, value_T = _estimate(batch, gamma, lam, by_turn)
    return (advantage_T + value_T).float()


def returns_of(advantage: AdvantageConfig, lam: float | None = None) -> Callable[[Batch], Tensor]:
    """`lambda_returns` with the advantage's own `gamma`, `lam` and `by_turn`, where it has such options; `lam` takes their place."""
    shared = {name: value for name in ("gamma", "lam", "by_turn") if (value := getattr(advantage, name, None)) is not None}
    return partial(lambda_returns, **shared | ({} if lam is None else {"lam": lam}))


def value_loss(value_T: Tensor, batch: Batch, *, clip: float | None = None) -> TokenLoss:
    """Half the squared distance to the returns, [T]. With `clip`, PPO's: no gain from moving further than that from `batch.values`."""
    assert batch.returns is not None, "returns are computed before a critic learns"
    outside_T = ~batch.loss_mask
    value_T, return_T = value_T.masked_fill(outside_T, 0.0), batch.returns.masked_fill(outside_T, 0.0)
    plain_T = 0.5 * (value_T - return_T) ** 2
    if clip is None:
        return TokenLoss(plain_T)
    old_T = _values(batch).masked_fill(outside_T, 0.0)
    clipped_T = 0.5 * (old_T + (value_T - old_T).clamp(-clip, clip) - return_T) ** 2
    return TokenLoss(torch.maximum(plain_T, clipped_T), {"clip_fraction": (clipped_T > plain_T).float()})


def critic_report(batch: Batch) -> dict[str, float]:
    """How the values of a batch stand to its returns, for the log.

    Explained variance is 1 - Var(R - v) / Var(R): 1 for a critic that knows, 0 for one that says the same of everything, and also where
    all returns are equal."""
    assert batch.returns is not None, "returns are computed before they are reported"
    value_P, return_P = _values(batch)[batch.loss_mask].double(), batch.returns[batch.loss_mask].double()
    if not len(return_P):
        return {}
    spread = float(return_P.var(correction=0))
    unexplained = float((return_P - value_P).var(correction=0))
    return {
        "critic/value_mean": float(value_P.mean()),
        "critic/return_mean": float(return_P.mean()),
        "critic/explained_variance": 1.0 - unexplained / spread if spread else 0.0,
    }


@dataclass(frozen=True)
class _Decisions:
    """The decisions of a batch, trajectory by trajectory in their order."""

    place: Tensor
    """[D] the token that each begins with."""
    owner: Tensor
    """[D] its trajectory."""
    step: Tensor
    """[D] its number within the trajectory."""
    number: Tensor
    """[P] the decision that each token of the loss mask belongs to."""


def _decide(batch: Batch, by_turn: bool) -> _Decisions:
    place_P = batch.loss_mask.nonzero().squeeze(1)
    owner_P = trajectory_of(batch)[place_P]
    is_first_P = torch.ones_like(place_P, dtype=torch.bool)
    if by_turn:
        assert batch.turns is not None, "turns are known before the batch is divided"
        turn_P = over_tokens(torch.arange(1, len(batch.turns.starts) + 1), batch.turns, batch)[place_P]
        is_first_P[1:] = (turn_P.diff() != 0) | (owner_P.diff() != 0)
    owner_D = owner_P[is_first_P]
    count_N = torch.bincount(owner_D, minlength=batch.num_trajectories)
    step_D = torch.arange(len(owner_D)) - (count_N.cumsum(0) - count_N)[owner_D]
    return _Decisions(place_P[is_first_P], owner_D, step_D, is_first_P.cumsum(0) - 1)


def _rewards(batch: Batch, decisions: _Decisions) -> Tensor:
    """[D] what follows each decision before the next one.

    A reward for a turn whose tokens are no longer in the loss mask follows the decision before that turn, if there is one."""
    begun_T = torch.searchsorted(decisions.place, torch.arange(batch.num_tokens), right=True)
    owner_T = torch.cat([torch.tensor([-1]), decisions.owner])[begun_T]
    number_T = begun_T.masked_fill(owner_T != trajectory_of(batch), 0)  # from 1; 0 before a trajectory's first decision
    return torch.zeros(len(decisions.place) + 1, dtype=torch.float64).index_add(0, number_T, rewards_by_token(batch).double())[1:]


def _estimate(batch: Batch, gamma: float, lam: float, by_turn: bool) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] values of the decisions that the tokens belong to, in float64, 0 outside the loss mask."""
    decisions = _decide(batch, by_turn)
    value_D = _values(batch)[decisions.place].double()
    num_steps = int(decisions.step.max()) + 1 if len(value_D) else 0
    cells = (decisions.step, decisions.owner)
    # Rows are steps, so that the recursion goes over all trajectories at once; what is beyond a trajectory's end is 0.
    reward, value = (torch.zeros(num_steps + 1, batch.num_trajectories, dtype=torch.float64) for _ in range(2))
    reward[cells], value[cells] = _rewards(batch, decisions), value_D
    advantage = torch.zeros_like(value)
    for step in range(num_steps - 1, -1, -1):
        surprise = reward[step] + gamma * value[step + 1] - value[step]
        advantage[step] = surprise + gamma * lam * advantage[step + 1]
    spread_T = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
    spread_T[:, batch.loss_mask] = torch.stack([advantage[cells], value_D])[:, decisions.number]
    return spread_T[0], spread_T[1]


def _values(batch: Batch) -> Tensor:
    assert batch.values is not None, "a critic fills in `values` before anybody asks for them"
    return batch.values
