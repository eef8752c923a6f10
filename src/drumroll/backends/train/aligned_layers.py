"""Gated layers whose inner width is odd for a processor, computed at the next width that suits it.

Matrix products on the CPU are a third slower where the rows of their result do not begin at cache lines. Zeros behind the inner width
change no result: what they are multiplied with adds nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import linear, pad

from drumroll.models.folder import LLAMA_FAMILY

FLOATS_PER_LINE = 16


def use_aligned_layers(model: Any) -> bool:
    """Change the gated layers of a loaded model of the Llama family in place, where that pays; whether anything was changed. Names and
    shapes of its weights stay as they are. Values differ by rounding alone."""
    if model.config.model_type not in LLAMA_FAMILY:
        return False
    found = [module for module in model.modules() if hasattr(module, "gate_proj") and module.gate_proj.bias is None]
    odd = [module for module in found if module.gate_proj.out_features % FLOATS_PER_LINE]
    for module in odd:
        module.forward = partial(_aligned, module)
    return bool(odd)


def _aligned(module: Any, hidden: Tensor) -> Tensor:
    padding = -module.gate_proj.out_features % FLOATS_PER_LINE
    gate, up = (linear(hidden, pad(part.weight, (0, 0, 0, padding))) for part in (module.gate_proj, module.up_proj))
    return linear(module.act_fn(gate) * up, pad(module.down_proj.weight, (0, padding)))
