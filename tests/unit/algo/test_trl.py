"""Advantages, losses and corrections against TRL's values and gradients on the same numbers; skipped where TRL is not installed.

Policy losses: methods of TRL's trainers, called on a stand-in for the trainer, compute from padded [B, L] tensors what `algo` computes from
packed ones, rewards to gradients. Preference losses: TRL's own trainers on tiny models, down to the gradients of the weights. TRL has
nothing to compare with for GAE and the critic's loss, REINFORCE++, ReMax, credit for turns, GSPO-token, TOPR and Kimi's loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drumroll.algo.advantage import grpo
from drumroll.algo.algorithm import Algorithm, build_algorithm
from drumroll.algo.preference import build_preference, last_tokens, preference_weights
from drumroll.algo.scaling import replace_rewards
from drumroll.config.models import AlgoConfig, PreferenceConfig
from drumroll.registry import REGISTRY
from drumroll.text.packing import pack_episodes
from drumroll.types import Batch

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")


@pytest.fixture(scope="module")
def trl() -> Any:
    """Imported by the first test that runs, not where tests are collected: it takes seconds."""
    return pytest.importorskip("trl", reason="TRL is a dependency of development alone")


# Policy losses.

GROUP_SIZE = 3
REWARDS = torch.tensor([1.0, 0.0, 0.25, -2.0, 1.0, 0.25])
LENGTHS = (3, 1, 5, 4, 2, 5)
FROM_ENVIRONMENT = {2: (1, 2), 5: (4,)}
"""Of some replies, the tokens that are not of the policy."""
BUDGET = 6
SECTION = {"advantage": {"kind": "dr_grpo"}}
SETTINGS = {"scale_rewards": "none", "use_bias_correction_kl": False}
"""By default TRL multiplies the KL by the ratio; ours is the plain estimate (but see the test of the corrected KL)."""


def reply_mask(lengths: Sequence[int] = LENGTHS, holes: dict[int, tuple[int, ...]] = FROM_ENVIRONMENT) -> Tensor:
    """[B, L] bool: tokens of the policy."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    for row, places in holes.items():
        mask[row, list(places)] = False
    return mask


def lengths_of(mask: Tensor) -> list[int]:
    """Of each reply, up to its last token of the policy; at least 1."""
    return [max([1, *(row.nonzero().squeeze(1) + 1).tolist()]) for row in mask]


@dataclass(frozen=True)
class Scored:
    """Tokens of replies with all that is known of each, [B, L]. What stands outside the mask is of no consequence."""

    mask: Tensor
    logp: Tensor
    old_logp: Tensor
    behaviour_logp: Tensor
    ref_logp: Tensor
    entropy: Tensor

    @classmethod
    def draw(cls, mask: Tensor) -> Scored:
        """With a seed that leads to ratios beyond every bound that the tests set, and within."""
        generator = torch.Generator().manual_seed(172)
        logps = [-1.5 * torch.rand(mask.shape, generator=generator) for _ in range(4)]
        return cls(mask, *logps, torch.rand(mask.shape, generator=generator))


@dataclass(frozen=True)
class Outcome:
    """What a loss came to, and the gradients by log-probabilities and entropies, [B, L]."""

    loss: Tensor
    gradients: tuple[Tensor, Tensor]
    advantages: Tensor
    """[B]"""
    report: dict[str, float]


