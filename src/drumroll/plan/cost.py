"""What a role takes of a device's memory: as a lower bound, and as an estimate for each stage of a step. Pure arithmetic.

The lower bound is what a plan that is refused would certainly have run out of: weights, gradients and optimizer state. The estimate adds
what depends on settings: activations, logits, keys and values. Formulae stand in the functions' docstrings; they describe the backends
`fsdp2` and `native`, and give what was measured on an H200 within a few percent (tests/unit/plan/test_plan_memory.py).

    P parameters, T tokens of a pass, b bytes of a number in passes, L layers, H hidden size, M width of the MLP, Q and K widths of queries
    and of keys, V vocabulary
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from drumroll.config.models import ModelConfig, ParallelConfig, Role
from drumroll.plan.pool import Kind

GIB = 1024**3

MASTER_BYTES = 4
"""A trained weight, its gradient and each of AdamW's two moments are float32 on the rank that owns the shard."""

Stage = Literal["rollout", "score", "update", "sync"]
"""Of a step. A role that does not work at a stage waits, on its device or in host memory."""

LEARNERS: tuple[Role, ...] = ("actor_train", "critic")
TRAINER_ROLES: tuple[Role, ...] = ("actor_train", "reference", "teacher", "critic")
"""Roles whose ranks hold one model together."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a role has on each of its devices; what is moved to `host` memory meanwhile is not among them."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    """A chunk of them, and their gradient."""
    cache: int = 0
    """Keys and values."""
    buffers: int = 0
    """For what is on its way: gathered layers, buckets of weights."""
    remade: int = 0
    """Of the weights, copies in narrower numbers: they are not moved to host memory, but made anew."""
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.cache + self.buffers

    def __str__(self) -> str:
        values = [(part.name, getattr(self, part.name)) for part in fields(self) if part.name not in ("host", "remade")]
        return ", ".join(f"{name} {value / GIB:.1f}" for name, value in values if value or name == "weights")


def compute_bytes(dtype: str, kind: Kind) -> int:
    """Bytes of one weight as forward passes use it."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and kind == "gpu") else 4


def devices_per_copy(role: Role, num_devices: int, parallel: ParallelConfig) -> int:
    """How many devices hold one copy of the model together: an engine's `tp`; all of a trainer's, or with hybrid sharding some, whatever
    it is that they divide among themselves."""
    if role not in TRAINER_ROLES:
        return parallel.tp
    return parallel.shard * parallel.devices_per_shard if parallel.shard else num_devices


