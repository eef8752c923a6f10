"""Distillation: distances and advantages against slow loops over the whole vocabulary and against TRL, what must hold for any batch, and
what is refused."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drumroll.algo.algorithm import build_algorithm
from drumroll.algo.distill import LEAST_LOGP, build_imitation, distance, distill, gkd, opinion, soft_targets
from drumroll.algo.loss import cross_entropy, needs_of
from drumroll.config.load import check_config, merge
from drumroll.config.models import AlgoConfig, Divergence, RlConfig, SoftTargetsConfig
from drumroll.errors import ConfigError
from drumroll.text.packing import pack_demonstrations, select
from drumroll.types import Batch

V = 7
DIVERGENCES: tuple[Divergence, ...] = ("forward", "reverse", "jsd")


def draw(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(k: int = V, temperature: float | None = None, seed: int = 0) -> tuple[Tensor, Batch]:
    """Logits of a student, [T, V] with gradient, and a batch that a teacher has named its `k` likeliest tokens of; two have holes in their
    masks. What stands outside the masks is poison."""
    batch = pack_demonstrations([([1, 2], [3] * (2 + number % 4)) for number in range(5)])
    mask = batch.loss_mask & (batch.position_ids != 4)
    logits = draw(batch.num_tokens, V, seed=seed).requires_grad_()
    top = (draw(batch.num_tokens, V, seed=seed + 1) / (temperature or 1.0)).log_softmax(-1).topk(k)
    poison = torch.where(mask, 0.0, math.nan)
    batch = batch.with_fields(
        loss_mask=mask,
        weight=mask / mask.sum(),
        behaviour_logp=draw(batch.num_tokens, seed=seed + 2) + poison,
        teacher_logp=draw(batch.num_tokens, seed=seed + 3) + poison,
        teacher_top_ids=top.indices.int(),
        teacher_top_logp=top.values + poison[:, None],
        teacher_temperature=None if temperature is None else torch.full((5,), temperature),
    )
    return logits, batch


def filled(logits: Tensor, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Batch]:
    """What a trainer fills in for these logits: [T] log-probabilities of the tokens, and the batch with those of the teacher's."""
    assert batch.teacher_top_ids is not None
    logp = logits.log_softmax(-1).gather(-1, batch.token_ids[:, None]).squeeze(-1)
    top_logp = (logits / temperature).log_softmax(-1).gather(-1, batch.teacher_top_ids.long())
    return logp, batch.with_fields(top_logp=top_logp)


# Slow implementations: loops in Python's own numbers.


def slow_kl(p: list[float], q: list[float]) -> float:
    return sum(x * (math.log(x) - math.log(y)) for x, y in zip(p, q, strict=True))


def slow_distance(student: list[float], teacher: list[float], divergence: Divergence, beta: float) -> float:
    if divergence == "forward":
        return slow_kl(teacher, student)
    if divergence == "reverse":
        return slow_kl(student, teacher)
    mixed = [beta * y + (1 - beta) * x for x, y in zip(student, teacher, strict=True)]
    return beta * slow_kl(teacher, mixed) + (1 - beta) * slow_kl(student, mixed)


def probabilities(logits: list[float], temperature: float = 1.0) -> list[float]:
    total = sum(math.exp(value / temperature) for value in logits)
    return [math.exp(value / temperature) / total for value in logits]


def named_and_rest(probability: list[float], ids: list[int]) -> list[float]:
    """The probabilities of the named tokens, and that of all others together where there are any."""
    others = [value for token, value in enumerate(probability) if token not in ids]
    return [probability[token] for token in ids] + ([sum(others)] if others else [])


def slow_gkd(logits: Tensor, batch: Batch, teacher_logits: Tensor, divergence: Divergence, beta: float, temperature: float) -> list[float]:
    found = []
    assert batch.teacher_top_ids is not None
    for token in range(batch.num_tokens):
        ids = batch.teacher_top_ids[token].tolist()
        both = [named_and_rest(probabilities(of[token].tolist(), temperature), ids) for of in (logits, teacher_logits)]
        found.append(slow_distance(both[0], both[1], divergence, beta) if batch.loss_mask[token] else 0.0)
    return found


