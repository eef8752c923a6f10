"""The weights of a decoder of the Llama family, taken out of transformers' modules, and joined where one product does for several.

    hidden ─▶ norm ─▶ q, k, v in one product ─▶ turned, stored ─▶ attention ─▶ output ─▶ + norm ─▶ gate, up in one product ─▶ down ─▶ +

`lean` computes with them in plain torch, `fused` in kernels of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumroll.backends.offload import moved

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


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


def why_not_taken(model: Any) -> str:
    """What keeps a model of transformers from being taken apart, or nothing."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"it is of the type {config.model_type}"
    head_dim = head_dim_of(config)
    reasons = {
        f"its heads have {head_dim} numbers, which do not come in pairs": head_dim % 2 == 1,
        "it attends within a window": getattr(config, "sliding_window", None) is not None,
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        "it has biases outside its queries, keys and values": any(
            name.endswith(".bias") and not name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
            for name, _ in model.named_parameters()
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def head_dim_of(config: Any) -> int:
    """Numbers of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class LlamaWeights:
    """Takes the weights out of a transformers model, which is empty afterwards."""

    def __init__(self, model: Any, context: int) -> None:
        config = model.config
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim = head_dim_of(config)
        self.hidden_size: int = config.hidden_size
        self.eps: float = config.rms_norm_eps
        self.scale: float = model.model.layers[0].self_attn.scaling
        self.embedding: Tensor = model.model.embed_tokens.weight
        self.head: Tensor = model.lm_head.weight
        self.norm: Tensor = model.model.norm.weight
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.by_name: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        """Every weight under transformers' name for it; some are parts of larger ones here."""
        self.by_name["lm_head.weight"] = self.head
        self.cos, self.sin = self._angles(model, context)
        self.layers = [self._take(layer, f"model.layers.{number}.") for number, layer in enumerate(model.model.layers)]

    def to(self, device: torch.device) -> None:
        """Move every weight; names go on to stand for parts of the larger ones."""
        there_already: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in there_already:
                there_already[id(base)] = moved(base, device)
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

    def _take(self, layer: Any, prefix: str) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = {"q_proj": attention.q_proj, "k_proj": attention.k_proj, "v_proj": attention.v_proj}
        qkv = self._joined({f"{prefix}self_attn.{name}.weight": one.weight for name, one in projections.items()})
        has_bias = attention.q_proj.bias is not None
        bias = self._joined({f"{prefix}self_attn.{name}.bias": one.bias for name, one in projections.items()}) if has_bias else None
        gate_up = self._joined({f"{prefix}mlp.{name}.weight": getattr(mlp, name).weight for name in ("gate_proj", "up_proj")})
        head_norms = None
        if hasattr(attention, "q_norm"):
            head_norms = (
                self._named(f"{prefix}self_attn.q_norm.weight", attention.q_norm.weight),
                self._named(f"{prefix}self_attn.k_norm.weight", attention.k_norm.weight),
            )
        taken = Layer(
            before_attention=self._named(f"{prefix}input_layernorm.weight", layer.input_layernorm.weight),
            qkv=qkv,
            qkv_bias=bias,
            head_norms=head_norms,
            out=self._named(f"{prefix}self_attn.o_proj.weight", attention.o_proj.weight),
            before_mlp=self._named(f"{prefix}post_attention_layernorm.weight", layer.post_attention_layernorm.weight),
            gate_up=gate_up,
            down=self._named(f"{prefix}mlp.down_proj.weight", mlp.down_proj.weight),
        )
        for module in layer.modules():
            module._parameters.clear()  # the joined copies are what counts from now on
        return taken

    def _named(self, name: str, tensor: Tensor) -> Tensor:
        self.by_name[name] = tensor.detach()
        return self.by_name[name]

    def _joined(self, parts: dict[str, nn.Parameter]) -> Tensor:
        whole = torch.cat([part.detach() for part in parts.values()])
        for name, view in zip(parts, torch.split(whole, [len(part) for part in parts.values()]), strict=True):
            self.by_name[name] = view
        return whole

    def _angles(self, model: Any, context: int) -> tuple[Tensor, Tensor]:
        """[context, head_dim / 2] each, as the model's own module has them."""
        positions = torch.arange(context, device=self.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding[:1, None, :], positions)
        half = self.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