class StandIn:
    """One process's trainer: its settings are those of a real config, what it samples and how that is scored is given."""

    def __init__(self, config: Any, scored: Scored, samples: tuple[Any, ...]) -> None:
        self.args = config
        self.model = SimpleNamespace(training=True, is_gradient_checkpointing=False, logp=scored.old_logp)
        self.ref_model = SimpleNamespace(logp=scored.ref_logp)
        self.entropies = scored.entropy
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"), num_processes=1, process_index=0, sync_gradients=True, gather=_same, reduce=_same
        )
        self.epsilon_low, self.epsilon_high = config.epsilon, config.epsilon_high or config.epsilon
        self.current_gradient_accumulation_steps = 1
        self.reward_weights, self.reward_func_names = torch.ones(1), ()
        self._entropy_bonus_enabled = bool(getattr(config, "entropy_coef", None))
        self._tokenizer = SimpleNamespace(pad_token_id=0)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._logs: dict[str, Any] = defaultdict(list)
        self._pending_extra_logs: dict[str, Any] = {}
        self._pending_metrics: dict[str, Any] = {}
        self._samples = samples

    def __getattr__(self, name: str) -> Any:
        """A trainer has most of its settings under their names in the config; what is not there is for tools, images and the like."""
        return getattr(self.args, name, None)

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        return self._samples

    def _calculate_rewards(self, *inputs: Any) -> Tensor:
        return REWARDS[:, None]

    def _get_per_token_logps_and_entropies(self, model: Any, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor, None]:
        return model.logp, self.entropies, None


def _same(value: Tensor, **options: Any) -> Tensor:
    return value


def of_trl(trl: Any, algorithm: str, scored: Scored, **settings: Any) -> Outcome:
    """Advantages, and importance weights where the settings ask for them, then the loss, as in a trainer's step."""
    lengths = lengths_of(scored.mask)
    completions = [[7] * length for length in lengths]
    samples: tuple[Any, ...] = ([[7]] * len(lengths), completions, [""] * len(lengths))
    if algorithm == "GRPO":
        tool_masks = [row[:length].long().tolist() for row, length in zip(scored.mask, lengths, strict=True)]
        sampled_at = [row[:length].tolist() for row, length in zip(scored.behaviour_logp, lengths, strict=True)]
        samples = (*samples[:2], tool_masks, samples[2], sampled_at, {}, None, None)
        settings["num_iterations"] = 2  # or the old log-probabilities would be taken for the new ones
    config = getattr(trl, f"{algorithm}Config")(
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=len(lengths),
        gradient_accumulation_steps=1,
        max_completion_length=BUDGET,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **settings,
    )
    trainer, stand_in = getattr(trl, f"{algorithm}Trainer"), StandIn(config, scored, samples)
    inputs = trainer._generate_and_score_completions(stand_in, [{"prompt": ""} for _ in lengths])
    learner = SimpleNamespace(logp=scored.logp.clone().requires_grad_())
    stand_in.entropies = scored.entropy.clone().requires_grad_()
    loss = trainer._compute_loss(stand_in, learner, inputs)
    gradients = torch.autograd.grad(loss, [learner.logp, stand_in.entropies], allow_unused=True, materialize_grads=True)
    report = {name: values[-1] for name, values in stand_in._metrics["train"].items()}
    return Outcome(loss.detach(), gradients, inputs["advantages"], report)


def pack(mask: Tensor) -> Batch:
    """Replies after a prompt of one token; groups follow each other."""
    rows = zip(mask, lengths_of(mask), strict=True)
    return pack_episodes([([7] * (length + 1), [False, *row[:length].tolist()]) for row, length in rows]).with_fields(
        rewards=REWARDS, group_index=torch.arange(len(mask)).div(GROUP_SIZE, rounding_mode="floor")
    )


def advantages_of(algo: Algorithm, batch: Batch) -> Tensor:
    """[T], from rewards on, as an assembler makes them."""
    rewards, factors, _ = algo.scaled_rewards(batch, {})
    batch, _ = algo.penalised(replace_rewards(batch, rewards, factors), {})
    return algo.scaled_advantages(algo.advantage(batch), batch, {})[0]


