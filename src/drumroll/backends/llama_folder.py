"""A decoder of the Llama family straight from its folder: config.json and safetensors.

Importing transformers takes longer than everything else that an engine or a trainer of a small model does before it can begin. What a
config may say is therefore looked through strictly: whatever is not plainly one of these decoders is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drumroll.errors import ModelError
from drumroll.models.folder import LLAMA_FAMILY, weight_files
from drumroll.models.loading import check_complete

PLAIN_ROTATION = frozenset({"rope_type", "rope_theta"})
"""All that may be said of rotations by position that are computed here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What such a decoder computes, besides its weights."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """`config` as in a config.json; a field that is missing there is a KeyError."""
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            eps=config["rms_norm_eps"],
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """A decoder in pieces. `weights` are whole, by transformers' names; a tied head is there under both of its names, or under one."""

    shape: Shape
    weights: dict[str, Tensor]
    cos: Tensor
    """[positions, head_dim / 2], and `sin` likewise: by how much a token at each position is turned."""
    sin: Tensor


def why_not_taken(config: Mapping[str, Any], names: Collection[str]) -> str:
    """What keeps a model with this config, and weights of these names, from being computed here, or nothing."""
    if config.get("model_type") not in LLAMA_FAMILY:
        return f"it is of the type {config.get('model_type')}"
    shape = Shape.of(config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    reasons = {
        f"its heads have {shape.head_dim} numbers, which do not come in pairs": shape.head_dim % 2 == 1,
        "it attends within a window": window is not None,
        f"its activation is {config.get('hidden_act')}": config.get("hidden_act") != "silu",
        "it has biases outside its queries, keys and values": any(
            name.endswith(".bias") and not name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for name in names
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class LlamaFolder:
    """What a folder says of its model. `open` gives None where transformers has to read it."""

    def __init__(self, folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], theta: float, files: list[Path]) -> None:
        self.folder = folder
        self.shape = Shape.of(config)
        self.config, self.generation, self._theta, self._files = config, generation, theta, files

    @classmethod
    def open(cls, folder: Path) -> LlamaFolder | None:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            generation_file = folder / "generation_config.json"
            generation = json.loads(generation_file.read_text(encoding="utf-8")) if generation_file.exists() else {}
            files = weight_files(folder)
            theta = _theta(config)
            names = [name for file in files for name in _names(file)]
            if theta is None or why_not_taken(config, names) or set(config.get("layer_types") or ()) - {"full_attention"}:
                return None
            return cls(folder, config, generation, theta, files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ModelError, SafetensorError):
            return None  # transformers says what is wrong with it

    def read(self, dtype: torch.dtype, context: int) -> Parts:
        """All that an engine needs, for up to `context` positions."""
        angles = torch.arange(context).float()[:, None] * self.frequencies
        return Parts(self.shape, self.weights(dtype), angles.cos().to(dtype), angles.sin().to(dtype))

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """In a fixed order; a tied head is not among them."""
        expected = self._expected()
        found = {name: tensor for file in self._files for name, tensor in _tensors(file, expected, dtype)}
        check_complete(self.folder, [name for name in expected if name not in found])
        others = [(name, tuple(found[name].shape), shape) for name, shape in expected.items() if found[name].shape != shape]
        if others:
            told = ", ".join(f"{name} is {list(got)} and not {list(wanted)}" for name, got, wanted in others[:3])
            raise ModelError(f"'{self.folder}': weights have other shapes than its config.json says: {told}")
        return {name: found[name] for name in expected}

    @property
    def frequencies(self) -> Tensor:
        """[D / 2] by what angle each pair of numbers of a head is turned from one position to the next."""
        half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.int64).float() / self.shape.head_dim
        return 1.0 / self._theta**half

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Every weight that must be there, and its shape."""
        shape, width = self.shape, self.config["intermediate_size"]
        hidden, query, key = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        names: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.config["vocab_size"], hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.config.get("tie_word_embeddings", False):
            names["lm_head.weight"] = names["model.embed_tokens.weight"]
        of_layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, query),
            "mlp.gate_proj.weight": (width, hidden),
            "mlp.up_proj.weight": (width, hidden),
            "mlp.down_proj.weight": (hidden, width),
        }
        for name, rows in (("q", query), ("k", key), ("v", key)):
            of_layer[f"self_attn.{name}_proj.weight"] = (rows, hidden)
            if self.config["model_type"] == "qwen2":
                of_layer[f"self_attn.{name}_proj.bias"] = (rows,)
            if self.config["model_type"] == "qwen3" and name != "v":
                of_layer[f"self_attn.{name}_norm.weight"] = (shape.head_dim,)
        return names | {f"model.layers.{layer}.{name}": size for layer in range(shape.num_layers) for name, size in of_layer.items()}


def _theta(config: Mapping[str, Any]) -> float | None:
    """The base of a plain rotation; None where the config says more of it, or nothing."""
    said = config.get("rope_parameters")
    if said is None and config.get("rope_scaling") is None:
        said = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    if not isinstance(said, Mapping) or set(said) - PLAIN_ROTATION or said.get("rope_type") != "default":
        return None
    theta = said.get("rope_theta")
    return float(theta) if isinstance(theta, int | float) else None


def _tensors(file: Path, wanted: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (it is no dictionary)
            if name in wanted:
                yield name, tensors.get_tensor(name).to(dtype, copy=True)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())
