"""Causal attention over packed sequences, for passes that train or score.

A pass gives the model one row of T tokens, and a `PackedLayout` that transformers hands through to every attention call:

    model(input_ids [1, T], position_ids [1, T], packed=PackedLayout(lengths, device))

`PACKED_ATTENTION` is registered with transformers as an attention function without a mask function, so no mask of T × T is
ever built. On CUDA in half precision the sequences are attended to where they lie (`torch.nn.attention.varlen`), and on a Hopper
GPU or a later one long ones each by itself, by cuDNN, which takes less than half of that time. Elsewhere sequences of similar
lengths are put side by side, padded at their ends, where causality alone keeps the padding out of sight. A model whose layers do
not all come through here would mix neighbours: `PackedLayout.check` refuses it. Where the tokens of a pass lie on several ranks, an
`Exchange` brings them together here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from drumroll.errors import ModelError

PACKED_ATTENTION = "drumroll_packed"

_LONG = 4096
"""Tokens from which on a sequence by itself keeps a GPU busy."""

_NARROW = 32
"""Sequences up to this length share one bucket."""

_SHORT = 64
"""Tokens up to which a sequence is attended to faster by products of whole matrices, on the CPU, than by a kernel for long ones."""

_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "alibi")
"""Arguments of attention functions that would change the result and are not supported here."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar lengths, attended to as one padded batch."""

    rows: int
    width: int
    tokens: Tensor
    """[rows * width] which of the model's tokens each cell of the padded batch shows. Those behind a sequence's end show any: causality
    keeps them out of sight."""


class Padded(NamedTuple):
    """A pass as padded batches."""

    buckets: list[Bucket]
    places: Tensor
    """[U] in which cell each of the model's tokens stands, counted through all buckets."""


class Stretch(NamedTuple):
    """Tokens of a pass that are attended to together: one long sequence, or short ones in a row."""

    start: int
    end: int
    offsets: Tensor
    """[n+1] where its sequences begin, counted from `start`, and its end."""
    max_length: int


class Exchange(Protocol):
    """Brings all tokens of some heads here, and some tokens of all heads back. Legend: t tokens of this rank, T of all."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, H, D] each → [T, H / ranks, D] each."""

    def to_tokens(self, states: Tensor) -> Tensor:
        """[T, H / ranks, D] → [t, H, D]."""


class PackedLayout:
    """Where the sequences of one pass lie, and how many attention calls have seen it.

    Tokens that several sequences share may be computed once: `source` [T] then says for each token of the sequences which of the model's
    it is. Not a dataclass: FSDP2 would copy one on its way into every layer."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, exchange: Exchange | None = None, source: Tensor | None = None
    ) -> None:
        """With an `exchange` the tokens lie on several ranks; `lengths` are those of all of them."""
        self.exchange = exchange
        self._device = device
        self._lengths = length = np.asarray(lengths, dtype=np.int64)
        start = np.cumsum(length) - length
        self.offsets = torch.from_numpy(np.append(start, length.sum())).to(device, torch.int32)
        """[N+1]"""
        self.max_length = int(length.max())
        self.stretches = list(_stretches(length, start, device)) if self.max_length >= _LONG else []
        """Empty where no sequence is long."""
        self.source = None if source is None else source.to(device)
        self.one_of_each = None if source is None else _one_of_each(source).to(device)
        """[U] where one copy of each of the model's tokens lies in the sequences; None where there is only one."""
        self.num_calls = 0

    @cached_property
    def padded(self) -> Padded:
        """The sequences by their lengths."""
        length = self._lengths
        start = np.cumsum(length) - length
        size_class = np.ceil(np.log2(np.maximum(length, _NARROW)))  # a padded row is less than twice as wide as its sequence
        shown = np.arange(length.sum()) if self.source is None else self.source.cpu().numpy()
        places = np.empty(shown.max() + 1, dtype=np.int64)
        buckets: list[Bucket] = []
        num_cells = 0
        for members in (np.flatnonzero(size_class == value) for value in np.unique(size_class)):
            rows, width, size = len(members), int(length[members].max()), length[members]
            column = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
            cells = np.repeat(np.arange(rows) * width, size) + column
            tokens = np.zeros(rows * width, dtype=np.int64)
            tokens[cells] = shown[np.repeat(start[members], size) + column]
            places[tokens[cells]] = num_cells + cells  # of several copies of a token any will do
            buckets.append(Bucket(rows, width, torch.from_numpy(tokens).to(self._device)))
            num_cells += rows * width
        return Padded(buckets, torch.from_numpy(places).to(self._device))

    def check(self, num_layers: int, model_type: str) -> None:
        """Refuse a model of which some layer did not attend through here."""
        if self.num_calls != num_layers:
            raise ModelError(
                f"model type '{model_type}' cannot be trained on packed sequences: {self.num_calls} of its {num_layers} layers attend "
                f"through transformers' attention interface, so tokens of one sequence would reach another. "
                f"Use a model whose layers all have causal attention, such as llama, qwen2, qwen3, gpt2 or gpt_neox."
            )