def of_drumroll(section: dict[str, Any], scored: Scored, constant_length: int = BUDGET) -> Outcome:
    algo, batch = build_algorithm(AlgoConfig.model_validate(section)), pack(scored.mask)
    inside = batch.loss_mask

    def packed(values: Tensor) -> Tensor:
        return torch.zeros(batch.num_tokens).masked_scatter(inside, values[scored.mask])

    given = batch.with_fields(**{name: packed(getattr(scored, name)) for name in ("old_logp", "behaviour_logp", "ref_logp")})
    advantages = advantages_of(algo, given)
    logp, entropy = packed(scored.logp).requires_grad_(), packed(scored.entropy).requires_grad_()
    outcome = algo.loss(logp, given.with_fields(advantages=advantages, entropy=entropy))
    loss = (outcome.loss * algo.weights(batch, constant_length)).sum()
    gradients = torch.autograd.grad(loss, [logp, entropy], allow_unused=True, materialize_grads=True)
    padded = [torch.zeros(scored.mask.shape).masked_scatter(scored.mask, gradient[inside]) for gradient in gradients]
    report = {name: float(value[inside].mean()) for name, value in outcome.metrics.items()}
    return Outcome(loss.detach(), (padded[0], padded[1]), advantages[last_tokens(batch)], report)


def check(ours: Outcome, theirs: Outcome) -> None:
    torch.testing.assert_close(ours.advantages, theirs.advantages)
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(ours.gradients, theirs.gradients)
    assert ours.gradients[0].any()


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
PPO = {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}
KL = {"coef": 0.3, "estimator": "k3"}


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        pytest.param({"loss_type": "grpo", **CLIP}, {"loss": PPO, "aggregation": "sequence_mean"}, id="grpo"),
        pytest.param({"loss_type": "bnpo", **CLIP}, {"loss": PPO, "aggregation": "token_mean"}, id="bnpo"),
        pytest.param({"loss_type": "dapo", **CLIP}, {"loss": PPO, "aggregation": "token_mean"}, id="dapo"),
        pytest.param({"loss_type": "dr_grpo", **CLIP}, {"loss": PPO, "aggregation": "constant_length"}, id="dr_grpo"),
        pytest.param(
            {"loss_type": "grpo", "epsilon": 0.1},
            {"loss": {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.1}, "aggregation": "sequence_mean"},
            id="equal bounds",
        ),
        pytest.param(
            {"loss_type": "grpo", "beta": 0.3, **CLIP}, {"loss": PPO, "aggregation": "sequence_mean", "kl": KL}, id="grpo with KL"
        ),
        pytest.param({"loss_type": "dapo", "beta": 0.3, **CLIP}, {"loss": PPO, "aggregation": "token_mean", "kl": KL}, id="dapo with KL"),
    ],
)
def test_the_clipped_loss_is_that_of_trl(trl: Any, settings: dict[str, Any], section: dict[str, Any]) -> None:
    scored = Scored.draw(reply_mask())
    ours, theirs = of_drumroll({**SECTION, **section}, scored), of_trl(trl, "GRPO", scored, **SETTINGS, **settings)
    check(ours, theirs)
    assert 0 < ours.report["clip_fraction"] == pytest.approx(theirs.report["clip_ratio/region_mean"])
    assert ours.report.get("kl") == pytest.approx(theirs.report.get("kl"))


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        pytest.param(
            {"loss_type": "grpo", "delta": 1.4, **CLIP}, {"loss": {**PPO, "dual_clip": 1.4}, "aggregation": "sequence_mean"}, id="dual clip"
        ),
        pytest.param(
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
            {"loss": {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.1}, "aggregation": "sequence_mean"},
            id="gspo",
        ),
        pytest.param(
            {"loss_type": "cispo", "epsilon_high": 1.2}, {"loss": {"kind": "cispo", "cap": 1.2}, "aggregation": "token_mean"}, id="cispo"
        ),
        # TRL's bonus is of the mean over tokens whatever the loss's aggregation is; ours goes by the aggregation.
        pytest.param(
            {"loss_type": "bnpo", "entropy_coef": 0.05, **CLIP},
            {"loss": PPO, "aggregation": "token_mean", "entropy_coef": 0.05},
            id="entropy bonus",
        ),
    ],
)
def test_other_losses_are_those_of_trl(trl: Any, settings: dict[str, Any], section: dict[str, Any]) -> None:
    scored = Scored.draw(reply_mask())
    ours = of_drumroll({**SECTION, **section}, scored)
    check(ours, of_trl(trl, "GRPO", scored, **SETTINGS, **settings))
    assert ours.report["clip_fraction"] > 0


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
@pytest.mark.parametrize(
    ("mode", "correction"),
    [
        ("token_truncate", {"kind": "truncated_is", "level": "token", "cap": 1.1}),
        ("sequence_truncate", {"kind": "truncated_is", "level": "sequence", "cap": 1.1}),
        ("token_mask", {"kind": "masked_is", "level": "token", "bounds": [0.7, 1.1]}),
        ("sequence_mask", {"kind": "masked_is", "level": "sequence", "bounds": [0.7, 1.1]}),
    ],
)
def test_corrections_are_those_of_trl(trl: Any, mode: str, correction: dict[str, Any], loss: str) -> None:
    settings: dict[str, Any] = {
        "ppo_clip": {"loss_type": "bnpo", **CLIP},
        "gspo": {"loss_type": "bnpo", "importance_sampling_level": "sequence", **CLIP},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    }[loss]
    section: dict[str, Any] = {"ppo_clip": PPO, "gspo": {**PPO, "kind": "gspo"}, "cispo": {"kind": "cispo", "cap": 1.2}}[loss]
    settings |= {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.1, "beta": 0.3}
    if "mask" in mode:
        settings["vllm_importance_sampling_clip_min"] = 0.7
    scored = Scored.draw(reply_mask())
    ours = of_drumroll({**SECTION, "loss": section, "correction": correction, "kl": KL}, scored)
    check(ours, of_trl(trl, "GRPO", scored, **SETTINGS, **settings))
    assert 0 < ours.report["correction_truncated"] < 1


