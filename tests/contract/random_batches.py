"""Random steps of RL for the suites over every registered algorithm: several turns, observations, greedy members, groups of all sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from drumroll.text.packing import pack
from drumroll.types import Batch, Sampling, Task, Trajectory, Turn

Play = tuple[int, list[int], float, bool]
"""Group; tokens of each turn; reward; whether it is greedy."""

plays = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
        st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=9,
)

LOGPS = ("behaviour_logp", "old_logp", "ref_logp")


def trajectories(played: list[Play]) -> list[Trajectory]:
    made = []
    for number, (group, turns, reward, greedy) in enumerate(played):
        parts: list[Turn] = []
        mask: list[bool] = []
        for turn, tokens in enumerate(turns):
            parts.append(Turn("environment", len(mask), len(mask) + 2, "?"))
            mask += [False, False]
            parts.append(Turn("policy", len(mask), len(mask) + tokens, "x", reward / 4 if turn else 0.0, str(turn % 2)))
            mask += [True] * tokens
        made.append(
            Trajectory(
                sample_id=f"s{number:03d}",
                group_id=f"g{group}",
                task=Task("t"),
                turns=tuple(parts),
                token_ids=np.ones(len(mask), np.int32),
                loss_mask=np.array(mask),
                logp=np.zeros(len(mask), np.float32),
                token_version=np.zeros(len(mask), np.int32),
                sampling=Sampling(temperature=0.0 if greedy else 1.0),
                seed=0,
                reward=reward,
                stop_reason="done",
            )
        )
    return made


def make(played: list[Play], seed: int, order: list[int] | None = None, reach: float = 1.0) -> Batch:
    """The batch of these plays, packed in this order. What is of a token depends on the play and on nothing else; log-probabilities are
    between -`reach` and 0."""
    order = list(range(len(played))) if order is None else order
    made = trajectories(played)
    batch = pack([replace(made[number], sample_id=f"s{place:03d}") for place, number in enumerate(order)])
    values: dict[str, list[torch.Tensor]] = {name: [] for name in (*LOGPS, "values", "entropy", "logp")}
    for number in order:
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        size = len(made[number].token_ids)
        for name, parts in values.items():
            drawn = torch.rand(size, generator=generator)
            parts.append(-reach * drawn if "logp" in name else drawn)
    fields = {name: torch.cat(parts) for name, parts in values.items()}
    return batch.with_fields(advantages=fields.pop("logp"), **fields)  # whoever needs `logp` takes it from there


def take_logp(batch: Batch) -> tuple[torch.Tensor, Batch]:
    """The log-probabilities that `make` left in place of advantages, as what a model would give, and the batch without them."""
    assert batch.advantages is not None
    return batch.advantages.clone().requires_grad_(), batch.with_fields(advantages=None)
