"""Losses, aggregation, KL and entropy against TRL's values and gradients on the same tensors; skipped where TRL is not installed.

TRL's trainer methods are called on a small stand-in: they compute from padded [B, L] tensors what `algo` computes from packed ones.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drumroll.algo.algorithm import build_algorithm
from drumroll.backends.train.fsdp2 import _chosen
from drumroll.config.models import AlgoConfig
from drumroll.text.packing import pack_demonstrations
from drumroll.types import Batch

trl = pytest.importorskip("trl", reason="TRL is a dependency of development alone")

LENGTHS = (3, 1, 5, 4)
BUDGET = 6


class StandIn:
    """What `_compute_loss` asks of a trainer; whatever a version of TRL asks besides is off."""

    def __init__(self, logp: Tensor, entropy: Tensor, **settings: Any) -> None:
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value, num_processes=1)
        self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1, gradient_accumulation_steps=1)
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.current_gradient_accumulation_steps = 1
        self.top_entropy_quantile = 1.0
        self.max_completion_length = BUDGET
        self.importance_sampling_level = "token"
        self.beta = 0.0
        self._scores = (logp, entropy)
        self.args.delta = settings.pop("delta", None)
        for name, value in settings.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        signature = inspect.signature(trl.GRPOTrainer._get_per_token_logps_and_entropies)
        return (*self._scores, None) if "compute_aux_loss" in signature.parameters else self._scores


def padded() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    size = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(size[1]) < torch.tensor(LENGTHS)[:, None]
    logp, old, ref = (-torch.rand(size, generator=generator) for _ in range(3))
    return {
        "mask": mask,
        "logp": logp,
        "old_logp": old,
        "ref_logp": ref,
        "advantages": torch.tensor([1.0, -0.5, 2.0, -1.5]),
        "entropy": torch.rand(size, generator=generator),
    }


def of_trl(tensors: dict[str, Tensor], **settings: Any) -> tuple[float, Tensor]:
    """Loss, and its gradient by the log-probabilities, [B, L]."""
    mask = tensors["mask"].long()
    logp = tensors["logp"].clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old_logp"],
        "ref_per_token_logps": tensors["ref_logp"],
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(StandIn(logp, tensors["entropy"], **settings), None, inputs)
    (gradient,) = torch.autograd.grad(loss, logp)
    return float(loss.detach()), gradient


def of_drumroll(tensors: dict[str, Tensor], **section: Any) -> tuple[float, Tensor]:
    batch: Batch = pack_demonstrations([([1], [2] * length) for length in LENGTHS])
    algo = build_algorithm(AlgoConfig.model_validate(section))
    mask = tensors["mask"]

    def packed(values: Tensor) -> Tensor:
        return torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, values[mask])

    batch = batch.with_fields(
        advantages=packed(tensors["advantages"][:, None].expand_as(mask)),
        **{name: packed(tensors[name]) for name in ("old_logp", "ref_logp")},
    )
    logp = packed(tensors["logp"]).requires_grad_()
    loss = (algo.loss(logp, batch).loss * algo.weights(batch, BUDGET)).sum()
    (gradient,) = torch.autograd.grad(loss, logp)
    return float(loss.detach()), torch.zeros(mask.shape).masked_scatter(mask, gradient[batch.loss_mask])


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
PPO = {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        ({"loss_type": "grpo", **CLIP}, {"loss": PPO, "aggregation": "sequence_mean"}),
        ({"loss_type": "bnpo", **CLIP}, {"loss": PPO, "aggregation": "token_mean"}),
        ({"loss_type": "dapo", **CLIP}, {"loss": PPO, "aggregation": "token_mean"}),
        ({"loss_type": "dr_grpo", **CLIP}, {"loss": PPO, "aggregation": "constant_length"}),
        ({"loss_type": "grpo", "delta": 1.4, **CLIP}, {"loss": {**PPO, "dual_clip": 1.4}, "aggregation": "sequence_mean"}),
        ({"loss_type": "dapo", "beta": 0.3, **CLIP}, {"loss": PPO, "aggregation": "token_mean", "kl": {"coef": 0.3, "estimator": "k3"}}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
            {"loss": {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.1}, "aggregation": "sequence_mean"},
        ),
        (
            {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.2},
            {"loss": {"kind": "cispo", "cap": 1.2}, "aggregation": "token_mean"},
        ),
    ],
)
def test_loss_and_gradient_are_those_of_trl(settings: dict[str, Any], section: dict[str, Any]) -> None:
    tensors = padded()
    (expected, expected_gradient), (got, gradient) = of_trl(tensors, **settings), of_drumroll(tensors, **section)
    assert got == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def test_entropy_is_that_of_trl() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)) * 3
    settings = [torch.ones(6), torch.ones(6), torch.zeros(6, dtype=torch.int64)]
    _, entropy = _chosen(logits, torch.zeros(6, dtype=torch.int64), settings, truncates=False)
    torch.testing.assert_close(entropy, utils.entropy_from_logits(logits))