def test_a_reply_without_tokens_of_the_policy(trl: Any) -> None:
    """TRL's mean over sequences counts it as one whose loss is 0; ours is over those that have such a token."""
    scored = Scored.draw(reply_mask(holes={1: (0,)}))
    ours = of_drumroll({**SECTION, "loss": PPO, "aggregation": "sequence_mean"}, scored)
    theirs = of_trl(trl, "GRPO", scored, **SETTINGS, **CLIP, loss_type="grpo")
    torch.testing.assert_close(ours.loss * 5 / 6, theirs.loss)
    torch.testing.assert_close(ours.gradients[0] * 5 / 6, theirs.gradients[0])


def test_the_corrected_kl_of_trl_has_the_gradient_of_k2(trl: Any) -> None:
    """TRL's k3 times the ratio: where the policy is the one that sampled, its gradient is that of k2, and its value that of k3."""
    drawn = Scored.draw(reply_mask())
    scored = replace(drawn, logp=drawn.old_logp)
    ours = of_drumroll({**SECTION, "loss": PPO, "aggregation": "token_mean", "kl": {**KL, "estimator": "k2"}}, scored)
    theirs = of_trl(trl, "GRPO", scored, **{**SETTINGS, "use_bias_correction_kl": True}, loss_type="bnpo", beta=KL["coef"])
    torch.testing.assert_close(ours.gradients, theirs.gradients)


def test_advantages_of_grpo_are_those_of_trl(trl: Any) -> None:
    """TRL's deviation is that of a sample, √(G / (G - 1)) times that of the population, which is ours."""
    scored = Scored.draw(reply_mask())
    theirs = of_trl(trl, "GRPO", scored, scale_rewards="group").advantages
    larger = sqrt(GROUP_SIZE / (GROUP_SIZE - 1))
    torch.testing.assert_close(grpo(pack(scored.mask), eps=1e-4 / larger) / larger, theirs)


