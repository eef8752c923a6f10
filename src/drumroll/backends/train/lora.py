"""Low-rank adapters (LoRA, arXiv 2106.09685) by way of PEFT: W stays, and B A / rank × alpha is learnt beside it.

Nobody outside the trainer sees adapters: engines, exports and digests get W + alpha / rank × B A under W's name. An export has the adapters
as well, in a folder of their own, for whoever wants to put them onto the original model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from drumroll.errors import ConfigError
from drumroll.models.division import WITH_EP
from drumroll.registry import Options, require

ADAPTER = "default"
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
BASE = "base_layer."
"""What PEFT puts into the names of weights that have adapters."""


class LoraOptions(Options):
    """Learn low-rank adapters in place of the weights. Needs `drumroll[lora]`."""

    rank: PositiveInt = 16
    """Inner width of the adapters."""
    alpha: PositiveFloat = 32.0
    """What adapters add is scaled by this over `rank`."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the layers that get adapters, such as [q_proj, v_proj]; all-linear: every linear layer but the head, of a mixture
    those of its attention."""


class Adapters:
    """The adapters of one model, which is changed in place; everything else in it stops learning, except for a scalar head."""

    def __init__(self, model: Any, options: LoraOptions) -> None:
        require("peft", extra="lora")
        from peft import LoraConfig, inject_adapter_in_model

        self.config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=0.0,
            target_modules=_targets(model, options),
            exclude_modules=["score"] if hasattr(model, "score") else None,
            bias="none",
        )
        try:
            inject_adapter_in_model(self.config, model, ADAPTER)
        except ValueError as error:
            raise ConfigError(f"`trainer.lora.targets`: {error}") from error
        self.scale = options.alpha / options.rank
        self._layers: dict[str, Any] = {}
        """PEFT's layers by the names of the weights that they stand for."""
        for name, module in model.named_modules():
            if hasattr(module, "lora_A") and ADAPTER in module.lora_A:
                self._layers[f"{name}.weight"] = module
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or name.startswith("score."))
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def merged(self, name: str, base: Tensor, whole: Callable[[str, Tensor], Tensor]) -> Tensor:
        """What the weight of this name, which is `base`, amounts to, in its own number type. `whole` makes a whole tensor of what this rank
        holds of a parameter."""
        layer = self._layers.get(name)
        if layer is None:
            return base
        stem = name.removesuffix("weight")
        parts = ((kind, getattr(layer, kind)[ADAPTER].weight) for kind in ("lora_A", "lora_B"))
        down, up = (whole(f"{stem}{kind}.{ADAPTER}.weight", held).float() for kind, held in parts)
        added = self.scale * (up @ down)
        return (base.float() + (added.T if layer.fan_in_fan_out else added)).to(base.dtype)

    def write(self, folder: Path, pieces: dict[str, Tensor], base: str) -> None:
        """The adapters as PEFT reads them, from whole tensors by their names in the model."""
        from safetensors.torch import save_file

        folder.mkdir()
        named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.contiguous() for name, tensor in pieces.items()}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.config.base_model_name_or_path = base
        self.config.save_pretrained(folder)


def _targets(model: Any, options: LoraOptions) -> str | list[str]:
    """The layers that get adapters. PEFT would also take the experts of a mixture, and its router, which are no linear layers."""
    named = options.targets if isinstance(options.targets, str) else list(options.targets)
    if model.config.model_type not in WITH_EP:
        return named
    refused = [name for name in named if name in _OF_EXPERTS] if isinstance(named, list) else []
    if refused:
        raise ConfigError(f"`trainer.lora.targets`: the experts of a {model.config.model_type} cannot have adapters: leave {refused} out.")
    return list(_OF_ATTENTION) if isinstance(named, str) else named


def plain_name(name: str) -> str:
    """The name that a weight has in a model without adapters."""
    return name.replace(BASE, "")
