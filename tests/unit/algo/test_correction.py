"""Off-policy correction against a loop written from its formula."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.algo.correction import decoupled, masked_is, none, truncated_is, with_correction, with_rejection
from drumroll.algo.loss import policy_gradient
from drumroll.text.packing import pack_demonstrations, select
from drumroll.types import Batch

logps = st.floats(-30.0, 0.0, width=32)
tokens = st.lists(st.tuples(logps, logps, st.booleans()), min_size=1, max_size=12)
"""(old_logp, behaviour_logp, in the mask) of each token."""
caps = st.floats(1.0, 1e4, width=32)


def batch_of(values: list[tuple[float, float, bool]]) -> Batch:
    """One trajectory for each token, behind a prompt of one."""
    batch = pack_demonstrations([([1], [2])] * len(values))
    old, behaviour, inside = (torch.zeros(batch.num_tokens) for _ in range(3))
    for number, value in enumerate(values):
        for field, part in zip((old, behaviour, inside), value, strict=True):
            field[2 * number + 1] = part
    return batch.with_fields(
        old_logp=old, behaviour_logp=behaviour, loss_mask=inside.bool(), advantages=torch.arange(1.0, batch.num_tokens + 1)
    )


@given(tokens, caps)
def test_truncated_is_is_the_ratio_up_to_the_cap(values: list[tuple[float, float, bool]], cap: float) -> None:
    factor = truncated_is(batch_of(values), cap=cap)
    assert float(factor.max()) <= cap
    for (old, behaviour, inside), got in zip(values, factor[1::2].tolist(), strict=True):
        assert got == (pytest.approx(min(math.exp(old - behaviour), cap), rel=1e-4, abs=1e-8) if inside else 1.0)
    assert torch.equal(factor[::2], torch.ones(len(values)))


@given(tokens, caps)
def test_the_order_of_the_batch_changes_nothing(values: list[tuple[float, float, bool]], cap: float) -> None:
    batch = batch_of(values)
    order = list(reversed(range(len(values))))
    whole = batch.with_fields(ref_logp=truncated_is(batch, cap=cap))
    assert torch.equal(truncated_is(select(batch, order), cap=cap), select(whole, order).ref_logp)  # type: ignore[arg-type]


@given(tokens)
def test_decoupled_is_the_ratio_in_full(values: list[tuple[float, float, bool]]) -> None:
    for (old, behaviour, inside), got in zip(values, decoupled(batch_of(values))[1::2].tolist(), strict=True):
        assert got == pytest.approx(math.exp(min(max(old - behaviour, -20.0), 20.0)) if inside else 1.0, rel=1e-4)


@given(tokens)
def test_masked_is_counts_nothing_outside_its_bounds(values: list[tuple[float, float, bool]]) -> None:
    factor = masked_is(batch_of(values), bounds=(0.5, 3.0))
    for (old, behaviour, inside), got in zip(values, factor[1::2].tolist(), strict=True):
        ratio = math.exp(old - behaviour) if inside else 1.0
        if min(abs(ratio - 0.5), abs(ratio - 3.0)) > 1e-4:  # not on the bound itself
            assert got == pytest.approx(ratio if 0.5 <= ratio <= 3.0 else 0.0, rel=1e-4)


sequences = st.lists(st.lists(st.tuples(logps, logps, st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5)


def sequence_batch(values: list[list[tuple[float, float, bool]]]) -> Batch:
    """One trajectory for each list, behind a prompt of one token."""
    batch = pack_demonstrations([([1], [2] * len(trajectory)) for trajectory in values])
    columns = [
        torch.tensor([float(part) for trajectory in values for part in (0.0, *(token[column] for token in trajectory))])
        for column in range(3)
    ]
    return batch.with_fields(
        old_logp=columns[0], behaviour_logp=columns[1], loss_mask=columns[2].bool(), advantages=torch.ones(batch.num_tokens)
    )


@given(sequences)
def test_at_the_level_of_sequences_the_ratio_is_the_product(values: list[list[tuple[float, float, bool]]]) -> None:
    batch = sequence_batch(values)
    bounds = batch.offsets.tolist()
    capped, masked = truncated_is(batch, cap=3.0, level="sequence"), masked_is(batch, bounds=(0.5, 3.0), level="sequence")
    for number, trajectory in enumerate(values):
        ratio = math.exp(min(max(sum(old - behaviour for old, behaviour, inside in trajectory if inside), -20.0), 20.0))
        for place, (_, _, inside) in enumerate(trajectory, bounds[number] + 1):
            assert float(capped[place]) == pytest.approx(min(ratio, 3.0) if inside else 1.0, rel=1e-3)
            if min(abs(ratio - 0.5), abs(ratio - 3.0)) > 1e-3:
                assert float(masked[place]) == pytest.approx((ratio if 0.5 <= ratio <= 3.0 else 0.0) if inside else 1.0, rel=1e-3)


@given(sequences)
def test_a_trajectory_is_rejected_by_its_mean_ratio(values: list[list[tuple[float, float, bool]]]) -> None:
    batch = sequence_batch(values)
    outcome = with_rejection(policy_gradient, (0.5, 2.0))(torch.full((batch.num_tokens,), -1.0), batch)
    bounds = batch.offsets.tolist()
    for number, trajectory in enumerate(values):
        inside = [old - behaviour for old, behaviour, is_inside in trajectory if is_inside]
        mean = sum(inside) / len(inside) if inside else 0.0
        if abs(abs(mean) - math.log(2)) > 1e-4:
            expected = [float(abs(mean) > math.log(2) and is_inside) for _, _, is_inside in trajectory]
            assert outcome.metrics["rejected"][bounds[number] + 1 : bounds[number + 1]].tolist() == expected


def test_tokens_of_a_truncated_sequence_are_reported() -> None:
    """A product of e × e / e is e, above the cap; every token of the trajectory is held back, whatever its own ratio."""
    batch = sequence_batch([[(-1.0, -2.0, True), (-1.0, -2.0, True), (-2.0, -1.0, True)], [(-1.0, -1.0, True)]])
    correct = partial(truncated_is, cap=2.0, level="sequence")
    outcome = with_correction(policy_gradient, correct, "sequence")(torch.full((6,), -1.0), batch)
    assert outcome.metrics["correction_truncated"].tolist() == [0, 1, 1, 1, 0, 0]


def test_what_is_reported() -> None:
    """Ratios of 1, e, e^-1 and, outside the mask, e."""
    batch = batch_of([(-1.0, -1.0, True), (-1.0, -2.0, True), (-2.0, -1.0, True), (-1.0, -2.0, False)])
    logp = torch.full((8,), -1.0, requires_grad=True)
    outcome = with_correction(policy_gradient, truncated_is)(logp, batch)
    assert set(outcome.metrics) == {*policy_gradient(logp, batch).metrics, "correction_weight", "correction_truncated"}
    torch.testing.assert_close(outcome.metrics["correction_weight"][1::2], torch.tensor([1.0, 2.0, math.exp(-1), 1.0]))
    assert outcome.metrics["correction_truncated"][1::2].tolist() == [0, 1, 0, 0]
    at_cap_one = with_correction(policy_gradient, lambda batch: truncated_is(batch, cap=1.0))(logp, batch)
    assert at_cap_one.metrics["correction_truncated"][1::2].tolist() == [0, 1, 0, 0]
    without = with_correction(policy_gradient, none)(logp, batch)
    assert torch.equal(without.loss, policy_gradient(logp, batch).loss)
    assert without.metrics["correction_weight"].mean() == 1


def test_factors_are_constants_to_the_gradient() -> None:
    """Also where a correction is computed from something that has one, or is wild outside the mask."""
    batch = batch_of([(-1.0, -2.0, True), (-1.0, -1.0, False)])
    logp = torch.full((4,), -1.0, requires_grad=True)
    outcome = with_correction(policy_gradient, lambda batch: (-2 * logp).masked_fill(~batch.loss_mask, math.nan))(logp, batch)
    (gradient,) = torch.autograd.grad(outcome.loss.sum(), logp)
    assert gradient.tolist() == [0, -4, 0, 0]
    assert outcome.loss.isfinite().all()
    assert outcome.metrics["correction_weight"].tolist() == [1, 2, 1, 1]


def test_nothing_overflows() -> None:
    factor = truncated_is(batch_of([(0.0, -1e4, True), (-1e4, 0.0, True)]), cap=math.inf)
    assert factor.isfinite().all()
    assert factor[1] > 1e6
    assert 0 <= factor[3] < 1e-6


def test_rounding_does_not_count_as_truncation() -> None:
    batch = batch_of([(-1.0, -1.0 - 1e-5, True), (-1.0, -1.1, True)])
    outcome = with_correction(policy_gradient, none)(torch.full((4,), -1.0), batch)
    assert outcome.metrics["correction_truncated"].tolist() == [0, 0, 0, 1]


def test_mistakes_are_named() -> None:
    batch = batch_of([(-1.0, -2.0, True)])
    with pytest.raises(ValueError, match=r"one factor per token \[2\]; got shape \[1\]"):
        with_correction(policy_gradient, lambda batch: torch.ones(1))(torch.zeros(2), batch)
