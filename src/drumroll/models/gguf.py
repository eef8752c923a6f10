"""GGUF files as Hugging Face folders: config, weights in float32, tokenizer with its chat template.

    architecture llama ──► config.json, generation_config.json
    tensors            ──► dequantised, queries and keys back in transformers' order ──► model.safetensors
    vocabulary, merges ──► byte-level BPE ──► tokenizer.json, chat_template.jinja

Weights that were quantised stay what the quantisation left of them: a file of four bits gives a model of four bits' worth, in float32.
What a file holds beyond this is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumroll.errors import ModelError
from drumroll.registry import require

require("gguf", extra="smollm2")

Weight = NDArray[np.float32]

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Weights outside the layers: GGUF's name → transformers'."""

IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Weights of each layer, likewise."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""GGUF's kinds of tokens."""


class GgufFile:
    """What stands in a GGUF file. Example: `GgufFile(Path("model.gguf")).value("general.architecture")` → `"llama"`."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # of several kinds, for files that are cut off or something else altogether
            raise ModelError(f"'{path}' is not a readable GGUF file: {error}. Was it only partly downloaded?") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def has(self, key: str) -> bool:
        return key in self._reader.fields

    def value(self, key: str, default: Any = None) -> Any:
        """What the file says of a key; without a default, it must say something."""
        if key in self._reader.fields:
            return self._reader.fields[key].contents()
        if default is None:
            raise ModelError(f"'{self.path}' does not say '{key}', which a language model in GGUF must.")
        return default

    def weight(self, name: str) -> Weight:
        """A tensor in float32, as [outputs, inputs] or [inputs]."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ModelError(f"'{self.path}': tensor '{name}' is of the type {tensor.tensor_type.name}, which cannot be undone.") from error

    def num_rows(self, name: str) -> int:
        if name not in self.tensors:
            raise ModelError(f"'{self.path}' has no tensor '{name}'.")
        return int(self.tensors[name].shape[-1])  # GGUF lists the inputs first


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model in a GGUF file as a Hugging Face folder; `target` must not exist yet.

    The architecture must be llama, and the tokenizer byte-level BPE. Example: `convert_gguf(Path("model.gguf"), Path("model"))`.
    """
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    file = GgufFile(source)
    config = _config(file)
    tokenizer = _tokenizer(file)
    weights = dict(_weights(file, config.num_attention_heads, config.num_key_value_heads))
    target.mkdir(parents=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(target)
    config.save_pretrained(target)
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**tokens).save_pretrained(target)


def _config(file: GgufFile) -> Any:
    from transformers import LlamaConfig

    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise ModelError(f"'{file.path}' holds a model of the architecture '{architecture}'; only llama can be converted.")
    scaling = file.value("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelError(f"'{file.path}' stretches its positions ('llama.rope.scaling', 'rope_freqs'), which is not converted.")
    hidden_size, num_heads = file.value("llama.embedding_length"), file.value("llama.attention.head_count")
    head_dim = file.value("llama.attention.key_length", hidden_size // num_heads)
    if file.value("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"'{file.path}' turns only part of each head by position ('llama.rope.dimension_count'), which is not converted.")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=file.num_rows("token_embd.weight"),
        hidden_size=hidden_size,
        intermediate_size=file.value("llama.feed_forward_length"),
        num_hidden_layers=file.value("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=file.value("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=file.value("llama.context_length"),
        rms_norm_eps=_shortest(file.value("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": _shortest(file.value("llama.rope.freq_base", 10000.0))},
        tie_word_embeddings="output.weight" not in file.tensors,
        **_special_ids(file),
    )


def _special_ids(file: GgufFile) -> dict[str, int]:
    """Ids of the tokens that begin, end and fill up a text."""
    eos = file.value("tokenizer.ggml.eos_token_id")
    return {
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", eos),
        "eos_token_id": eos,
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id", eos),
    }


def _shortest(value: float) -> float:
    """The decimal number that a float32 was written for: 9.999999747378752e-06 → 1e-05."""
    return float(str(np.float32(value)))


def _weights(file: GgufFile, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, Weight]]:
    """Every weight by the name that transformers has for it."""
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for name in file.tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        own = layer[2] if layer else name.removesuffix(".weight")
        known = IN_LAYER if layer else WHOLE
        if own not in known or not name.endswith(".weight"):
            raise ModelError(f"'{file.path}' has a tensor '{name}', which a model of the architecture llama has no place for.")
        weight = file.weight(name)
        if own in heads:
            weight = unpermuted(weight, heads[own])
        yield (f"model.layers.{layer[1]}.{known[own]}.weight" if layer else f"{known[own]}.weight"), weight


def unpermuted(weight: Weight, num_heads: int) -> Weight:
    """Rows of a query or key projection in transformers' order.

    The two numbers that a position turns together stand side by side in GGUF, and half a head apart in transformers.
    """
    pairs = weight.reshape(num_heads, len(weight) // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _tokenizer(file: GgufFile) -> Any:
    """The tokenizer, as transformers has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    kind = file.value("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"'{file.path}' has a tokenizer of the kind '{kind}'; only byte-level BPE ('gpt2') can be converted.")
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    if len(tokens) != file.num_rows("token_embd.weight"):
        raise ModelError(f"'{file.path}' has {len(tokens)} tokens and embeddings of {file.num_rows('token_embd.weight')}: it is damaged.")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.value("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    added = [(token, kind in (UNKNOWN, CONTROL)) for token, kind in zip(tokens, kinds, strict=True) if kind not in (NORMAL, UNUSED)]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in added])
    ids = _special_ids(file)
    if file.value("tokenizer.ggml.add_bos_token", False):
        bos = tokens[ids["bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, ids["bos_token_id"])])
    optional: dict[str, Any] = {}
    if file.has("tokenizer.ggml.unknown_token_id"):
        optional["unk_token"] = tokens[file.value("tokenizer.ggml.unknown_token_id")]
    if file.has("tokenizer.chat_template"):
        optional["chat_template"] = file.value("tokenizer.chat_template")
    return TokenizersBackend(
        tokenizer_object=tokenizer,
        model_max_length=file.value("llama.context_length"),
        **{name.removesuffix("_id"): tokens[index] for name, index in ids.items()},
        **optional,
    )


def _pre_tokenizer(file: GgufFile) -> Any:
    """What cuts a text into stretches that merges do not cross. GGUF names the rule and does not describe it."""
    from tokenizers import pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known = {"gpt-2": gpt2, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])}
    name = file.value("tokenizer.ggml.pre")
    if name not in known:
        raise ModelError(f"'{file.path}' cuts its text by the rule '{name}'; only {' and '.join(known)} can be converted.")
    return known[name]