@pytest.mark.parametrize("temperature", [None, 1.0, 2.5])
@pytest.mark.parametrize("k", [1, 3, V])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_distance_is_that_of_loops_over_the_whole_vocabulary(divergence: Divergence, k: int, temperature: float | None) -> None:
    logits, batch = make_batch(k, temperature)
    logp, batch = filled(logits, batch, temperature or 1.0)
    outcome = gkd(logp, batch, divergence=divergence, beta=0.3)
    teacher_logits = draw(batch.num_tokens, V, seed=1)
    expected = slow_gkd(logits.detach(), batch, teacher_logits, divergence, 0.3, temperature or 1.0)
    torch.testing.assert_close(outcome.loss.detach(), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    mass = outcome.metrics["teacher_top_mass"][batch.loss_mask]
    assert (mass > 0.999).all() if k == V else (mass < 1).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_tokens_named_is_the_plain_divergence_with_its_gradient(divergence: Divergence) -> None:
    """Against torch's own over the vocabulary: the one further token for what is left changes nothing."""
    logits, batch = make_batch(V)
    logp, batch = filled(logits, batch)
    (got,) = torch.autograd.grad((gkd(logp, batch, divergence=divergence, beta=0.3).loss * batch.weight).sum(), logits)
    plain = draw(batch.num_tokens, V).requires_grad_()
    p, q = plain.softmax(-1), draw(batch.num_tokens, V, seed=1).softmax(-1)
    m = 0.3 * q + 0.7 * p
    whole = {
        "forward": (q * (q / p).log()).sum(-1),
        "reverse": (p * (p / q).log()).sum(-1),
        "jsd": (0.3 * q * (q / m).log() + 0.7 * p * (p / m).log()).sum(-1),
    }
    (expected,) = torch.autograd.grad((whole[divergence] * batch.weight).sum(), plain)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@given(st.integers(0, 10**6), st.sampled_from(DIVERGENCES), st.floats(0.05, 0.95), st.floats(0.1, 20.0))
def test_more_named_tokens_bring_the_distance_up_to_the_whole_one(seed: int, divergence: Divergence, beta: float, scale: float) -> None:
    teacher = draw(4, V, seed=seed, scale=scale).double().log_softmax(-1).sort(descending=True)
    student = draw(4, V, seed=seed + 1, scale=scale).double().log_softmax(-1).gather(-1, teacher.indices)
    found = [distance(student[:, :k], teacher.values[:, :k], divergence, beta) for k in range(1, V + 1)]
    whole = [slow_distance(*pair, divergence, beta) for pair in zip(student.exp().tolist(), teacher.values.exp().tolist(), strict=True)]
    assert all((each >= -1e-5).all() and (each <= torch.tensor(whole) + 1e-4).all() for each in found)
    if scale < 1:  # nothing is so unlikely that it counts as more likely
        assert all((less <= more + 1e-5).all() for less, more in pairwise(found))
        torch.testing.assert_close(found[-1], torch.tensor(whole, dtype=torch.float64), rtol=0, atol=1e-5)
    same = distance(teacher.values[:, :3], teacher.values[:, :3], divergence, beta)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-5)


def test_tokens_that_a_model_rules_out_cost_much_and_not_infinitely_much() -> None:
    teacher = torch.tensor([[0.0, -math.inf, -math.inf]])
    student = torch.tensor([[-40.0, -math.inf, -1e-6]], requires_grad=True)
    for divergence in DIVERGENCES:
        value = distance(student, teacher, divergence)
        assert value.isfinite().all()
        (gradient,) = torch.autograd.grad(value.sum(), student)
        assert gradient.isfinite().all()
    assert float(distance(student, teacher, "reverse").detach()) == pytest.approx(-LEAST_LOGP, rel=1e-3)
    assert float(distance(student, teacher, "forward").detach()) == pytest.approx(40.0, rel=1e-3)


