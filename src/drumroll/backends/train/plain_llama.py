"""A decoder of the Llama family as a module that learns, on the CPU, without transformers: its import takes longer than all else
that a trainer of a small model does before its first step, and most of its small operations are one here.

    hidden ─▶ norm ─▶ q, k, v in one product ─▶ turned ─▶ attention ─▶ output ─▶ + norm ─▶ gate, up in one product ─▶ down ─▶ +

Parameters have the names and shapes that they have in the model's files; what is joined is joined anew in every pass. Products of matrices
are a third slower where the rows of their results do not begin at cache lines, so zeros are laid behind an inner width that is odd for a
processor: what they are multiplied with adds nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from drumroll.backends.attention import PackedLayout, packed_attention
from drumroll.backends.llama_folder import LlamaFolder
from drumroll.backends.products import product
from drumroll.backends.train.plain_functions import angles, gated, normed, turned

LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's parameters."""

    before_attention: Tensor
    qkv: tuple[Tensor, ...]
    qkv_bias: tuple[Tensor, ...]
    """Empty where there is none, like `head_norms`."""
    head_norms: tuple[Tensor, ...]
    out: Tensor
    before_mlp: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class PlainLlama(nn.Module):
    """Answers like a causal language model of transformers, where `Fsdp2` asks one."""

    def __init__(self, found: LlamaFolder, dtype: torch.dtype = torch.float32) -> None:
        """Computes in whatever dtype its parameters have; they begin in this one."""
        super().__init__()
        self._folder, self._shape = found.folder, found.shape
        self.config = SimpleNamespace(**found.config)
        self._padding: int | None = found.config.get("pad_token_id")
        is_tied = bool(found.config.get("tie_word_embeddings", False))
        self.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        for name, tensor in found.weights(dtype).items():
            _plant(self, name, nn.Parameter(tensor))
        self._ends = self.get_parameter("model.embed_tokens.weight"), self.get_parameter("model.norm.weight")
        """In a tuple, where torch does not take them for further parameters."""
        head = self._ends[0] if is_tied else self.get_parameter("lm_head.weight")
        self.lm_head = _Head(head.shape[1], head.shape[0], bias=False, device="meta")
        self.lm_head.weight = head
        self._layers = [self._layer(f"model.layers.{number}.") for number in range(found.shape.num_layers)]
        self._frequencies = found.frequencies

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, packed: PackedLayout, **others: Any) -> Any:
        """[1, T] tokens at their positions → `.logits` [1, R, V] after those that are asked for."""
        tokens, norm = self._ends
        cos, sin = angles(position_ids[0], self._frequencies, tokens.dtype)
        residual = embedding(input_ids[0], tokens, padding_idx=self._padding)  # a padding token's row does not learn
        for layer in self._layers:
            residual = residual + self._attended(layer, self._normed(residual, layer.before_attention), cos, sin, packed)
            residual = residual + self._gated(layer, self._normed(residual, layer.before_mlp))
        return SimpleNamespace(logits=self.lm_head(self._normed(residual.index_select(0, logits_to_keep), norm))[None])

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor], **others: Any) -> None:
        """Write weights as transformers does, but all into one file: they are on the CPU anyway."""
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, folder / "model.safetensors", {"format": "pt"})

    def write_config(self, folder: Path, dtype: str) -> None:
        """`dtype` is that of the weights beside it."""
        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)  # an older name
        (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")

    def _layer(self, prefix: str) -> _Layer:
        parameters = dict(self.named_parameters())

        def those(*names: str) -> tuple[Tensor, ...]:
            return tuple(parameters[prefix + name] for name in names if prefix + name in parameters)

        projections = [f"self_attn.{name}_proj" for name in "qkv"]
        (before_attention, out, before_mlp, gate, up, down) = those(
            "input_layernorm.weight",
            "self_attn.o_proj.weight",
            "post_attention_layernorm.weight",
            *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        )
        return _Layer(
            before_attention=before_attention,
            qkv=those(*(f"{name}.weight" for name in projections)),
            qkv_bias=those(*(f"{name}.bias" for name in projections)),
            head_norms=those("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
            out=out,
            before_mlp=before_mlp,
            gate=gate,
            up=up,
            down=down,
        )

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return normed(hidden, weight, self._shape.eps)

    def _attended(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, packed: PackedLayout) -> Tensor:
        """[T, N] → [T, N]; `cos` and `sin` are [T, 1, D]."""
        num_heads, num_kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        qkv = product(hidden, torch.cat(layer.qkv), torch.cat(layer.qkv_bias) if layer.qkv_bias else None)
        turning, values = torch.split(qkv.view(len(hidden), -1, self._shape.head_dim), [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.head_norms:
            parts = zip(torch.split(turning, [num_heads, num_kv_heads], dim=1), layer.head_norms, strict=True)
            turning = torch.cat([self._normed(heads, weight) for heads, weight in parts], dim=1)
        queries, keys = torch.split(turned(turning, cos, sin), [num_heads, num_kv_heads], dim=1)
        queries, keys, values = (states.transpose(0, 1)[None] for states in (queries, keys, values))
        gathered, _ = packed_attention(self, queries, keys, values, None, packed)
        return product(gathered.reshape(len(hidden), -1), layer.out)

    def _gated(self, layer: _Layer, hidden: Tensor) -> Tensor:
        padding = -len(layer.gate) % (LINE_BYTES // layer.gate.element_size())
        nothing = [layer.gate.new_zeros(padding, layer.gate.shape[1])] if padding else []
        opened = gated(product(hidden, torch.cat((layer.gate, *nothing, layer.up, *nothing))))
        return product(opened, pad(layer.down, (0, padding)) if padding else layer.down)


class _Head(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight)


def _plant(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter where its name says: `model.norm.weight` is the `weight` of the module `norm` of the module `model`."""
    *path, own = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(own, parameter)
