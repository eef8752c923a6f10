"""Whether a folder is a causal language model or a reward model that can be used, seen from its files alone: neither weights nor torch
are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drumroll.errors import ModelError
from drumroll.registry import nearest

# Any one of these sets of files makes a tokenizer.
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",), ("tekken.json",))

# Architecture names that are causal language models by their ending; others are looked up in transformers' table, which costs seconds.
CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")

LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Types of models that drumroll itself knows how to compute."""

CLASSIFIER_ENDING = "ForSequenceClassification"


def check_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise a `ModelError` that says what is missing or wrong in the folder of a causal language model."""
    _check_architecture(folder, _config(folder), trust_remote_code)
    _check_files(folder)


def check_classifier_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise a `ModelError` that says what is missing or wrong in the folder of a reward model: a classifier with a single label."""
    _check_head(folder, _config(folder), trust_remote_code)
    _check_files(folder)


def _check_files(folder: Path) -> None:
    for file in weight_files(folder):
        _check_safetensors(file)
    if not any(all((folder / name).exists() for name in names) for names in TOKENIZER_FILES):
        wanted = " or ".join(" with ".join(names) for names in TOKENIZER_FILES)
        raise ModelError(f"'{folder}' has no tokenizer: {wanted} was expected. Save the tokenizer into the same folder as the model.")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        found = sorted(entry.name for entry in folder.iterdir())
        listing = ", ".join(found[:8]) + (", …" if len(found) > 8 else "") if found else "nothing"
        inner = next((entry.parent for entry in sorted(folder.glob("*/config.json"))), None)
        hint = f" Did you mean '{inner}'?" if inner else " A Hugging Face model folder was expected, as `save_pretrained` writes it."
        raise ModelError(f"'{folder}' is not a model folder: it has no config.json; it holds {listing}.{hint}")
    config = _json_object(path)
    if (folder / "adapter_config.json").exists() and "model_type" not in config:
        raise ModelError(f"'{folder}' is an adapter, not a model: merge it into its base model first.")
    return config


def _check_architecture(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"'{folder / 'config.json'}' names no `model_type`: it is not the config of a transformers model.")
    if "AutoModelForCausalLM" in config.get("auto_map", {}):
        if trust_remote_code:
            return
        remote = " It comes with Python code of its own; set `model.trust_remote_code: true` to run that."
    else:
        remote = ""
    architectures = _architectures(config)
    is_causal = any(name.endswith(CAUSAL_ENDINGS) for name in architectures)
    if is_causal and model_type in LLAMA_FAMILY:  # importing transformers takes a second
        return

    import transformers
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"'{folder}': transformers {transformers.__version__} knows no model_type '{model_type}'."
            f"{nearest(model_type, CONFIG_MAPPING_NAMES)}{remote}"
        )
    if is_causal:
        return

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if expected is None or (architectures and expected not in architectures):
        is_a = ", ".join(architectures) or f"of type '{model_type}'"
        raise ModelError(f"'{folder}' is not a causal language model: it is {is_a}.{remote}")


def _check_head(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    if "AutoModelForSequenceClassification" in config.get("auto_map", {}):
        if not trust_remote_code:
            raise ModelError(f"'{folder}' comes with Python code of its own; set `trust_remote_code: true` beside its path to run that.")
    elif not any(name.endswith(CLASSIFIER_ENDING) for name in _architectures(config)):
        is_a = ", ".join(_architectures(config)) or f"of type '{config.get('model_type')}'"
        raise ModelError(
            f"'{folder}' is not a reward model: it is {is_a}. A sequence classification head with one label was expected, as "
            f"`AutoModelForSequenceClassification` saves it."
        )
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)  # two are the default, which is not written down
    if num_labels != 1:
        raise ModelError(
            f"'{folder}' is a classifier with {num_labels} labels; a reward model has a single one, whose logit is the score. "
            f"Give the folder of a model that was trained with num_labels=1."
        )


def _architectures(config: dict[str, Any]) -> list[str]:
    return [name for name in config.get("architectures") or () if isinstance(name, str)]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted({str(shard) for shard in _json_object(index).get("weight_map", {}).values()})
        missing = [shard for shard in shards if not (folder / shard).exists()]
        if missing or not shards:
            raise ModelError(
                f"'{folder}': {index.name} names weights that are not there: {', '.join(missing[:3]) or 'none at all'}. Download it again."
            )
        return [folder / shard for shard in shards]
    if single.exists():
        return [single]
    pickled = next((entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in sorted(folder.glob(pattern))), None)
    if pickled:
        raise ModelError(
            f"'{folder}' holds its weights as '{pickled}', a pickle, which can run any code when it is loaded. Only safetensors are read: "
            f"load it once where you trust it and save it again with `model.save_pretrained(folder)`."
        )
    raise ModelError(f"'{folder}' has no weights: model.safetensors, or its shards with model.safetensors.index.json, were expected.")


def _check_safetensors(path: Path) -> None:
    """The header must be readable and the file as long as it says: catches truncated downloads and Git LFS pointers."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if not 0 < header_size <= size - 8:
                raise ValueError("it has no safetensors header")
            tensors = json.loads(file.read(header_size))
        end = 8 + header_size + max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"'{path}' is not a safetensors file: {error}. Was it only partly downloaded, or is it a Git LFS pointer?"
        ) from error
    if size != end:
        raise ModelError(f"'{path}' is damaged: it has {size} bytes, and its header speaks of {end}. Download it again.")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"'{path}' holds a {type(content).__name__}; a JSON object was expected.")
    return content