@pytest.mark.parametrize("loss", [gkd, soft_targets])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_masked_tokens_have_exactly_zero_gradient(loss: Any, divergence: Divergence) -> None:
    logits, batch = make_batch(3, 2.0)
    logp, batch = filled(logits, batch, 2.0)
    outcome = loss(logp, batch, divergence=divergence)
    (gradient,) = torch.autograd.grad((outcome.loss * batch.weight).sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[~batch.loss_mask].any()
    assert gradient[batch.loss_mask].any(dim=-1).all()
    for name, value in {"loss": outcome.loss, **outcome.metrics}.items():
        assert value.shape == (batch.num_tokens,), name
        assert name == "loss" or not value.requires_grad, name
        assert not value.detach()[~batch.loss_mask].any() or name == "token_probability"


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_packing_and_splitting_change_nothing(divergence: Divergence) -> None:
    logits, batch = make_batch(3, 2.0)
    batch = batch.with_fields(token_version=torch.arange(batch.num_tokens))

    def learnt(part: Batch) -> Tensor:
        """[T, V] gradient of a part, at the tokens of the whole batch."""
        mine = logits.detach()[part.token_version].requires_grad_()
        logp, part = filled(mine, part, 2.0)
        (gradient,) = torch.autograd.grad((soft_targets(logp, part, divergence=divergence).loss * part.weight).sum(), mine)
        return torch.zeros_like(logits).index_copy(0, part.token_version, gradient)

    whole = learnt(batch)
    assert whole.any()
    pieces = [learnt(select(batch, indices)) for indices in ([3, 0], [], [1, 4, 2])]
    for again in (sum(pieces), learnt(select(batch, [4, 3, 2, 1, 0]))):
        torch.testing.assert_close(again, whole, rtol=1e-6, atol=1e-8)


def test_a_selection_has_the_teachers_words_of_its_own_tokens() -> None:
    _, batch = make_batch(3, 2.0)
    part = select(batch, [4, 1])
    bounds = batch.offsets.tolist()
    places = [*range(bounds[4], bounds[5]), *range(bounds[1], bounds[2])]
    for name in ("teacher_logp", "teacher_top_ids", "teacher_top_logp"):
        torch.testing.assert_close(getattr(part, name), getattr(batch, name)[places], equal_nan=True)
    assert part.teacher_temperature is not None
    assert part.teacher_temperature.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, 0, 1])
def test_the_values_and_gradients_are_trls(beta: float) -> None:
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="TRL is a dependency of development alone")
    logits, batch = make_batch(V)
    logp, batch = filled(logits, batch)
    divergence: Divergence = "forward" if beta == 0 else "reverse" if beta == 1 else "jsd"
    ours = (gkd(logp, batch, divergence=divergence, beta=beta).loss * batch.weight).sum()
    labels = torch.where(batch.loss_mask, batch.token_ids, -100)
    teacher_logits = draw(batch.num_tokens, V, seed=1)
    theirs = trl.GKDTrainer.generalized_jsd_loss(logits[None], teacher_logits[None], labels[None], beta=beta)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    one, other = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# Imitation of a teacher on demonstrations.


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_soft_targets_are_a_mixture_and_do_not_shrink_with_the_temperature(weight: float, temperature: float) -> None:
    logits, batch = make_batch(3, temperature)
    logp, batch = filled(logits, batch, temperature)
    outcome = build_imitation(SoftTargetsConfig(weight=weight, temperature=temperature))(logp, batch)
    teacher_logits = draw(batch.num_tokens, V, seed=1)
    apart = torch.tensor(slow_gkd(logits.detach(), batch, teacher_logits, "forward", 0.5, temperature))
    hard = -logp.detach().masked_fill(~batch.loss_mask, 0.0)
    torch.testing.assert_close(outcome.loss.detach(), (1 - weight) * hard + weight * temperature**2 * apart, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outcome.metrics["cross_entropy"], hard)
    torch.testing.assert_close(outcome.metrics["teacher_divergence"], apart, rtol=1e-4, atol=1e-5)


def test_imitation_without_a_teacher_asks_nothing_of_anybody() -> None:
    assert build_imitation(None) is cross_entropy
    assert set(needs_of(build_imitation(SoftTargetsConfig()))) == {"teacher_top_logp", "top_logp"}


# The teacher's opinion as an advantage.


