"""GPU kernels of the fused decoder, in Triton; `fused` puts them together, `paged` calls it.

Keys and values lie in pages: [pages, kv_heads, PAGE, head_dim] for each layer. A slot's row of the page table lists its pages, so that
slots whose texts begin alike share those of the beginning. Legend: T tokens of a call, R rows of a decode step, H query heads, G key heads,
D numbers in a head, V vocabulary, B vocabulary blocks, S splits of a row's keys. Whoever has a position below 0 computes nothing that is
kept: it fills up a row of a fixed shape.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGE = 64
"""Tokens of a page."""
VOCAB_BLOCK = 4096
"""Logits that one program looks at."""


# -- Between the matrix products


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, N] scaled to unit mean square, times `weight` [N]."""
    out = torch.empty_like(hidden)
    width = hidden.shape[1]
    _rms_norm[(hidden.shape[0],)](hidden, hidden, weight, out, width, eps, HAS_ADDED=False, BLOCK=triton.next_power_of_2(width))
    return out


def add_rms_norm(added: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual` [T, N] grows by `added` in place; its `rms_norm` comes back, in the place of `added`."""
    width = residual.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm[(residual.shape[0],)](added, residual, weight, added, width, eps, HAS_ADDED=True, BLOCK=block)
    return added


@triton.jit
def _rms_norm(added, residual, weight, out, width, eps, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(residual + row * width + column, mask=inside, other=0.0)
    if HAS_ADDED:
        value += tl.load(added + row * width + column, mask=inside, other=0.0)
        tl.store(residual + row * width + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, (wide * scale).to(value.dtype) * factor, mask=inside)


def silu_product(gate_up: Tensor) -> Tensor:
    """[T, 2N] → [T, N]: silu of the first half times the second."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_product[(num_tokens, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


@triton.jit
def _silu_product(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + column, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=inside)


# -- Positions, keys and values


def rotate_and_store(
    qkv: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Turn the queries of `qkv` [T, (H + 2G) D] by their positions, in place, and write keys, turned, and values into their slots' pages.

    `cos` and `sin` [positions, D / 2]; `norms` are the weights [D] of queries and keys that are normalised first, head by head.
    """
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query_norm, key_norm = norms or (cos, cos)
    _rotate_and_store[(qkv.shape[0], num_heads + 2 * num_kv_heads)](
        qkv, slots, positions, table, table.stride(0), cos, sin, keys, values, query_norm, key_norm, eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, HAS_NORMS=norms is not None, PAGE=PAGE, num_warps=1,
    )  # fmt: skip


@triton.jit
def _rotate_and_store(
    qkv, slots, positions, table, table_stride, cos, sin, keys, values, query_norm, key_norm, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HAS_NORMS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    if position < 0:
        return
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, HALF)
    source = qkv + token * (HEADS + 2 * KV_HEADS) * DIM + head * DIM
    first = tl.load(source + column)
    second = tl.load(source + HALF + column)
    page = tl.load(table + tl.load(slots + token).to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
    if head >= HEADS + KV_HEADS:
        place = values + ((page * KV_HEADS + head - HEADS - KV_HEADS) * PAGE + position % PAGE) * DIM
        tl.store(place + column, first)
        tl.store(place + HALF + column, second)
        return
    if HAS_NORMS:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        square = tl.sum(wide_first * wide_first, axis=0) + tl.sum(wide_second * wide_second, axis=0)
        scale = tl.rsqrt(square / DIM + eps)
        is_query = head < HEADS
        first_factor = tl.where(is_query, tl.load(query_norm + column), tl.load(key_norm + column))
        second_factor = tl.where(is_query, tl.load(query_norm + HALF + column), tl.load(key_norm + HALF + column))
        first = (wide_first * scale).to(first.dtype) * first_factor
        second = (wide_second * scale).to(second.dtype) * second_factor
    c = tl.load(cos + position.to(tl.int64) * HALF + column).to(tl.float32)
    s = tl.load(sin + position.to(tl.int64) * HALF + column).to(tl.float32)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    turned_first = (wide_first * c - wide_second * s).to(first.dtype)
    turned_second = (wide_second * c + wide_first * s).to(first.dtype)
    if head < HEADS:
        tl.store(source + column, turned_first)
        tl.store(source + HALF + column, turned_second)
    else:
        place = keys + ((page * KV_HEADS + head - HEADS) * PAGE + position % PAGE) * DIM
        tl.store(place + column, turned_first)
        tl.store(place + HALF + column, turned_second)


# -- Attention


class DecodeAttention:
    """Attention of one token for each row, over all positions up to its own. Holds what its splits leave for one another.

    A row's keys are read by `num_splits` programs where there are too few rows to fill the GPU."""

    def __init__(self, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, device: torch.device) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim, self.scale = num_heads, num_kv_heads, head_dim, scale
        self.num_splits = min(16, triton.next_power_of_2(triton.cdiv(_multiprocessors(device), num_rows * num_kv_heads)))
        shape = (self.num_splits, num_rows, num_heads)
        self._partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self._highest = torch.empty(shape, dtype=torch.float32, device=device)
        self._mass = torch.empty(shape, dtype=torch.float32, device=device)

    def __call__(self, qkv: Tensor, slots: Tensor, positions: Tensor, table: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R, (H + 2G) D] with its queries turned → [R, H D]."""
        num_rows, group = qkv.shape[0], self.num_heads // self.num_kv_heads
        out = qkv.new_empty(num_rows, self.num_heads * self.head_dim)
        _decode_attention[(num_rows, self.num_kv_heads, self.num_splits)](
            qkv, slots, positions, table, table.stride(0), keys, values, out, self._partial, self._highest, self._mass,
            qkv.stride(0), num_rows, self.scale, KV_HEADS=self.num_kv_heads, GROUP=group,
            GROUP_BLOCK=max(16, triton.next_power_of_2(group)), DIM=self.head_dim, PAGE=PAGE, SPLITS=self.num_splits,
            IS_EXACT=qkv.dtype == torch.float32, num_warps=4, num_stages=3,
        )  # fmt: skip
        if self.num_splits > 1:
            _join_splits[(num_rows, self.num_heads)](
                self._partial, self._highest, self._mass, out, num_rows, HEADS=self.num_heads, DIM=self.head_dim, SPLITS=self.num_splits,
                num_warps=1,
            )  # fmt: skip
        return out


@triton.jit
def _add_page(
    query, keys, values, is_there, is_seen, scale, top, total, gathered, DIM: tl.constexpr, PAGE: tl.constexpr, IS_EXACT: tl.constexpr
):  # fmt: skip
    """One page more in the softmax of some queries: their highest score so far, the sum of weights, and the weighted sum of values."""
    precision: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    column = tl.arange(0, DIM)
    place = tl.arange(0, PAGE)
    key = tl.load(keys + place[None, :] * DIM + column[:, None], mask=is_there[None, :], other=0.0)
    score = tl.where(is_seen, tl.dot(query, key, input_precision=precision) * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp(score - new_top[:, None])
    shrink = tl.exp(top - new_top)
    value = tl.load(values + place[:, None] * DIM + column[None, :], mask=is_there[:, None], other=0.0)
    gathered = gathered * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=precision)
    return new_top, total * shrink + tl.sum(weight, axis=1), gathered


@triton.jit
def _decode_attention(
    qkv, slots, positions, table, table_stride, keys, values, out, partial, highest, mass, qkv_stride, num_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    IS_EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    column = tl.arange(0, DIM)
    place = tl.arange(0, PAGE)
    member = tl.arange(0, GROUP_BLOCK)
    heads = kv_head * GROUP + member
    is_head = member < GROUP
    length = tl.load(positions + row) + 1
    query = tl.load(qkv + row.to(tl.int64) * qkv_stride + heads[:, None] * DIM + column[None, :], mask=is_head[:, None], other=0.0)
    pages = table + tl.load(slots + row).to(tl.int64) * table_stride
    num_pages = (length + PAGE - 1) // PAGE
    share = (num_pages + SPLITS - 1) // SPLITS
    begin = split * share
    end = tl.minimum(begin + share, num_pages)
    top = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    gathered = tl.zeros([GROUP_BLOCK, DIM], tl.float32)
    for number in range(begin, end):
        base = (tl.load(pages + number).to(tl.int64) * KV_HEADS + kv_head) * PAGE * DIM
        is_there = number * PAGE + place < length
        top, total, gathered = _add_page(
            query,
            keys + base,
            values + base,
            is_there,
            is_there[None, :],
            scale,
            top,
            total,
            gathered,
            DIM=DIM,
            PAGE=PAGE,
            IS_EXACT=IS_EXACT,
        )
    if SPLITS == 1:
        result = gathered / tl.maximum(total, 1e-30)[:, None]
        tl.store(
            out + row.to(tl.int64) * HEADS * DIM + heads[:, None] * DIM + column[None, :],
            result.to(out.dtype.element_ty),
            mask=is_head[:, None],
        )
    else:
        cell = (split.to(tl.int64) * num_rows + row) * HEADS + heads
        tl.store(partial + cell[:, None] * DIM + column[None, :], gathered, mask=is_head[:, None])
        tl.store(highest + cell, top, mask=is_head)
        tl.store(mass + cell, total, mask=is_head)


@triton.jit
def _join_splits(partial, highest, mass, out, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    cell = (split * num_rows + row) * HEADS + head
    top = tl.load(highest + cell)
    best = tl.max(top, axis=0)
    shrink = tl.where(top == float("-inf"), 0.0, tl.exp(top - best))
    total = tl.sum(tl.load(mass + cell) * shrink, axis=0)
    parts = tl.load(partial + cell[:, None] * DIM + column[None, :])
    result = tl.sum(parts * shrink[:, None], axis=0) / tl.maximum(total, 1e-30)
    tl.store(out + (row * HEADS + head) * DIM + column, result.to(out.dtype.element_ty))


def prefill_attention(
    qkv: Tensor,
    blocks: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attention of every token of `qkv` [T, (H + 2G) D] over its slot's positions up to its own → [T, H D].

    `blocks` [2, number]: the first token and the number of tokens, at most `QUERY_BLOCK`, of stretches of tokens that follow one another
    in one slot."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    out = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
    _prefill_attention[(blocks.shape[1], num_heads)](
        qkv, blocks, blocks.stride(0), slots, positions, table, table.stride(0), keys, values, out, qkv.stride(0), scale,
        HEADS=num_heads, GROUP=num_heads // num_kv_heads, KV_HEADS=num_kv_heads, DIM=head_dim, PAGE=PAGE, QUERY_BLOCK=QUERY_BLOCK,
        IS_EXACT=qkv.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


QUERY_BLOCK = 64
"""Tokens of one stretch of a prefill."""


@triton.jit
def _prefill_attention(
    qkv, blocks, blocks_stride, slots, positions, table, table_stride, keys, values, out, qkv_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    IS_EXACT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(blocks + block)
    size = tl.load(blocks + blocks_stride + block)
    member = tl.arange(0, QUERY_BLOCK)
    is_query = member < size
    column = tl.arange(0, DIM)
    place = tl.arange(0, PAGE)
    token = (start + member).to(tl.int64)
    query = tl.load(qkv + token[:, None] * qkv_stride + head * DIM + column[None, :], mask=is_query[:, None], other=0.0)
    first_position = tl.load(positions + start)
    pages = table + tl.load(slots + start).to(tl.int64) * table_stride
    last_length = first_position + size
    top = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_BLOCK], tl.float32)
    gathered = tl.zeros([QUERY_BLOCK, DIM], tl.float32)
    for number in range((last_length + PAGE - 1) // PAGE):
        base = (tl.load(pages + number).to(tl.int64) * KV_HEADS + head // GROUP) * PAGE * DIM
        key_position = number * PAGE + place
        is_there = key_position < last_length
        is_seen = is_there[None, :] & (key_position[None, :] <= (first_position + member)[:, None])
        top, total, gathered = _add_page(
            query, keys + base, values + base, is_there, is_seen, scale, top, total, gathered, DIM=DIM, PAGE=PAGE, IS_EXACT=IS_EXACT
        )
    result = gathered / total[:, None]
    tl.store(out + token[:, None] * HEADS * DIM + head * DIM + column[None, :], result.to(out.dtype.element_ty), mask=is_query[:, None])


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


# -- The state of slots, and the next token


def next_rows(rows: Tensor, state: SlotState, embedding: Tensor, positions: Tensor) -> Tensor:
    """[R, N] embeddings of the tokens that stand last in the slots `rows` [R]; `positions` [R] gets where, -1 of those at their limit."""
    out = embedding.new_empty(rows.shape[0], embedding.shape[1])
    width = embedding.shape[1]
    _next_rows[(rows.shape[0],)](
        rows, state.tokens, state.positions, state.limits, embedding, positions, out, width, BLOCK=triton.next_power_of_2(width)
    )
    return out


@triton.jit
def _next_rows(rows, tokens, all_positions, limits, embedding, positions, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    position = tl.load(all_positions + slot)
    tl.store(positions + row, tl.where(position < tl.load(limits + slot), position, -1))
    column = tl.arange(0, BLOCK)
    token = tl.load(tokens + slot).to(tl.int64)
    tl.store(out + row * width + column, tl.load(embedding + token * width + column, mask=column < width), mask=column < width)


class SlotState:
    """What decoding knows of every slot, on the device; one slot more than there are, which never has anything to do."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots + 1, dtype=dtype, device=device)

        self.idle = num_slots
        self.tokens = zeros(torch.int32)
        """That stands last."""
        self.positions = zeros(torch.int32)
        """Where."""
        self.limits = zeros(torch.int32)
        """Nothing is computed for positions from here on."""
        self.counts = zeros(torch.int64)
        """Tokens of the reply so far: the next one's index."""
        self.seeds = zeros(torch.int64)
        self.temperatures = zeros(torch.float32) + 1.0
        self.top_p = zeros(torch.float32) + 1.0
        self.top_k = zeros(torch.int64)


def draw(logits: Tensor, rows: Tensor, state: SlotState, step: Tensor, ids: Tensor, logp: Tensor, *, is_processed: bool = False) -> None:
    """Draw the next token of every row from `logits` [R, V] by its slot's temperature, seed and count; 0 is the likeliest.

    Ids and log-probabilities, at that temperature (1 for 0), go into line `step` [1] of `ids` and `logp` [steps, slots + 1], in the slots'
    columns, and the slots move on by one; then `step` does. With `is_processed`, `logits` are log-probabilities that the temperature is
    in already."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, VOCAB_BLOCK)
    stats = torch.empty(3, num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    common: dict[str, Any] = {"IS_PROCESSED": is_processed, "BLOCK": VOCAB_BLOCK}
    _look_at_block[(num_rows, num_blocks)](
        logits, logits.stride(0), rows, state.temperatures, stats, vocab_size, num_rows, num_blocks, **common, num_warps=8
    )
    _draw[(num_rows,)](
        logits, logits.stride(0), rows, state.tokens, state.positions, state.limits, state.counts, state.seeds, state.temperatures,
        stats, step, ids, logp, ids.stride(0), vocab_size, num_rows, num_blocks, **common, BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=8,
    )  # fmt: skip
    step.add_(1)


@triton.jit
def _temperature(temperatures, slot, IS_PROCESSED: tl.constexpr):
    temperature = tl.load(temperatures + slot)
    if IS_PROCESSED:
        return 1.0 + temperature * 0.0
    return tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _look_at_block(
    logits, stride, rows, temperatures, stats, vocab_size, num_rows, num_blocks, IS_PROCESSED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    temperature = _temperature(temperatures, tl.load(rows + row), IS_PROCESSED)
    value = tl.load(logits + row * stride + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32) / temperature
    highest = tl.max(value, axis=0)
    # A block of tokens that are all impossible has no highest to compare with; a value that is no number must stay one.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    cell = stats + row * num_blocks + block
    tl.store(cell, highest)
    tl.store(cell + num_rows * num_blocks, tl.sum(tl.exp(value - base), axis=0))
    tl.store(cell + 2 * num_rows * num_blocks, tl.argmax(value, axis=0).to(tl.float32))


@triton.jit
def _draw(
    logits, stride, rows, tokens, positions, limits, counts, seeds, temperatures, stats, step, ids, logp, out_stride, vocab_size, num_rows,
    num_blocks, IS_PROCESSED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    number = tl.arange(0, BLOCKS)
    is_block = number < num_blocks
    cells = stats + row * num_blocks + number
    highest = tl.load(cells, mask=is_block, other=float("-inf"))
    best = tl.max(highest, axis=0)
    mass = tl.load(cells + num_rows * num_blocks, mask=is_block, other=0.0) * tl.exp(highest - best)
    mass = tl.where(highest == float("-inf"), 0.0, mass).to(tl.float64)
    total = tl.sum(mass, axis=0)
    # The block in which the cumulative probability passes the uniform number, then the token.
    target = _uniform(tl.load(seeds + slot), tl.load(counts + slot)) * total
    upto = tl.cumsum(mass, axis=0)
    block = tl.min(tl.where(is_block & (upto > target) & (mass > 0), number, BLOCKS), axis=0)
    last = tl.max(tl.where(mass > 0, number, 0), axis=0)
    block = tl.where(block == BLOCKS, last, block)
    before = tl.sum(tl.where(number < block, mass, 0.0), axis=0)
    temperature = _temperature(temperatures, slot, IS_PROCESSED)
    column = tl.arange(0, BLOCK)
    place = block * BLOCK + column
    value = tl.load(logits + row * stride + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32) / temperature
    probability = tl.exp(value - best).to(tl.float64)
    passed = before + tl.cumsum(probability, axis=0)
    token = tl.min(tl.where((passed > target) & (probability > 0), column, BLOCK), axis=0)
    final = tl.max(tl.where(probability > 0, column, 0), axis=0)
    token = block * BLOCK + tl.where(token == BLOCK, final, token)
    # The likeliest token, for greedy rows.
    best_block = tl.min(tl.where(highest == best, number, BLOCKS - 1), axis=0)
    likeliest = best_block * BLOCK + tl.load(stats + 2 * num_rows * num_blocks + row * num_blocks + best_block).to(tl.int32)
    token = tl.where(tl.load(temperatures + slot) == 0.0, likeliest, token)
    chosen = tl.load(logits + row * stride + token).to(tl.float32) / temperature - best - tl.log(total.to(tl.float32))
    line = tl.load(step)
    tl.store(ids + line * out_stride + slot, token)
    tl.store(logp + line * out_stride + slot, chosen)
    position = tl.load(positions + slot)
    moves = tl.where(position < tl.load(limits + slot), 1, 0)
    tl.store(tokens + slot, token)
    tl.store(positions + slot, position + moves)
    tl.store(counts + slot, tl.load(counts + slot) + moves)


@triton.jit
def _mix(bits):
    bits += 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(seed, count):
    """As `sampling.uniform`."""
    bits = _mix(_mix(seed.to(tl.uint64)) + count.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
