"""The weights of a decoder of the Llama family, joined where one product does for several.

    hidden ─▶ norm ─▶ q, k, v in one product ─▶ turned, stored ─▶ attention ─▶ output ─▶ + norm ─▶ gate, up in one product ─▶ down ─▶ +

`take_apart` takes them out of transformers' modules, `llama_folder` reads them from files. `lean` computes with them in plain torch,
`fused` in kernels of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drumroll.backends.llama_folder import Parts, Shape, why_not_taken
from drumroll.backends.offload import Shelf


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    before_attention: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


def why_not_taken_model(model: Any) -> str:
    """What keeps a model of transformers from being computed here, or nothing."""
    return why_not_taken(model.config.to_dict(), [name for name, _ in model.named_parameters()])


def take_apart(model: Any, context: int) -> Parts:
    """The parts of a transformers model, which is empty afterwards, for up to `context` positions."""
    shape = Shape.of(model.config.to_dict())
    embedding = model.model.embed_tokens.weight
    cos, sin = model.model.rotary_emb(embedding[:1, None, :], torch.arange(context, device=embedding.device)[None])
    half = shape.head_dim // 2
    weights = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    for module in model.modules():
        module._parameters.clear()  # what is joined below is what counts from now on
    return Parts(shape, weights, cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


class LlamaWeights:
    """Joins the parts of a decoder, whose `weights` are empty afterwards."""

    def __init__(self, parts: Parts) -> None:
        shape, self._parts = parts.shape, parts.weights
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.hidden_size, self.eps = shape.hidden_size, shape.eps
        self.scale = self.head_dim**-0.5
        self.by_name: dict[str, Tensor] = {}
        """Every weight under transformers' name for it; some are parts of larger ones here."""
        self.embedding = self._named("model.embed_tokens.weight")
        self.norm = self._named("model.norm.weight")
        head = self._parts.pop("lm_head.weight", self.embedding)
        is_tied = head.data_ptr() == self.embedding.data_ptr()
        self.head = self.by_name["lm_head.weight"] = self.embedding if is_tied else head
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.cos, self.sin = parts.cos, parts.sin
        self.layers = [self._layer(f"model.layers.{number}.") for number in range(shape.num_layers)]
        self._shelf = Shelf()

    def to(self, device: torch.device) -> None:
        """Move every weight; names go on to stand for parts of the larger ones."""
        there_already: dict[int, Tensor] = {}
        if device.type == "cpu":
            self._shelf.clear()

        def move(tensor: Tensor) -> Tensor:
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in there_already:
                there_already[id(base)] = self._shelf.moved(base, device)
            there = there_already[id(base)]
            return there if base is tensor else there[tensor.storage_offset() // tensor.stride(0) :][: tensor.shape[0]]

        self.by_name = {name: move(tensor) for name, tensor in self.by_name.items()}
        self.embedding, self.head, self.norm, self.cos, self.sin = map(move, (self.embedding, self.head, self.norm, self.cos, self.sin))
        self.layers = [
            Layer(
                before_attention=move(layer.before_attention),
                qkv=move(layer.qkv),
                qkv_bias=None if layer.qkv_bias is None else move(layer.qkv_bias),
                head_norms=None if layer.head_norms is None else (move(layer.head_norms[0]), move(layer.head_norms[1])),
                out=move(layer.out),
                before_mlp=move(layer.before_mlp),
                gate_up=move(layer.gate_up),
                down=move(layer.down),
            )
            for layer in self.layers
        ]
        self.device = device

    def _layer(self, prefix: str) -> Layer:
        attention, projections = f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj")
        has_bias, has_norms = f"{attention}q_proj.bias" in self._parts, f"{attention}q_norm.weight" in self._parts
        return Layer(
            before_attention=self._named(f"{prefix}input_layernorm.weight"),
            qkv=self._joined([f"{attention}{name}.weight" for name in projections]),
            qkv_bias=self._joined([f"{attention}{name}.bias" for name in projections]) if has_bias else None,
            head_norms=(self._named(f"{attention}q_norm.weight"), self._named(f"{attention}k_norm.weight")) if has_norms else None,
            out=self._named(f"{attention}o_proj.weight"),
            before_mlp=self._named(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._joined([f"{prefix}mlp.{name}.weight" for name in ("gate_proj", "up_proj")]),
            down=self._named(f"{prefix}mlp.down_proj.weight"),
        )

    def _named(self, name: str) -> Tensor:
        self.by_name[name] = self._parts.pop(name)
        return self.by_name[name]

    def _joined(self, names: list[str]) -> Tensor:
        parts = [self._parts.pop(name) for name in names]
        whole = torch.cat(parts)
        for name, view in zip(names, torch.split(whole, [len(part) for part in parts]), strict=True):
            self.by_name[name] = view
        return whole