def slow_opinion(batch: Batch, student: Tensor, discount: float) -> list[float]:
    found = [0.0] * batch.num_tokens
    assert batch.teacher_logp is not None
    for start, end in pairwise(batch.offsets.tolist()):
        follows = 0.0
        for token in range(end - 1, start - 1, -1):
            if batch.loss_mask[token]:
                follows = found[token] = float(batch.teacher_logp[token] - student[token]) + discount * follows
    return found


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_the_advantage_is_the_teachers_opinion_whatever_the_rewards(discount: float) -> None:
    _, batch = make_batch()
    batch = batch.with_fields(rewards=torch.arange(5.0))
    advantage = build_algorithm(AlgoConfig.model_validate({"advantage": {"kind": "distill", "discount": discount}})).advantage
    torch.testing.assert_close(advantage(batch), torch.tensor(slow_opinion(batch, batch.behaviour_logp, discount)))
    later = draw(batch.num_tokens, seed=9)
    expected = torch.tensor(slow_opinion(batch, later, discount))
    torch.testing.assert_close(advantage(batch.with_fields(old_logp=later)), expected)
    order = [3, 1, 4, 0, 2]
    moved = select(batch.with_fields(advantages=advantage(batch)), order).advantages
    torch.testing.assert_close(advantage(select(batch, order)), moved)


def test_a_policy_gradient_on_it_is_the_gradient_of_the_reverse_kl() -> None:
    """In expectation over the student's tokens, which are few enough to try all."""
    logits, teacher = draw(V).requires_grad_(), draw(V, seed=1).log_softmax(-1)
    logp = logits.log_softmax(-1)
    batch = pack_demonstrations([([0], [token]) for token in range(V)])
    one = batch.loss_mask
    spread = torch.zeros(batch.num_tokens)
    batch = batch.with_fields(
        behaviour_logp=spread.masked_scatter(one, logp.detach()),
        teacher_logp=spread.masked_scatter(one, teacher),
        weight=spread.masked_scatter(one, logp.detach().exp()),
    )
    algo = build_algorithm(AlgoConfig.model_validate({"advantage": "distill", "loss": "policy_gradient"}))
    batch = batch.with_fields(advantages=algo.advantage(batch), old_logp=batch.behaviour_logp)
    loss = (algo.loss(spread.masked_scatter(one, logp), batch).loss * batch.weight).sum()
    (learnt,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)
    torch.testing.assert_close(learnt, expected)


def test_missing_fields_are_named() -> None:
    logits, batch = make_batch()
    with pytest.raises(ValueError, match=r"needs `batch\.teacher_logp`"):
        distill(batch.with_fields(teacher_logp=None))
    logp, with_top = filled(logits, batch)
    for name in ("top_logp", "teacher_top_logp"):
        with pytest.raises(ValueError, match=rf"`batch\.{name}`"):
            gkd(logp, with_top.with_fields(**{name: None}))
    assert float(opinion(batch.with_fields(teacher_logp=torch.full_like(batch.behaviour_logp, -math.inf)))[batch.loss_mask].min()) > -110


# Configs.

RUN: dict[str, Any] = {
    "pipeline": "rl",
    "max_steps": 10,
    "model": {"path": "some/model"},
    "data": {"train": {"path": "x.jsonl"}},
    "teacher": {"path": "some/teacher"},
}
SFT: dict[str, Any] = {
    "pipeline": "sft",
    "model": {"path": "some/model"},
    "sft": {"data": {"path": "x.jsonl"}, "distill": {"temperature": 2.0}},
    "teacher": {"path": "some/teacher"},
}


@pytest.mark.parametrize(
    ("algo", "needs", "learns_from_rewards"),
    [
        ({"advantage": "distill"}, {"teacher_logp"}, False),
        ({"loss": {"kind": "gkd", "divergence": "jsd", "beta": 0.1}}, {"teacher_top_logp"}, False),
        ({"distill": {"coef": 0.1}}, {"teacher_logp"}, True),
    ],
)
def test_what_a_teacher_has_to_say(algo: dict[str, Any], needs: set[str], learns_from_rewards: bool) -> None:
    """Where rewards play no part there need not be any, nor groups of several."""
    extra = {"rewards": ["exact_match"]} if learns_from_rewards else {"rollout": {"group_size": 1}}
    cfg = check_config({**RUN, **extra, "algo": algo})
    assert isinstance(cfg, RlConfig)
    assert cfg.algo.teacher_needs == needs
    assert cfg.algo.learns_from_rewards == learns_from_rewards
    assert AlgoConfig.model_validate(cfg.algo.model_dump()) == cfg.algo


