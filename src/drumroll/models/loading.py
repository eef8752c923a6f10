"""The one place where transformers loads weights: a Hugging Face folder → the model in memory, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drumroll.errors import ModelError
from drumroll.models.division import in_files

if TYPE_CHECKING:
    from torch import Tensor

Head = Literal["lm", "classifier"]

_LOADING = threading.Lock()
"""While it builds a model, transformers replaces `PreTrainedModel.tie_weights` for the whole process. Two threads that build at the same
time can leave it replaced for good, and every later model with tied embeddings then lacks its output matrix."""


def load_model(folder: Path | str, head: Head, *, trust_remote_code: bool = False, **options: Any) -> tuple[Any, list[str]]:
    """A model, and the names of the weights that its folder lacks, which transformers drew at random.

    Example: `model, missing = load_model(folder, "lm", dtype=torch.float32)`. `options` are those of transformers' `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()  # a worker's standard error is a log
    logging.set_verbosity_error()  # weights that are missing are the caller's to report
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    try:
        with _LOADING:
            model, report = kind.from_pretrained(
                folder, output_loading_info=True, local_files_only=True, trust_remote_code=trust_remote_code, **options
            )
    except Exception as error:  # transformers, safetensors and models' own code raise of every kind
        wanted = "a causal language model" if head == "lm" else "a classifier"
        raise ModelError(f"'{folder}' cannot be loaded as {wanted}: {type(error).__name__}: {error}") from error
    return model, sorted(report["missing_keys"])


def check_complete(folder: Path | str, missing: list[str]) -> None:
    """Raise a `ModelError` if weights are missing: a model that is partly random answers, and answers nonsense."""
    if missing:
        raise ModelError(f"'{folder}' lacks weights of its model: {', '.join(missing[:5])}")


def as_in_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by the names in its files; those of which files hold several parts as views of these parts.

    Example: `as_in_files(model, dict(model.named_parameters()))` has `model.layers.0.mlp.experts.0.gate_proj.weight`, which in memory is
    a part of `model.layers.0.mlp.experts.gate_up_proj`."""
    parts = {name: in_files(model.config.model_type, name, tensor.shape) for name, tensor in tensors.items()}
    return {own: tensors[name].detach()[index] if index else tensors[name] for name, cut in parts.items() for own, index in cut}