RLOO = {"advantage": {"kind": "rloo"}, "loss": {"kind": "policy_gradient"}, "aggregation": "constant_length"}


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        pytest.param({"beta": 0.0}, {}, id="plain"),
        pytest.param({"beta": 0.3}, {"kl": {"coef": 0.3, "estimator": "k1", "applied_to": "reward"}}, id="KL in the rewards"),
        pytest.param({"beta": 0.0, "reward_clip_range": (-1.0, 0.6)}, {"reward_scaling": {"clip": [-1.0, 0.6]}}, id="clipped rewards"),
    ],
)
def test_rloo_is_that_of_trl(trl: Any, settings: dict[str, Any], section: dict[str, Any]) -> None:
    """TRL's loss is a clipped ratio of whole replies, ours the policy gradient: where the policy is the one that sampled, values differ and
    gradients are the same, if every token counts the same (`constant_length`)."""
    drawn = Scored.draw(reply_mask(holes={}))
    scored = replace(drawn, logp=drawn.old_logp)
    ours, theirs = of_drumroll({**RLOO, **section}, scored, constant_length=1), of_trl(trl, "RLOO", scored, **settings)
    torch.testing.assert_close(ours.advantages, theirs.advantages)
    torch.testing.assert_close(ours.gradients[0], theirs.gradients[0])


def test_normalised_advantages_are_those_of_trl(trl: Any) -> None:
    """TRL's are over replies with the deviation of a sample and an eps of 1e-4, ours over tokens with that of the population and 1e-6."""
    mask = reply_mask(lengths=(4,) * 6, holes={})
    theirs = of_trl(trl, "RLOO", Scored.draw(mask), normalize_advantages=True, beta=0.0).advantages
    algo = build_algorithm(AlgoConfig.model_validate({**RLOO, "advantage_scaling": {"normalise": "batch"}}))
    batch = pack(mask)
    ours = advantages_of(algo, batch)[batch.loss_mask].view(mask.shape)[:, 0]
    torch.testing.assert_close(ours * sqrt((len(mask) - 1) / len(mask)), theirs, rtol=2e-4, atol=0)


def test_log_probabilities_and_entropies_are_those_of_trl(trl: Any) -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    from drumroll.backends.train.fsdp2 import _chosen

    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)) * 3
    targets = torch.arange(6)
    temperature = torch.full((6,), 0.7)
    logp, entropy = _chosen(logits, targets, [temperature, torch.ones(6), torch.zeros(6, dtype=torch.int64)], truncates=False)
    torch.testing.assert_close(logp, selective_log_softmax(logits / 0.7, targets))
    torch.testing.assert_close(entropy, entropy_from_logits(logits / 0.7))


# Preference losses.

PAIRS = [{"prompt": f"{n}{n + 1}=", "chosen": "12" * (n + 1), "rejected": "987"[: n + 1], "margin": 0.3 * n} for n in range(3)]
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.5}