PAGE = (Path(__file__).parents[3] / "docs" / "distillation.md").read_text()
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
CELLS = [yaml.safe_load(text) for text in re.findall(r"`((?:algo|sft): \{.*?\})`", PAGE)]


@pytest.mark.parametrize("shown", [*BLOCKS, *CELLS], ids=str)
def test_every_config_on_the_page_is_accepted(shown: dict[str, Any]) -> None:
    if shown.keys() == {"teacher"}:
        shown = {**shown, "algo": {"advantage": "distill"}}
    base = SFT if shown.get("pipeline") == "sft" or "sft" in shown else {**RUN, "rewards": ["exact_match"]}
    if "model" in shown:
        base = {}
    check_config(merge(base, shown))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "an advantage without a teacher": (
        RUN,
        {"teacher": None, "algo": {"advantage": "distill"}},
        ["`algo.advantage.kind` is distill", "no section `teacher`"],
    ),
    "a loss without a teacher": (RUN, {"teacher": None, "algo": {"loss": "gkd"}}, ["`algo.loss.kind` is gkd", "no section `teacher`"]),
    "an addition without a teacher": (
        RUN,
        {"teacher": None, "rewards": ["exact_match"], "algo": {"distill": {}}},
        ["`algo.distill` needs a teacher", "no section `teacher`"],
    ),
    "a warm-up without a teacher": (
        RUN,
        {"teacher": None, "rewards": ["exact_match"], "warmup": {"data": {"path": "y.jsonl"}, "distill": {}}},
        ["`warmup.distill` needs a teacher", "no section `teacher`"],
    ),
    "demonstrations without a teacher": (SFT, {"teacher": None}, ["`sft.distill` needs a teacher", "no section `teacher`"]),
    "nothing needs it": (
        RUN,
        {"rewards": ["exact_match"]},
        ["section `teacher`", "nothing needs it", "`algo.advantage.kind` is grpo", "`algo.loss.kind` is ppo_clip", "`algo.distill`"],
    ),
    "nothing needs it on demonstrations": (SFT, {"sft": {"distill": None}}, ["section `teacher`", "nothing needs it", "`sft.distill`"]),
    "twice": (RUN, {"algo": {"advantage": "distill", "distill": {}}}, ["`algo.advantage.kind` distill", "`algo.distill`"]),
    "added to nothing": (RUN, {"algo": {"loss": "gkd", "distill": {}}}, ["`algo.distill`", "`algo.loss.kind` gkd"]),
    "a KL in rewards that nobody sees": (
        RUN,
        {"algo": {"advantage": "distill", "kl": {"coef": 0.1, "applied_to": "reward"}}},
        ["`algo.kl.applied_to` reward", "`algo.advantage.kind`"],
    ),
    "scaled rewards that nobody sees": (
        RUN,
        {"algo": {"loss": "gkd", "reward_scaling": {"normalise": "batch"}}},
        ["`algo.reward_scaling`", "`algo.loss.kind`"],
    ),
    "no rewards to add to": (RUN, {"algo": {"distill": {}}}, ["`rewards` is empty"]),
    "a mixture of one": (RUN, {"algo": {"loss": {"kind": "gkd", "beta": 1.0}}}, ["`algo.loss.beta`", "less than 1"]),
    "a discount above 1": (RUN, {"algo": {"advantage": {"kind": "distill", "discount": 2}}}, ["`algo.advantage.discount`"]),
    "no temperature": (SFT, {"sft": {"distill": {"temperature": 0}}}, ["`sft.distill.temperature`", "greater than 0"]),
    "no weight": (SFT, {"sft": {"distill": {"weight": 0}}}, ["`sft.distill.weight`", "greater than 0"]),
    "no tokens named": (SFT, {"teacher": {"top_k": 0}}, ["`teacher.top_k`", "greater than 0"]),
    "no folder": (SFT, {"teacher": {"path": None}}, ["`teacher.path`"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_its_keys(name: str) -> None:
    base, changes, said = REFUSED[name]
    with pytest.raises(ConfigError) as refusal:
        check_config(merge(base, changes))
    for part in said:
        assert part in str(refusal.value)