def _one_of_each(source: Tensor) -> Tensor:
    """[U] where the first of each number from 0 to U - 1 stands in `source` [T]."""
    numbers = source.numpy()
    found = np.empty(numbers.max() + 1, dtype=np.int64)
    found[numbers[::-1]] = np.arange(len(numbers))[::-1]  # what is written last stays
    return torch.from_numpy(found)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: [1, H, U, D] queries, [1, H_kv, U, D] keys and values → [1, U, H, D].

    Dropout is ignored: log-probabilities must be those that the engine sampled at.
    """
    unsupported = [name for name in _REFUSED if others.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if packed is None or not getattr(module, "is_causal", True):
        unsupported.append("attention that is not causal")
    if packed is None or unsupported:
        raise ModelError(
            f"{type(module).__name__} cannot attend to packed sequences: it needs {', '.join(unsupported)}. "
            f"Train a model with plain causal attention, such as llama, qwen2, qwen3, gpt2 or gpt_neox."
        )
    packed.num_calls += 1
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    if packed.exchange is not None:
        query, key, value = packed.exchange.to_heads(query, key, value)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        output = _in_place(query, key, value, packed, scaling, sliding_window)
    else:
        output = _padded(query, key, value, packed, scaling, sliding_window)
    if packed.exchange is not None:
        output = packed.exchange.to_tokens(output)
    return output.unsqueeze(0), None


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` known to transformers; imported late, because transformers takes seconds."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _in_place(query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scale: float | None, window: int | None) -> Tensor:
    """[U, H, D] each, on kernels that need no padding."""
    if packed.source is not None:
        query, key, value = (states.index_select(0, packed.source) for states in (query, key, value))
    if packed.stretches and window is None and _has_fast_dense(query.device):
        output = _by_stretches(query, key, value, packed, scale)
    else:
        output = _varlen(query, key, value, packed.offsets, packed.max_length, scale, window)
    return output if packed.one_of_each is None else output.index_select(0, packed.one_of_each)


@cache
def _varlen_kernel() -> tuple[Callable[..., Any], bool]:
    """torch's function, and whether it must be told of fewer key than query heads; torch 2.11 need not. Imported late: half a second."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None, window: int | None) -> Tensor:
    """[T, H, D] each, on the kernel for packed sequences."""
    look_back = -1 if window is None else window - 1  # transformers counts the token itself
    varlen_attn, asks_for_groups = _varlen_kernel()
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if asks_for_groups else {}
    query, key, value = (states.contiguous() for states in (query, key, value))
    output = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=(look_back, 0), **grouped)
    assert isinstance(output, Tensor), "the log-sum-exp was not asked for"
    return output


@cache
def _has_fast_dense(device: torch.device) -> bool:
    """Whether cuDNN attends to one long sequence faster than torch's kernel for packed ones."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _stretches(length: NDArray[np.int64], start: NDArray[np.int64], device: torch.device) -> Iterator[Stretch]:
    is_long = length >= _LONG
    cuts = np.flatnonzero(is_long[1:] | is_long[:-1]) + 1  # a long sequence has a neighbour on neither side
    for members in np.split(np.arange(len(length)), cuts):
        begin, size = int(start[members[0]]), int(length[members].sum())
        offsets = np.append(start[members] - begin, size)
        yield Stretch(begin, begin + size, torch.from_numpy(offsets).to(device, torch.int32), int(length[members].max()))


def _by_stretches(query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scale: float | None) -> Tensor:
    """[T, H, D] each, long sequences one by one."""
    parts = []
    for stretch in packed.stretches:
        queries, keys, values = (states[stretch.start : stretch.end] for states in (query, key, value))
        if stretch.max_length < _LONG:
            parts.append(_varlen(queries, keys, values, stretch.offsets, stretch.max_length, scale, None))
        else:
            parts.append(_alone(queries, keys, values, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _alone(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """One sequence, [L, H, D] each. It is padded to one of four lengths between powers of two, because cuDNN prepares itself for each
    new one, for about a second."""
    length = len(query)
    unit = 1 << max(0, (length - 1).bit_length() - 3)
    padding = -length % unit
    queries, keys, values = (pad(states, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None] for states in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        attended = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    return attended[0].transpose(0, 1)[:length]


def _padded(query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scale: float | None, window: int | None) -> Tensor:
    """[U, H, D] each, bucket by bucket."""
    buckets, places = packed.padded
    parts = []
    for bucket in buckets:
        mask = None if window is None or window >= bucket.width else _window_mask(bucket.width, window, query.device)
        queries, keys, values = (_shown(states, bucket) for states in (query, key, value))
        if bucket.width <= _SHORT and query.device.type == "cpu":
            attended = _by_products(
                queries, keys, values, _window_mask(bucket.width, bucket.width, query.device) if mask is None else mask, scale
            )
        else:
            grouped = query.shape[1] != key.shape[1]
            attended = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, places)


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """[N, H, W, D] queries, [N, H_kv, W, D] keys, [N, H_kv, W, V] values, `mask` [W, W] → [N, H, W, V]. Query heads that share a key head
    are laid behind one another, so that keys and values are never repeated."""
    num_groups, width, head_dim = query.shape[1] // key.shape[1], *query.shape[2:]
    queries = query.reshape(-1, num_groups * width, head_dim)
    keys, values = (states.reshape(-1, *states.shape[2:]) for states in (key, value))
    hidden = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf).repeat(num_groups, 1)
    shares = torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=head_dim**-0.5 if scale is None else scale).softmax(-1)
    return torch.bmm(shares, values).view(*query.shape[:-1], value.shape[-1])


def _shown(states: Tensor, bucket: Bucket) -> Tensor:
    """[U, H, D] → [rows, H, width, D]."""
    return states.index_select(0, bucket.tokens).view(bucket.rows, bucket.width, *states.shape[1:]).transpose(1, 2)


def _window_mask(width: int, window: int, device: torch.device) -> Tensor:
    """[width, width] True where a token may look: at itself and the `window` - 1 before it."""
    place = torch.arange(width, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)
