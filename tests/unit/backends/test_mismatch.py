"""How far trainers are from engines: exact on one rank, merged from several."""

import math

import pytest
import torch

from drumroll.backends.train.mismatch import mismatch, spread_of


def test_one_rank_is_exact() -> None:
    ratios = torch.tensor([0.0, 0.1, -0.3, math.nan, 0.2])
    found = mismatch([spread_of([ratios[:2], ratios[2:]])])
    assert found["mismatch/logp_mean"] == pytest.approx(0.15)
    assert found["mismatch/logp_max"] == pytest.approx(0.3)
    assert found["mismatch/ratio_p50"] == pytest.approx(math.exp(0.05))
    assert found["mismatch/ratio_p01"] == pytest.approx(math.exp(-0.3), rel=0.02)
    assert found["mismatch/ratio_p99"] == pytest.approx(math.exp(0.2), rel=0.02)


def test_several_ranks_are_those_of_all_their_tokens() -> None:
    values = torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 0.1
    together, apart = mismatch([spread_of([values])]), mismatch([spread_of([part]) for part in values.chunk(3)])
    assert apart["mismatch/logp_mean"] == pytest.approx(together["mismatch/logp_mean"])
    assert apart["mismatch/logp_max"] == together["mismatch/logp_max"]
    for name in ("p01", "p50", "p99"):
        assert apart[f"mismatch/ratio_{name}"] == pytest.approx(together[f"mismatch/ratio_{name}"], abs=0.01)


def test_nothing_to_say_without_tokens() -> None:
    assert mismatch([spread_of([]), spread_of([torch.full((3,), math.nan)])]) == {}
