"""The distribution that engine and trainer share, and the noise that tokens are drawn with."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.backends.sampling import processed_logp, sample, uniform


def settings(
    num_rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.full((num_rows,), temperature), torch.full((num_rows,), top_p), torch.full((num_rows,), top_k, dtype=torch.int64)


def slow_logp(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """One row, from the definition."""
    if temperature == 0:
        temperature, top_p, top_k = 1.0, 1.0, 0
    scaled = [x / temperature for x in logits]
    ranked = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: top_k or None]
    weights = {i: math.exp(scaled[i] - scaled[ranked[0]]) for i in ranked}
    total, kept, mass = sum(weights.values()), [], 0.0
    for i in ranked:
        if kept and top_p < 1 and mass / total >= top_p:
            break
        kept.append(i)
        mass += weights[i]
    return [math.log(weights[i] / mass) if i in kept else -math.inf for i in range(len(scaled))]


@given(
    st.lists(st.integers(-80, 80), min_size=2, max_size=12, unique=True),
    st.sampled_from([0.0, 0.5, 0.7, 1.0, 2.0]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from([0, 1, 3, 50]),
)
def test_agrees_with_the_definition(tenths: list[int], temperature: float, top_p: float, top_k: int) -> None:
    logits = [x / 10 for x in tenths]
    got = processed_logp(torch.tensor([logits]), *settings(1, temperature, top_p, top_k))[0]
    torch.testing.assert_close(got, torch.tensor(slow_logp(logits, temperature, top_p, top_k)), atol=1e-5, rtol=1e-5)


def test_rows_are_independent_and_off_means_off() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    temperature, top_p, top_k = torch.tensor([1.0, 0.7, 0.0, 1.0]), torch.tensor([1.0, 0.5, 0.1, 1.0]), torch.tensor([0, 0, 2, 3])
    together = processed_logp(logits, temperature, top_p, top_k)
    for row in range(4):
        alone = processed_logp(logits[row : row + 1], temperature[row : row + 1], top_p[row : row + 1], top_k[row : row + 1])
        assert torch.equal(alone[0], together[row])
    assert torch.equal(together[0], logits[0].log_softmax(-1))
    assert torch.equal(together[2], logits[2].log_softmax(-1))
    assert int(together[3].isfinite().sum()) == 3
    torch.testing.assert_close(together.exp().sum(-1), torch.ones(4))


def test_ties_at_the_boundary_keep_exactly_k() -> None:
    logp = processed_logp(torch.zeros(1, 10), *settings(1, top_k=4))
    assert logp[0].isfinite().tolist() == [True] * 4 + [False] * 6


def test_a_kept_token_is_never_impossible_and_gradients_stay_finite() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens = logits.argmin(-1)
    logp = processed_logp(logits, *settings(3, 0.7, 0.5, 2), keep=tokens)
    chosen = logp.gather(-1, tokens[:, None])
    chosen.sum().backward()
    assert chosen.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[logp.isneginf()] == 0).all()
    torch.testing.assert_close(logp.exp().sum(-1), torch.ones(3))


def test_gradient_is_that_of_the_truncated_distribution() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).float().requires_grad_()
    logp = processed_logp(logits, *settings(2, 0.5, 1.0, 3))
    token = logits.argmax(-1)
    logp.gather(-1, token[:, None]).sum().backward()
    expected = (torch.nn.functional.one_hot(token, 6) - logp.detach().exp()) / 0.5
    torch.testing.assert_close(logits.grad, expected)


def test_inverse_cdf_hits_every_token_at_its_share() -> None:
    logp = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()
    points = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.76, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(logp.expand(6, 4), points).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("impossible", [[0], [0, 1, 2], [7], [5, 6, 7], [0, 3, 7]])
def test_impossible_tokens_are_never_drawn(impossible: list[int]) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(3))
    logits[impossible] = -torch.inf
    points = torch.cat([torch.linspace(0, 1, 999, dtype=torch.float64)[:-1], torch.tensor([1 - 2.0**-53], dtype=torch.float64)])
    drawn = set(sample(logits.log_softmax(-1).expand(len(points), 8), points).tolist())
    assert drawn == set(range(8)) - set(impossible)


def test_greedy_rows_take_the_likeliest() -> None:
    logp = torch.randn(5, 9, generator=torch.Generator().manual_seed(4)).log_softmax(-1)
    greedy = torch.tensor([True, False, True, False, True])
    ids = sample(logp, torch.full((5,), 0.999, dtype=torch.float64), greedy)
    assert torch.equal(ids[greedy], logp.argmax(-1)[greedy])


def test_noise_is_uniform_and_depends_on_seed_and_index_alone() -> None:
    seeds, index = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    noise = uniform(seeds, index)
    assert ((noise >= 0) & (noise < 1)).all()
    assert torch.equal(uniform(seeds.flip(0), index.flip(0)).flip(0), noise)
    assert len(noise.unique()) == len(noise)
    counts = torch.histc(noise, 20, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 50  # chi-square with 19 degrees of freedom: 43.8 at p = 0.001
    table = noise.view(200, 200) - 0.5
    limit = 4 / math.sqrt(200 * 199) / 12  # four standard deviations of a mean product of independent uniforms
    for other in (table.roll(1, 0), table.roll(1, 1), table.t()):
        off_diagonal = table * other
        assert abs(float(off_diagonal[~torch.eye(200, dtype=torch.bool)].mean())) < limit


def test_noise_is_the_same_everywhere() -> None:
    """Fixed values: a change here changes every run that was ever recorded."""
    noise = uniform(torch.tensor([0, 1, -5, 2**62]), torch.tensor([0, 1, 7, 10**6]))
    assert [f"{x:.12f}" for x in noise.tolist()] == EXPECTED_NOISE


def reference_noise(seed: int, index: int) -> float:
    """The same in Python's integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return (mix((mix(seed & mask) + index * 0x9E3779B97F4A7C15) & mask) >> 11) * 2.0**-53


EXPECTED_NOISE = [f"{reference_noise(seed, index):.12f}" for seed, index in ((0, 0), (1, 1), (-5, 7), (2**62, 10**6))]
