"""What a role needs of a device's memory, as a lower bound: what a plan that is refused would certainly have run out of.

Counted are weights, gradients and optimizer state. Activations, caches and the allocator's own share come on top and
depend on settings that may change while a run goes on; so a plan that passes may still need smaller bites.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumroll.config.models import ModelConfig, ParallelConfig, Role
from drumroll.plan.pool import Kind

GIB = 1024**3

MASTER_BYTES = 4
"""A trained weight, its gradient and each of AdamW's two moments are float32 on the rank that owns the shard."""


TRAINER_ROLES: tuple[Role, ...] = ("actor_train", "reference", "teacher", "critic")
"""Roles whose ranks hold one model together."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a role keeps on each of its devices, at least."""

    weights: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = [f"{name} {value / GIB:.1f}" for name, value in (("gradients", self.gradients), ("optimizer", self.optimizer)) if value]
        return ", ".join([f"weights {self.weights / GIB:.1f}", *parts])


def compute_bytes(dtype: str, kind: Kind) -> int:
    """Bytes of one weight as forward passes use it."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and kind == "gpu") else 4


def devices_per_copy(role: Role, num_devices: int, parallel: ParallelConfig) -> int:
    """How many devices hold one copy of the model together: an engine's `tp`; all of a trainer's, or with hybrid sharding some, whatever
    it is that they divide among themselves."""
    if role not in TRAINER_ROLES:
        return parallel.tp
    return parallel.shard * parallel.devices_per_shard if parallel.shard else num_devices


def device_memory(
    role: Role, num_parameters: int, num_devices: int, parallel: ParallelConfig, weight_bytes: int, *, adapters: bool = False
) -> Memory:
    """What each of a role's devices holds of a copy of the model. Where only `adapters` learn, what they take is hardly anything beside
    the weights, which a single trainer holds as passes use them."""
    shard = -(-num_parameters // devices_per_copy(role, num_devices, parallel))
    if role not in ("actor_train", "critic"):
        return Memory(weights=weight_bytes * shard)
    if adapters:
        return Memory(weights=shard * (weight_bytes if num_devices == 1 else MASTER_BYTES))
    return Memory(weights=MASTER_BYTES * shard, gradients=MASTER_BYTES * shard, optimizer=2 * MASTER_BYTES * shard)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models departs from the plainest decoder: RMS norms, gated MLP, no biases, own output matrix."""

    head_dim: int | None = None
    """Where the config does not say; hidden size over heads otherwise."""
    key_value_heads: int | None = None
    """Where the config does not say; as many as there are query heads otherwise."""
    tied: bool = False
    """Whether the output matrix is the embedding where the config does not say."""
    qkv_bias: bool = False
    qk_norms: bool = False
    norms_per_layer: int = 2
    experts: int = 0
    """Where the config does not say."""
    expert_size: int = 0
    """Inner numbers of an expert where the config does not say."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(key_value_heads=8),
    "qwen2": Family(key_value_heads=32, qkv_bias=True),
    "qwen3": Family(head_dim=128, key_value_heads=32, qk_norms=True),
    "qwen3_moe": Family(key_value_heads=4, qk_norms=True, experts=128, expert_size=768),
    "gemma": Family(head_dim=256, key_value_heads=16, tied=True),
    "gemma2": Family(head_dim=256, key_value_heads=4, tied=True, norms_per_layer=4),
    "gemma3_text": Family(head_dim=256, key_value_heads=4, tied=True, qk_norms=True, norms_per_layer=4),
}


def parameter_count(hf_config: Mapping[str, Any]) -> int | None:
    """Parameters of the model that a Hugging Face `config.json` describes; None for a family that is not known here."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    try:
        vocab, hidden, mlp, layers, heads = (
            int(hf_config[name]) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        )
    except (KeyError, TypeError, ValueError):
        return None
    if family is None or heads == 0:
        return None
    # A null in the file means that it does not say.
    head_dim = hf_config.get("head_dim") or family.head_dim or hidden // heads
    key_value_heads = hf_config.get("num_key_value_heads") or family.key_value_heads or heads
    tied = hf_config.get("tie_word_embeddings")
    query, key_value = heads * head_dim, key_value_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * key_value
    if family.qkv_bias:
        attention += query + 2 * key_value
    elif hf_config.get("attention_bias"):
        attention += query + 2 * key_value + hidden
    if family.qk_norms:
        attention += 2 * head_dim
    feed_forward = 3 * hidden * mlp + (2 * mlp + hidden if hf_config.get("mlp_bias") else 0)
    experts = int(hf_config.get("num_experts", hf_config.get("num_local_experts", family.experts)))
    mixed = _mixed_layers(hf_config, layers) if experts else 0
    mixture = experts * hidden * (3 * int(hf_config.get("moe_intermediate_size", family.expert_size)) + 1)  # and the router's rows
    embeddings = vocab * hidden * (1 if (family.tied if tied is None else tied) else 2)
    per_layer = attention + family.norms_per_layer * hidden
    return int(embeddings + layers * per_layer + (layers - mixed) * feed_forward + mixed * mixture + hidden)


def _mixed_layers(hf_config: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts in place of one product."""
    step, plain = int(hf_config.get("decoder_sparse_step") or 1), set(hf_config.get("mlp_only_layers") or ())
    return sum((layer + 1) % step == 0 and layer not in plain for layer in range(layers))


def known_parameters(model: ModelConfig, *, has_scalar_head: bool = False) -> int | None:
    """The model's size as far as the config, or a `config.json` on this machine, tells; None otherwise. With a scalar head it has one row
    in place of an output matrix."""
    head = {"tie_word_embeddings": True} if has_scalar_head else {}
    if model.scratch is not None:
        scratch = model.scratch
        return parameter_count({"vocab_size": len(scratch.characters), **scratch.config, **head, "model_type": scratch.architecture})
    assert model.path is not None, "a model has a path or is made from scratch"
    try:
        hf_config = json.loads((Path(model.path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return parameter_count({**hf_config, **head}) if isinstance(hf_config, dict) else None
