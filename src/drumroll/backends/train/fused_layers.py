"""Norms, rotations and gated products of a model as single GPU kernels, forwards and backwards: Liger's, where they are installed."""

from __future__ import annotations

import inspect
from typing import Any

WANTED = {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}
"""Of Liger's options: everything inside layers; the head is `head`'s."""


def use_fused_layers(model: Any) -> bool:
    """Change the layers of a loaded model in place; whether anything was changed. Values differ by rounding alone."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN
    except ImportError:  # pip install 'drumroll[gpu]'
        return False
    change = KNOWN.get(model.config.model_type)
    if change is None:
        return False
    options = {name: value for name, value in WANTED.items() if name in inspect.signature(change).parameters}
    change(**options, model=model)
    return True
