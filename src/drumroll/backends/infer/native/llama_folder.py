"""A decoder of the Llama family straight from its folder: config.json and safetensors.

Importing transformers takes longer than everything else that an engine for a small model does before it can serve. What a config may say is
therefore looked through strictly: whatever is not plainly one of these decoders is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drumroll.backends.infer.desk import Limits, limits_from
from drumroll.backends.infer.native.layers import Parts, Shape, why_not_taken
from drumroll.errors import ModelError
from drumroll.models.folder import weight_files

PLAIN_ROTATION = frozenset({"rope_type", "rope_theta"})
"""All that may be said of rotations by position that are computed here."""


class LlamaFolder:
    """What a folder says of its model. `open` gives None where transformers has to read it."""

    def __init__(self, folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], theta: float, files: list[Path]) -> None:
        self.folder = folder
        self.shape = Shape.of(config)
        self._config, self._generation, self._theta, self._files = config, generation, theta, files

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

    def limits(self, context_tokens: int | None) -> Limits:
        """`context_tokens` is what the user asks for."""
        ends = [source.get("eos_token_id") for source in (self._config, self._generation)]
        return limits_from(self._config.get("max_position_embeddings"), self._config["vocab_size"], ends, context_tokens, self.folder)

    def read(self, dtype: torch.dtype, context: int) -> Parts:
        """The weights, for up to `context` positions."""
        weights = dict(self._weights(dtype))
        missing = sorted(name for name, shape in self._expected().items() if tuple(weights.get(name, torch.empty(0)).shape) != shape)
        if missing:
            raise ModelError(f"'{self.folder}' lacks weights of its model, or has them in other shapes: {', '.join(missing[:5])}")
        half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.int64).float() / self.shape.head_dim
        angles = torch.arange(context).float()[:, None] * (1.0 / self._theta**half)[None, :]
        return Parts(self.shape, weights, angles.cos().to(dtype), angles.sin().to(dtype))

    def _weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for file in self._files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (it is no dictionary)
                    yield name, tensors.get_tensor(name).to(dtype, copy=True)

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Every weight that must be there, and its shape."""
        shape, width = self.shape, self._config["intermediate_size"]
        hidden, query, key = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        names: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self._config["vocab_size"], hidden),
            "model.norm.weight": (hidden,),
        }
        if not self._config.get("tie_word_embeddings", False):
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
            if self._config["model_type"] == "qwen2":
                of_layer[f"self_attn.{name}_proj.bias"] = (rows,)
            if self._config["model_type"] == "qwen3" and name != "v":
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


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())