def device_memory(
    role: Role, num_parameters: int, num_devices: int, parallel: ParallelConfig, weight_bytes: int, *, adapters: bool = False
) -> Memory:
    """What each of a role's devices holds of a copy of the model at least. Where only `adapters` learn, what they take is hardly anything
    beside the weights, which a single trainer holds as passes use them."""
    shard = -(-num_parameters // devices_per_copy(role, num_devices, parallel))
    if role not in LEARNERS:
        return Memory(weights=weight_bytes * shard)
    if adapters:
        return Memory(weights=shard * (weight_bytes if num_devices == 1 else MASTER_BYTES))
    return Memory(weights=MASTER_BYTES * shard, gradients=MASTER_BYTES * shard, optimizer=2 * MASTER_BYTES * shard)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models departs from the plainest decoder: RMS norms, gated MLP, no biases, own output matrix."""

    head_dim: int | None = None
    """Where the config does not say; hidden size over heads otherwise."""
    key_value_heads: int | None = None
    """Where the config does not say; as many as there are query heads otherwise."""
    tied: bool = False
    """Whether the output matrix is the embedding where the config does not say."""
    qkv_bias: bool = False
    qk_norms: bool = False
    norms_per_layer: int = 2
    experts: int = 0
    """Where the config does not say."""
    expert_size: int = 0
    """Inner numbers of an expert where the config does not say."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(key_value_heads=8),
    "qwen2": Family(key_value_heads=32, qkv_bias=True),
    "qwen3": Family(head_dim=128, key_value_heads=32, qk_norms=True),
    "qwen3_moe": Family(key_value_heads=4, qk_norms=True, experts=128, expert_size=768),
    "gemma": Family(head_dim=256, key_value_heads=16, tied=True),
    "gemma2": Family(head_dim=256, key_value_heads=4, tied=True, norms_per_layer=4),
    "gemma3_text": Family(head_dim=256, key_value_heads=4, tied=True, qk_norms=True, norms_per_layer=4),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder's memory follows from."""

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    query: int
    """Width of all query heads together."""
    key_value: int
    """Width of all key heads together."""
    has_qk_norms: bool
    context: int | None
    """Tokens that the model was made for."""
    layer_parameters: int
    """Of one layer, on average."""
    num_parameters: int

    def divided(self, tp: int) -> Shape:
        """What one of `tp` ranks that divide each layer computes."""
        return replace(
            self,
            mlp=-(-self.mlp // tp),
            query=-(-self.query // tp),
            key_value=-(-self.key_value // tp),
            layer_parameters=-(-self.layer_parameters // tp),
            num_parameters=self.num_parameters - self.layers * (self.layer_parameters - -(-self.layer_parameters // tp)),
        )


def shape_of(hf_config: Mapping[str, Any]) -> Shape | None:
    """The shape that a Hugging Face `config.json` describes; None for a family that is not known here."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    try:
        vocab, hidden, mlp, layers, heads = (
            int(hf_config[name]) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        )
    except (KeyError, TypeError, ValueError):
        return None
    if family is None or heads == 0:
        return None
    # A null in the file means that it does not say.
    head_dim = hf_config.get("head_dim") or family.head_dim or hidden // heads
    key_value_heads = hf_config.get("num_key_value_heads") or family.key_value_heads or heads
    tied = hf_config.get("tie_word_embeddings")
    query, key_value = heads * head_dim, key_value_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * key_value
    if family.qkv_bias:
        attention += query + 2 * key_value
    elif hf_config.get("attention_bias"):
        attention += query + 2 * key_value + hidden
    if family.qk_norms:
        attention += 2 * head_dim
    feed_forward = 3 * hidden * mlp + (2 * mlp + hidden if hf_config.get("mlp_bias") else 0)
    experts = int(hf_config.get("num_experts", hf_config.get("num_local_experts", family.experts)))
    mixed = _mixed_layers(hf_config, layers) if experts else 0
    mixture = experts * hidden * (3 * int(hf_config.get("moe_intermediate_size", family.expert_size)) + 1)  # and the router's rows
    embeddings = vocab * hidden * (1 if (family.tied if tied is None else tied) else 2)
    per_layer = attention + family.norms_per_layer * hidden
    in_layers = int(layers * per_layer + (layers - mixed) * feed_forward + mixed * mixture)
    context = hf_config.get("max_position_embeddings")
    if mixed:  # a token passes through some of the experts
        mlp = int(hf_config.get("num_experts_per_tok") or 1) * int(hf_config.get("moe_intermediate_size", family.expert_size))
    return Shape(
        vocab,
        hidden,
        mlp,
        layers,
        heads,
        query,
        key_value,
        family.qk_norms,
        context,
        in_layers // layers,
        int(embeddings) + hidden + in_layers,
    )


def _mixed_layers(hf_config: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts in place of one product."""
    step, plain = int(hf_config.get("decoder_sparse_step") or 1), set(hf_config.get("mlp_only_layers") or ())
    return sum((layer + 1) % step == 0 and layer not in plain for layer in range(layers))


def parameter_count(hf_config: Mapping[str, Any]) -> int | None:
    """Parameters of the model that a Hugging Face `config.json` describes; None for a family that is not known here."""
    shape = shape_of(hf_config)
    return None if shape is None else shape.num_parameters


def known_shape(model: ModelConfig, *, has_scalar_head: bool = False) -> Shape | None:
    """The model's shape as far as the config, or a `config.json` on this machine, tells; None otherwise. With a scalar head it has one row
    in place of an output matrix."""
    head = {"tie_word_embeddings": True} if has_scalar_head else {}
    if model.scratch is not None:
        scratch = model.scratch
        return shape_of({"vocab_size": len(scratch.characters), **scratch.config, **head, "model_type": scratch.architecture})
    assert model.path is not None, "a model has a path or is made from scratch"
    try:
        hf_config = json.loads((Path(model.path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return shape_of({**hf_config, **head}) if isinstance(hf_config, dict) else None


LOGITS_PER_CHUNK = 2**28
"""Logits that `backends.train.head` holds at the same time."""
WORTH_CHUNKS = 2**24
"""Logits from which on it computes them in chunks."""
BUCKET_BYTES = 256 * 2**20
"""Of weights that stay on a GPU on their way to an engine; two are in use at a time."""
CHECKSUM_BYTES = 3 * 2**27
"""A block of words as 64-bit integers, their places, and the products: what `backends.checksum` holds while it looks at a tensor."""


@dataclass(frozen=True, slots=True)
class Training:
    """What decides about a trainer's memory, beside its model."""

    num_ranks: int
    """That share what a rank computes with."""
    weight_bytes: int
    tokens: int
    """Of one pass, on one rank."""
    checkpointing: bool = False
    fused_layers: bool = True
    """Norms, rotations and gated products are kernels that keep their inputs alone."""
    lora_rank: int | None = None
    has_scalar_head: bool = False
    tp: int = 1
    """Ranks that divide each layer, besides those."""

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1 and self.tp == 1


def trainer_memory(role: Role, stage: Stage, shape: Shape, training: Training) -> Memory:
    """A rank of a training backend while it works.

    State: 4 P masters and b P for passes on a single rank, b P alone where the weights do not learn (a reference, a teacher, beside
    adapters), and 4 P over several ranks; gradients 4 and moments 8 for each parameter that learns, r (in + out) of them for a linear layer
    with adapters of rank r.
    `score`: the widest moment of one layer and a chunk of logits in float32.
    `update`: what the backward pass needs of every layer, or of each layer its input and of one layer everything (`checkpointing`); and at
    its first moment the head's: a chunk of logits in float32, their gradient in passes' numbers, the gradient of the output matrix in
    float32 and one chunk's part of it. Within a layer the backward pass has the gradients of the MLP's inner values beside them.
    `sync`: two buckets and a tensor in float32.
    """
    learns = role in LEARNERS
    state = _state(shape, training, learns=learns)
    numbers = training.tokens * training.weight_bytes
    has_head = not training.has_scalar_head
    gathered = 0
    if training.num_ranks > 1:  # two layers at a time, and what stands around the layers for the whole pass
        around = shape.num_parameters - shape.layers * shape.layer_parameters
        gathered = (2 * shape.layer_parameters + around) * training.weight_bytes
    outside = 4 * shape.hidden * numbers  # embeddings, the last norm's input and output, the gradient of the latter
    chunk = _chunk(training.tokens, shape.vocab) if has_head else 0
    if stage == "sync":
        largest = max(shape.vocab * shape.hidden, shape.hidden * shape.mlp)
        buffers = 2 * BUCKET_BYTES + CHECKSUM_BYTES + largest * MASTER_BYTES
        return Memory(state.weights, 0, state.optimizer, buffers=buffers + gathered, remade=state.remade)
    if stage == "score" or not learns:
        widest = (4 * shape.hidden + max(3 * shape.mlp, 2 * shape.query + 2 * shape.key_value)) * numbers
        scoring = Memory(state.weights, 0, state.optimizer, activations=widest + outside, logits=4 * chunk)
        return replace(scoring, buffers=gathered, remade=state.remade)
    layer = kept_numbers(shape, fused=training.fused_layers)
    if training.lora_rank is not None:  # PEFT's copies of the inputs of all linear layers in float32
        layer += 2 * (5 * shape.hidden + shape.query + shape.mlp)
    kept = shape.layers * shape.hidden if training.checkpointing else shape.layers * layer
    within = (layer if training.checkpointing else 0) + 2 * shape.mlp + 2 * shape.hidden
    head_learns = training.lora_rank is None and has_head
    of_head = chunk * (4 + (training.weight_bytes if training.weight_bytes < 4 else 0))
    of_head += shape.vocab * shape.hidden * (4 + training.weight_bytes) if head_learns else 0
    if of_head >= within * numbers:
        activations, logits = kept * numbers + outside, of_head
    else:
        activations, logits = (kept + within) * numbers + outside, 0
    if training.num_ranks > 1:  # a layer's gradient, whole, before it is reduced
        gathered += shape.layer_parameters * (training.weight_bytes + MASTER_BYTES)
    return replace(state, activations=activations, logits=logits, buffers=gathered)


def kept_numbers(shape: Shape, *, fused: bool) -> int:
    """What the backward pass needs of a layer, in numbers for each token.

    With `fused` kernels: input and output of two norms (4 H), queries, keys, values and the output of attention (2 Q + 2 K) with its
    logarithms of sums in float32 (2 for each head), the gate, the other half and their product (3 M). In torch's own functions a norm keeps
    its input in float32, what it normalised and its output (8 H), and the MLP what its activation gave, too (4 M). Norms of queries and
    keys keep their inputs once more."""
    attention = 2 * shape.query + 2 * shape.key_value + 2 * shape.heads
    if shape.has_qk_norms:
        attention += (1 if fused else 3) * (shape.query + shape.key_value)
    return attention + (4 * shape.hidden + 3 * shape.mlp if fused else 8 * shape.hidden + 4 * shape.mlp)


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Parameters of adapters of that rank beside every linear layer but the head."""
    widths = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.key_value) + 3 * (shape.hidden + shape.mlp)
    return shape.layers * rank * widths


def _state(shape: Shape, training: Training, *, learns: bool) -> Memory:
    """What a rank holds whatever it does."""
    shard = -(-shape.num_parameters // training.num_ranks)
    is_narrow = training.is_alone and (not learns or training.lora_rank is not None)
    each = training.weight_bytes if is_narrow else MASTER_BYTES
    has_masters = training.is_alone and not is_narrow and training.weight_bytes < MASTER_BYTES
    narrow = shard * training.weight_bytes if has_masters else 0
    weights = shard * each + narrow
    learning = shard
    if training.lora_rank is not None:
        learning = -(-adapter_parameters(shape, training.lora_rank) // training.num_ranks)
        weights += MASTER_BYTES * learning
    return Memory(weights, MASTER_BYTES * learning if learns else 0, 2 * MASTER_BYTES * learning if learns else 0, remade=narrow)


def _chunk(rows: int, vocab: int) -> int:
    """Logits that are held at the same time."""
    if rows * vocab < WORTH_CHUNKS:
        return rows * vocab
    size = max(1, LOGITS_PER_CHUNK // vocab)
    size -= size % 128 if size > 128 else 0
    return min(rows, size) * vocab


@dataclass(frozen=True, slots=True)
class Serving:
    """What decides about an engine's memory, beside its model."""

    tp: int
    weight_bytes: int
    num_slots: int
    cache_tokens: int
    """Whose keys and values have room, whether they are in use or not."""
    prefill_tokens: int
    """Of one call at most."""


def engine_memory(stage: Stage, shape: Shape, serving: Serving) -> Memory:
    """An engine while it works.

    `rollout`: b P weights, 2 b L K for each token of the cache, of one prefill call three hidden states, queries, keys and values and the
    MLP's inner values (3 H + Q + 2 K + 3 M), and the logits of one decode step in float32. `sync`: weights and cache, and what a checksum
    takes. All of it is divided by the devices that the engine spans."""
    b = serving.weight_bytes
    weights = -(-shape.num_parameters * b // serving.tp)
    cache = serving.cache_tokens * cache_bytes(shape, b) // serving.tp
    if stage == "sync":
        return Memory(weights, cache=cache, buffers=CHECKSUM_BYTES)
    inner = shape.query + 2 * shape.key_value + 3 * shape.mlp
    prefill = serving.prefill_tokens * (3 * shape.hidden + inner // serving.tp) * b
    return Memory(weights, activations=prefill, logits=4 * serving.num_slots * shape.vocab // serving.tp, cache=cache)


def cache_bytes(shape: Shape, number_bytes: int) -> int:
    """Keys and values of one token."""
    return 2 * shape.layers * shape.key_value * number_bytes


def waiting(working: Memory, *, offloads: bool, keeps_cache: bool) -> Memory:
    """What a role has while others work: its state, on its device or in host memory, and an engine its cache unless that is given up."""
    state = Memory(working.weights, 0, working.optimizer, cache=working.cache if keeps_cache else 0)
    return Memory(host=state.weights - working.remade + state.optimizer) if offloads else state
