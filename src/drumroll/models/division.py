"""Which models can be divided over ranks, and how; and where a model in memory and its files cut tensors differently. No torch.

A layer of the models that tensor parallel divides is attention over heads and a gated product, by these names:

    q_proj k_proj v_proj gate_proj up_proj     rows are divided: each rank has some heads, or some inner numbers
    o_proj down_proj                           columns are divided: each rank has a summand of the result
    q_norm k_norm                              the same on all ranks, each of which applies them to its own heads

Transformers holds the experts of a layer in one tensor, [experts, ...]; files have a matrix per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drumroll.config.models import ParallelConfig

DIVIDED_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
DIVIDED_COLUMNS = frozenset({"o_proj", "down_proj"})
OF_EACH_HEAD = frozenset({"q_norm", "k_norm"})

WITH_TP = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Types of models that consist of such layers."""
WITH_CP = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_neox")
"""Types of models all of whose tokens meet in `backends.attention` and nowhere else."""
WITH_EP = ("qwen3_moe",)
"""Types of models whose experts are one module with `gate_up_proj` and `down_proj`."""

APART_IN_FILES = ("qwen2_moe", "qwen3_moe", "olmoe")
"""Types of models whose experts are one tensor in memory and a matrix each in files, which is how engines of other packages want them."""

_GATE_UP = "experts.gate_up_proj"
_DOWN = "experts.down_proj"


def problems(key: str, parallel: ParallelConfig, facts: Mapping[str, Any]) -> Iterator[str]:
    """Why a model cannot be divided like this; `key` is where the config says so, and `facts` is the model's own config."""
    model_type = str(facts.get("model_type"))
    heads = facts.get("num_attention_heads", facts.get("n_head"))
    key_heads = facts.get("num_key_value_heads") or heads
    experts = facts.get("num_experts", facts.get("num_local_experts"))
    mixed = bool(experts)
    for name, size, known in (("tp", parallel.tp, WITH_TP), ("cp", parallel.cp, WITH_CP), ("ep", parallel.ep, WITH_EP)):
        if size == 1:
            continue
        if name == "ep" and not mixed:
            yield f"`{key}.ep` is {size}, but a model of type '{model_type}' has no experts to divide. Leave it out."
        elif model_type not in known:
            yield (
                f"`{key}.{name}` is {size}, but models of type '{model_type}' cannot be divided that way; those of type "
                f"{', '.join(known)} can. Leave it out: weights are sharded over all ranks anyway."
            )
    if parallel.tp > 1 and model_type in WITH_TP:
        has_plain_layers = not mixed or facts.get("mlp_only_layers") or facts.get("decoder_sparse_step", 1) > 1
        inner = facts.get("intermediate_size") if has_plain_layers else None
        counts = {"attention heads": heads, "key and value heads": key_heads, "inner numbers (`intermediate_size`)": inner}
        for what, count in counts.items():
            if count is not None and count % parallel.tp:
                yield f"`{key}.tp` is {parallel.tp}, which does not divide the model's {count} {what}. Choose a divisor."
                break
    if parallel.cp > 1 and heads is not None and heads % (parallel.tp * parallel.cp):
        of_tp = f" (`{key}.tp`) × {parallel.cp}" if parallel.tp > 1 else ""
        first = parallel.tp if parallel.tp > 1 else parallel.cp
        yield f"`{key}.cp` is {parallel.cp}, but {first}{of_tp} does not divide the model's {heads} attention heads. Choose a divisor."
    if parallel.ep > 1 and mixed and experts % parallel.ep:
        yield f"`{key}.ep` is {parallel.ep}, which does not divide the model's {experts} experts. Choose a divisor."


Index = tuple[int | slice, ...]


def in_files(model_type: str, name: str, shape: Sequence[int]) -> list[tuple[str, Index]]:
    """By which names the model's files hold a tensor, and where in it each of those lies.

    Example: the first expert's gate is `("model.layers.0.mlp.experts.0.gate_proj.weight", (0, slice(0, 768)))` of
    `model.layers.0.mlp.experts.gate_up_proj`; any other tensor is itself, `(name, ())`."""
    if model_type in APART_IN_FILES and name.endswith(_GATE_UP):
        stem, inner = name.removesuffix("gate_up_proj"), shape[1] // 2
        halves = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)}
        return [(f"{stem}{number}.{half}.weight", (number, rows)) for number in range(shape[0]) for half, rows in halves.items()]
    if model_type in APART_IN_FILES and name.endswith(_DOWN):
        stem = name.removesuffix("down_proj")
        return [(f"{stem}{number}.down_proj.weight", (number,)) for number in range(shape[0])]
    return [(name, ())]
