"""Credit by turn against loops written from the formulas."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.algo.advantage import broadcast, grpo
from drumroll.algo.credit import gigpo, step_level
from drumroll.text.packing import pack, select
from drumroll.types import Sampling, Task, Trajectory, Turn

Play = tuple[int, list[tuple[int, float, int]], float]
"""Group; turns as (tokens, reward, state); what reward functions gave at the end."""

plays = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0, -0.25]), st.integers(0, 2)), min_size=1, max_size=4),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=8,
)


def trajectory(number: int, play: Play) -> Trajectory:
    group, turns, last = play
    parts: list[Turn] = []
    mask: list[bool] = []
    for tokens, reward, state in turns:
        parts.append(Turn("environment", len(mask), len(mask) + 2, "?"))
        mask += [False, False]
        parts.append(Turn("policy", len(mask), len(mask) + tokens, "x", reward, str(state)))
        mask += [True] * tokens
    size = len(mask)
    return Trajectory(
        sample_id=f"s{number:03d}",
        group_id=f"g{group}",
        task=Task("t"),
        turns=tuple(parts),
        token_ids=np.ones(size, np.int32),
        loss_mask=np.array(mask),
        logp=np.zeros(size, np.float32),
        token_version=np.zeros(size, np.int32),
        sampling=Sampling(),
        seed=0,
        reward=sum(reward for _, reward, _ in turns) + last,
        stop_reason="done",
    )


def slow_returns(play: Play, discount: float) -> list[float]:
    _, turns, last = play
    rewards = [reward for _, reward, _ in turns]
    rewards[-1] += last
    return [sum(discount**later * reward for later, reward in enumerate(rewards[turn:])) for turn in range(len(rewards))]


def standardised(value: float, others: list[float]) -> float:
    spread = statistics.pstdev(others)
    return (value - statistics.fmean(others)) / (spread + 1e-6) if max(others) - min(others) > 1e-6 else 0.0


def spread_out(played: list[Play], per_turn: list[list[float]]) -> torch.Tensor:
    tokens: list[float] = []
    for (_, turns, _), values in zip(played, per_turn, strict=True):
        for (count, _, _), value in zip(turns, values, strict=True):
            tokens += [0.0, 0.0] + [value] * count
    return torch.tensor(tokens)


@given(plays, st.sampled_from([1.0, 0.5]))
@settings(max_examples=60, deadline=None)
def test_step_level_compares_returns_within_the_group(played: list[Play], discount: float) -> None:
    values = [slow_returns(play, discount) for play in played]
    of_group = {group: [v for play, of in zip(played, values, strict=True) if play[0] == group for v in of] for group, _, _ in played}
    expected = spread_out(played, [[standardised(v, of_group[play[0]]) for v in of] for play, of in zip(played, values, strict=True)])
    batch = pack([trajectory(number, play) for number, play in enumerate(played)])
    torch.testing.assert_close(broadcast(step_level(batch, discount=discount), batch), expected, rtol=1e-3, atol=1e-3)


@given(plays)
@settings(max_examples=60, deadline=None)
def test_gigpo_adds_the_comparison_of_equal_states(played: list[Play]) -> None:
    batch = pack([trajectory(number, play) for number, play in enumerate(played)])
    episode = grpo(batch).tolist()
    values = [slow_returns(play, 0.5) for play in played]
    alike: dict[tuple[int, int], list[float]] = {}
    for (group, turns, _), of in zip(played, values, strict=True):
        for (_, _, state), value in zip(turns, of, strict=True):
            alike.setdefault((group, state), []).append(value)
    expected = [
        [whole + 2.0 * standardised(value, alike[play[0], state]) for (_, _, state), value in zip(play[1], of, strict=True)]
        for play, of, whole in zip(played, values, episode, strict=True)
    ]
    got = broadcast(gigpo(batch, discount=0.5, step_weight=2.0), batch)
    torch.testing.assert_close(got, spread_out(played, expected), rtol=1e-3, atol=1e-3)


def test_one_turn_and_no_discount_is_grpo() -> None:
    played: list[Play] = [(0, [(2, 0.0, 0)], float(number % 2)) for number in range(4)]
    batch = pack([trajectory(number, play) for number, play in enumerate(played)])
    torch.testing.assert_close(broadcast(step_level(batch), batch), broadcast(grpo(batch), batch))


@given(plays, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_turns_follow_their_trajectories_into_a_part_of_the_batch(played: list[Play], rng: random.Random) -> None:
    trajectories = [trajectory(number, play) for number, play in enumerate(played)]
    indices = rng.sample(range(len(played)), rng.randint(0, len(played)))
    part = select(pack(trajectories), indices).turns
    again = pack([replace(trajectories[index], sample_id=f"s{place:03d}") for place, index in enumerate(indices)]).turns
    assert part is not None
    assert again is not None
    for name in ("starts", "ends", "trajectory", "rewards"):
        assert torch.equal(getattr(part, name), getattr(again, name))


def test_a_policy_without_tokens_of_its_own_does_no_harm() -> None:
    silent = trajectory(0, (0, [(1, 0.0, 0)], 1.0))
    silent = replace(silent, turns=silent.turns[:1])
    batch = pack([silent, trajectory(1, (0, [(2, 1.0, 0)], 0.0))])
    assert torch.isfinite(broadcast(gigpo(batch), batch)).all()