class Tiny:
    """A tokenizer of characters, and models that differ by their seed."""

    def __init__(self) -> None:
        from drumroll.models.scratch import scratch_tokenizer

        self.tokenizer = scratch_tokenizer("0123456789=")

    def model(self, seed: int, head: str = "CausalLM") -> Any:
        import transformers

        ids = {name: getattr(self.tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        torch.manual_seed(seed)
        return getattr(transformers, f"LlamaFor{head}")(
            transformers.LlamaConfig(vocab_size=len(self.tokenizer), num_labels=1, **SIZE, **ids)
        )


@dataclass(frozen=True)
class Rows:
    """Prompts with replies, padded on the right, [R, L]."""

    ids: Tensor
    is_real: Tensor
    mask: Tensor
    """Tokens of the replies."""

    def batch(self) -> Batch:
        rows = zip(self.ids, self.is_real, self.mask, strict=True)
        return pack_episodes([(ids[real].tolist(), mask[real].tolist()) for ids, real, mask in rows])

    def pairs(self) -> Batch:
        """Where all chosen replies come before all rejected ones."""
        half = len(self.ids) // 2
        return self.batch().with_fields(
            rewards=torch.tensor([1.0, -1.0]).repeat_interleave(half), group_index=torch.arange(half).repeat(2), keeps_groups=True
        )

    def logp(self, model: Any) -> Tensor:
        """[T]"""
        logits = model(input_ids=self.ids, attention_mask=self.is_real.long()).logits[:, :-1]
        logp = logits.log_softmax(-1).gather(-1, self.ids[:, 1:, None]).squeeze(-1)
        return torch.cat([torch.zeros(len(logp), 1), logp], 1)[self.is_real]

    def score(self, model: Any) -> Tensor:
        """[T] of a classifier."""
        hidden = model.model(input_ids=self.ids, attention_mask=self.is_real.long()).last_hidden_state
        return model.score(hidden).squeeze(-1)[self.is_real]


def begin(
    trainer: Any, config: Any, folder: Path, rows: Sequence[dict[str, Any]], tiny: Tiny, models: dict[str, Any], **settings: Any
) -> Any:
    """A trainer with all rows in one batch, and that batch."""
    from datasets import Dataset

    args = config(
        output_dir=str(folder),
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        **settings,
    )
    begun = trainer(args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer, **models)
    return begun, next(iter(begun.get_train_dataloader()))


def own(kind: str, values: Tensor, batch: Batch, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Loss and report, as a trainer makes them."""
    schema = REGISTRY.lookup("preference_loss", kind).schema(PreferenceConfig)
    loss = build_preference(schema.model_validate({"kind": kind, "data": {"path": "none.jsonl"}, **options})).loss
    weight = preference_weights(batch)
    outcome = loss(values, batch)
    return (outcome.loss * weight).sum(), {name: float((value * weight).sum()) for name, value in outcome.weighted.items()}


def check_learning(ours: Tensor, theirs: Tensor, model: Any) -> None:
    """The same loss, and the same gradients of all weights."""
    torch.testing.assert_close(ours, theirs)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = [torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True) for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert any(gradient.any() for gradient in gradients[0])


@pytest.mark.parametrize(
    ("settings", "num_pairs", "kind", "options"),
    [
        pytest.param({"loss_type": ["sigmoid"]}, 3, "dpo", {}, id="dpo"),
        # TRL's `sigmoid` does not smooth; its `aot` sorts what it compares, which is nothing where there is one pair.
        pytest.param({"loss_type": ["aot"], "label_smoothing": 0.1}, 1, "dpo", {"label_smoothing": 0.1}, id="smoothed dpo"),
        # TRL's IPO is of means per token.
        pytest.param({"loss_type": ["ipo"]}, 3, "ipo", {"per_token": True}, id="ipo"),
    ],
)
def test_losses_of_pairs_are_those_of_trl(
    trl: Any, settings: dict[str, Any], num_pairs: int, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    tiny = Tiny()
    policy, reference = tiny.model(0), tiny.model(1)
    models = {"model": policy, "ref_model": reference}
    trainer, inputs = begin(trl.DPOTrainer, trl.DPOConfig, tmp_path, PAIRS[-num_pairs:], tiny, models, beta=0.3, **settings)
    rows = Rows(inputs["input_ids"], inputs["attention_mask"].bool(), inputs["completion_mask"].bool())
    batch = rows.pairs().with_fields(ref_logp=rows.logp(reference).detach())
    loss, report = own(kind, rows.logp(policy), batch, beta=0.3, **options)
    check_learning(loss, trainer.compute_loss(policy, inputs), policy)
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert report["chosen_logp"] == pytest.approx(theirs["logps/chosen"], rel=1e-5)
    assert report["rejected_logp"] == pytest.approx(theirs["logps/rejected"], rel=1e-5)
    if kind == "dpo":  # of IPO TRL reports other scores than it compares
        assert report["margin"] == pytest.approx(theirs["rewards/margins"], rel=1e-5)
        assert report["accuracy"] == pytest.approx(theirs["rewards/accuracies"])


def test_simpo_is_that_of_trl(trl: Any, tmp_path: Path) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    tiny = Tiny()
    policy = tiny.model(0)
    settings = {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.6, "cpo_alpha": 0.0, "remove_unused_columns": False}
    trainer, inputs = begin(CPOTrainer, CPOConfig, tmp_path, PAIRS, tiny, {"model": policy}, **settings)
    names = ("input_ids", "attention_mask", "labels")
    padding = {"input_ids": tiny.tokenizer.pad_token_id, "attention_mask": 0, "labels": -100}
    ids, is_real, labels = (
        torch.nn.utils.rnn.pad_sequence([*inputs[f"chosen_{name}"], *inputs[f"rejected_{name}"]], True, padding[name]) for name in names
    )
    rows = Rows(ids, is_real.bool(), labels != -100)
    loss, _ = own("simpo", rows.logp(policy), rows.pairs(), beta=1.5, gamma=0.6)
    check_learning(loss, trainer.compute_loss(policy, inputs), policy)


def test_ipo_of_whole_replies_is_that_of_trl(trl: Any) -> None:
    """TRL has it without a reference, which is one that gives every token the log-probability 0."""
    from trl.experimental.cpo import CPOTrainer

    generator = torch.Generator().manual_seed(0)
    rows = Rows(torch.ones(6, 5, dtype=torch.int64), torch.ones(6, 5, dtype=torch.bool), torch.arange(5).expand(6, 5) > 0)
    logp = -torch.rand(6, 5, generator=generator)
    stand_in = SimpleNamespace(loss_type="ipo", beta=0.3, alpha=0.0, accelerator=SimpleNamespace(device=torch.device("cpu")))
    theirs, *_ = CPOTrainer.cpo_loss(stand_in, *logp[:, 1:].sum(1).chunk(2))
    loss, _ = own("ipo", logp.flatten(), rows.pairs().with_fields(ref_logp=torch.zeros(30)), beta=0.3)
    torch.testing.assert_close(loss, theirs.mean())


def test_kto_is_that_of_trl(trl: Any, tmp_path: Path) -> None:
    """On TRL's mismatched replies: it takes the reply to the prompt before, ours to the one after."""
    from drumroll.workers.pairs import reference_point

    judged = [{"prompt": f"{n}{n + 1}=", "completion": "12" * (n + 1), "label": n % 2 == 0} for n in range(4)]
    weights = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    tiny = Tiny()
    policy, reference = tiny.model(0), tiny.model(1)
    trainer, inputs = begin(
        trl.KTOTrainer, trl.KTOConfig, tmp_path, judged, tiny, {"model": policy, "ref_model": reference}, loss_type="kto", **weights
    )
    rows, mismatched = (
        Rows(inputs[f"{which}input_ids"], inputs[f"{which}attention_mask"].bool(), inputs[f"{which}completion_mask"].bool())
        for which in ("", "KL_")
    )
    point = reference_point(mismatched.batch(), mismatched.logp(policy).detach(), mismatched.logp(reference).detach())
    batch = rows.batch().with_fields(
        rewards=inputs["label"] * 2.0 - 1.0, ref_logp=rows.logp(reference).detach(), baseline=torch.full((len(judged),), point)
    )
    loss, report = own("kto", rows.logp(policy), batch, **weights)
    check_learning(loss, trainer.compute_loss(policy, inputs), policy)
    assert 0 < report["reference_point"] == pytest.approx(trainer._metrics["train"]["kl"][-1], abs=1e-5)


def test_the_reward_models_loss_is_that_of_trl(trl: Any, tmp_path: Path) -> None:
    tiny = Tiny()
    model = tiny.model(0, head="SequenceClassification")
    trainer, inputs = begin(trl.RewardTrainer, trl.RewardConfig, tmp_path, PAIRS, tiny, {"model": model}, center_rewards_coefficient=0.05)
    is_real = inputs["attention_mask"].bool()
    is_last = torch.arange(is_real.shape[1]) == is_real.sum(1, keepdim=True) - 1
    rows = Rows(inputs["input_ids"], is_real, is_last)
    batch = rows.pairs().with_fields(baseline=torch.cat([inputs["margin"], torch.zeros(len(PAIRS))]))
    loss, report = own("reward_model", rows.score(model), batch, centre_coef=0.05)
    check_learning(loss, trainer.compute_loss(model, inputs), model)
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert (report["margin"], report["accuracy"]) == pytest.approx((theirs["margin"], theirs["accuracy"]), rel=1e-5)
