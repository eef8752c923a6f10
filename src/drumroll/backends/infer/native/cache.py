"""Keys and values of every slot in static tensors, and the attention call that reads them.

A whole model's own forward runs unchanged: it sees a `SlotCache` as its `past_key_values` and finds `attend` through
transformers' attention interface. `ATTENTION` is unknown to the mask interface on purpose, so that the mask which the
runner passes reaches `attend` as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from drumroll.errors import ModelError

ATTENTION = "drumroll_slots"
SPARE = 16
"""Columns behind a slot's last position. Rows that must write but hold nothing write into the first of them, and nobody
reads it; the others keep rows aligned."""
LEAST_PRODUCT = 400
"""Multiplications in each of a batch of products, from which on torch leaves them to a library: it rounds the smaller ones differently."""
LEAST_LENGTH = 32
"""Positions that attention reads at least: a library may round products of narrower matrices differently."""
LONGEST_SUM = 128
"""Positions over which values are added up in one product: longer sums are taken apart in ways that depend on their length."""


class SlotCache:
    """What the model gets as `past_key_values`: [slots, kv_heads, capacity + SPARE, head_dim] for each layer, twice.

    Before every forward, `aim` says which slots the rows are, where each token is written and how far attention reads.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.waste = capacity
        """Position to write to when nothing is to be kept."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots: Tensor | None = None
        self._rows = 0
        self._positions = torch.empty(0)
        self._length = 0
        self._flat: dict[int, Tensor] = {}

    def aim(self, slots: Tensor | int, positions: Tensor, length: int) -> None:
        """The next forward's rows are `slots` [R] (or the first R slots), its tokens go to `positions` [R, Q], and it attends over
        the first `length` positions."""
        if isinstance(slots, int):
            self._slots, self._rows = None, slots
        else:
            self._slots, self._rows = slots, slots.shape[0]
        self._positions, self._length = positions, length
        self._flat.clear()

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [R, kv_heads, Q, head_dim]; return what the rows attend over, [R, kv_heads, length, head_dim]."""
        stored = self.stored(layer_idx, keys, values)
        index = self._index(keys.shape[1])
        for store, new in zip(stored, (keys, values), strict=True):
            store.view(-1, store.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]))
        if self._slots is None:
            return stored[0][: self._rows, :, : self._length], stored[1][: self._rows, :, : self._length]
        return stored[0][:, :, : self._length].index_select(0, self._slots), stored[1][:, :, : self._length].index_select(0, self._slots)

    def stored(self, layer_idx: int, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer. `keys` and `values` are examples of them, for their heads' numbers and sizes."""
        if layer_idx not in self.layers:
            self.layers[layer_idx] = (self._allocate(keys), self._allocate(keys if values is None else values))
        return self.layers[layer_idx]

    @property
    def places(self) -> Tensor:
        """[R, Q] where the next forward's tokens are written."""
        return self._positions

    @property
    def num_columns(self) -> int:
        """Positions that there is memory for, in a slot's keys of one head."""
        return self.capacity + SPARE

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask for it when they are given no positions; the runner always gives them."""
        return 0

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a slot, into another."""
        for stored in self.layers.values():
            for store in stored:
                store[target, :, :length].copy_(store[source, :, :length])

    def wipe(self, slot: int) -> None:
        """Zero a slot: values that are not finite would spoil masked attention for its next owner."""
        for stored in self.layers.values():
            for store in stored:
                store[slot].zero_()

    def drop(self) -> None:
        """Give the memory back; the next forward allocates anew."""
        self.layers.clear()

    def _allocate(self, new: Tensor) -> Tensor:
        return new.new_zeros(self.num_slots, new.shape[1], self.num_columns, new.shape[-1])

    def _index(self, num_heads: int) -> Tensor:
        """[R * kv_heads * Q] rows of a store seen as [-1, head_dim]; computed once a forward, layers share it."""
        if num_heads not in self._flat:
            device = self._positions.device
            slots = torch.arange(self._rows, device=device) if self._slots is None else self._slots
            heads = slots[:, None] * num_heads + torch.arange(num_heads, device=device)
            self._flat[num_heads] = (heads[:, :, None] * self.num_columns + self._positions[:, None, :]).flatten()
        return self._flat[num_heads]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [R, heads, Q, head_dim] over `key`, `value` [R, kv_heads, length, head_dim] → [R, Q, heads, head_dim].

    Query heads that share a key head are laid side by side as further queries, so keys and values are never repeated."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} attends with `{name}`, which the native engine does not compute. Use another engine."
            )
    if attention_mask is None:
        raise ModelError(f"{type(module).__name__} does not pass the attention mask that it is given on to attention.")
    if sliding_window is not None:
        attention_mask = _within(attention_mask, sliding_window)
    return attend_grouped(query, key, value, attention_mask, scaling), None


def attend_grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """As `attend`, for a `mask` [R, 1, Q, length] that is added."""
    num_rows, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    if groups > 1:
        query = query.reshape(num_rows, num_kv_heads, groups * num_queries, -1)
        if num_queries > 1:
            mask = mask.repeat(1, 1, groups, 1)
    if num_queries == 1 and _suits_products(query):
        out = _by_products(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale)
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2)


def _suits_products(query: Tensor) -> bool:
    """Whether one token a row is attended to by products: they are a little faster, several times as fast for bfloat16, and in float32 a
    row's bits do not depend on how far the cache is read. Neither does this: it says the same for every number of rows and every length."""
    return query.device.type == "cpu" and LEAST_LENGTH * query.shape[2] * query.shape[3] >= LEAST_PRODUCT


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[R, kv_heads, groups, D] queries, [R, kv_heads, length, D] keys and values, `mask` [R, 1, 1, length] → [R, kv_heads, groups, D].
    In float32, which processors multiply such small matrices in at their best."""
    shape = (*query.shape[:3], key.shape[2])
    queries, keys, values, hidden = (states.flatten(0, 1).float() for states in (query, key, value, mask.expand(shape)))
    shares = torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)
    first, *others = zip(torch.split(shares, LONGEST_SUM, -1), torch.split(values, LONGEST_SUM, 1), strict=True)
    out = torch.bmm(*first)
    for part in others:
        out = torch.baddbmm(out, *part)
    return out.view(*shape[:3], value.shape[-1]).to(query.dtype)


def _within(mask: Tensor, window: int) -> Tensor:
    """The causal mask [R, 1, Q, length] (0 or -inf) without keys that lie `window` or more before the query."""
    last = (mask == 0).sum(-1, keepdim=True) - 1
    return mask.masked_fill(torch.arange(mask.shape[-1], device=mask.device) <= last - window, -torch.inf)
