"""Decoders of the Llama family on a GPU: pages of keys and values, and decode steps that the host only starts.

A decode step is one CUDA graph: embeddings, all layers, the draw of the next token, the move to the next position. The state of every slot
lives on the device, so a launch is a few replays in a row; the host reads the tokens of one launch while the next is running. What a step
depends on is bucketed by its number of rows alone, because attention reads each row's length on the device.

Requests that begin alike share pages and their prefill: `pages` has the books.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumroll.backends.infer.desk import limits_of
from drumroll.backends.infer.native.fused import FusedModel
from drumroll.backends.infer.native.kernels import PAGE, QUERY_BLOCK, DecodeAttention, SlotState, draw, next_rows, prefill_attention
from drumroll.backends.infer.native.layers import take_apart
from drumroll.backends.infer.native.pages import Holding, PageBook
from drumroll.backends.infer.native.runner import (
    Runner,
    Sampled,
    own_logits,
    refuse_other_logits,
    signed,
    trial_tokens,
)
from drumroll.backends.offload import settle
from drumroll.backends.sampling import processed_logp
from drumroll.errors import ConfigError

if TYPE_CHECKING:
    from drumroll.backends.infer.native import Native
    from drumroll.backends.infer.request import Request

STEPS = 8
"""Decode steps of one launch at most."""

SHARE_OF_MEMORY = 0.85
"""Of the device memory that is free beside the model, what keys and values may take."""


class Started(NamedTuple):
    """Steps that were launched: where their tokens will be, and the event after which they are there."""

    ids: Tensor
    logp: Tensor
    event: torch.cuda.Event | None


class PagedRunner(Runner):
    """A fused model with its pages, the state of its slots, and its graphs. Without a GPU it runs eagerly, in Triton's interpreter."""

    num_ahead = 1

    def __init__(self, model: Any, folder: Path, cfg: Native.Config) -> None:
        self.device = model.device
        self.limits = limits_of(model.config, model.generation_config, cfg.context_tokens, folder)
        self._name = type(model).__name__
        self._prefill_tokens = cfg.prefill_tokens or 8192
        self._num_slots = cfg.num_slots
        self._pages_of_context = -(-self.limits.context // PAGE)
        self._wanted_pages = -(-cfg.cache_tokens // PAGE) if cfg.cache_tokens else None
        trial = trial_tokens(self.limits.vocab_size, self.limits.context)
        with torch.inference_mode():
            expected = own_logits(model, trial)
        self.model = FusedModel(take_apart(model, self.limits.context))
        self.state = SlotState(cfg.num_slots, self.device)
        self._rows = torch.full((cfg.num_slots,), self.state.idle, dtype=torch.int32, device=self.device)
        self._positions = torch.zeros(cfg.num_slots, dtype=torch.int32, device=self.device)
        self._table = torch.zeros(cfg.num_slots + 1, self._pages_of_context, dtype=torch.int32, device=self.device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._ids = torch.zeros(STEPS, cfg.num_slots + 1, dtype=torch.int32, device=self.device)
        self._logp = torch.zeros(STEPS, cfg.num_slots + 1, dtype=torch.float32, device=self.device)
        self._host_table: NDArray[np.int32] = np.zeros((cfg.num_slots + 1, self._pages_of_context), dtype=np.int32)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._attention: dict[int, DecodeAttention] = {}
        self._free = list(range(cfg.num_slots))[::-1]
        self._holdings: dict[int, Holding] = {}
        self._launched_upto: dict[int, int] = {}
        """The position that each decoding slot will have reached after what was launched, unless its limit comes first."""
        self._slots_on_device: list[int] = []
        self._table_changed = False
        self._store: Tensor | None = None
        self.book = PageBook(self._num_pages(), PAGE)
        self._check_model(trial, expected)

    # -- Places

    def admit(self, entry: Request) -> bool:
        """A slot is given where there are pages for all of the request's tokens that nobody holds or was promised."""
        num_needed = -(-min(len(entry.tokens) + STEPS, self._limit(entry)) // PAGE)
        if not self._free or (self._holdings and self._num_unpromised() < num_needed):
            return False
        entry.take_slot(self._free.pop())
        self._holdings[entry.slot] = Holding(num_promised=min(num_needed, self.book.num_available))
        return True

    def leave(self, entry: Request, *, keep: bool) -> None:
        holding = self._holdings.pop(entry.slot)
        if self._launched_upto.pop(entry.slot, None) is not None and keep and holding.is_sealable:
            for page, key in zip(holding.pages, self.book.keys(entry.tokens[:-1]), strict=False):
                self.book.seal(page, key)
        self.book.release(holding.pages)
        self._free.append(entry.slot)

    def forget(self, *, sessions: bool) -> None:
        self.book.forget()
        for holding in self._holdings.values():
            holding.is_sealable = False

    def make_room(self, running: Sequence[Request]) -> list[Request]:
        """The latest to come is the first to go."""
        for entry in sorted(running, key=lambda entry: entry.started):
            upto = min(self._launched_upto[entry.slot] + STEPS, self._limit(entry))
            while len(self._holdings[entry.slot].pages) * PAGE < upto:
                if self._num_unpromised() < 1:
                    return [max(running, key=lambda entry: entry.started)]
                self._append(entry.slot, self.book.take())
        return []

    def wipe(self, entry: Request) -> None:
        assert self._store is not None
        self._holdings[entry.slot].is_sealable = False
        self._store[:, :, self._holdings[entry.slot].pages] = 0

    def _limit(self, entry: Request) -> int:
        """The position from which on nothing needs to be computed: the last token of a reply never is."""
        return min(self.limits.context, entry.num_prompt_tokens + entry.sampling.max_new_tokens) - 1

    def _num_unpromised(self) -> int:
        return self.book.num_available - sum(holding.num_promised for holding in self._holdings.values())

    def _append(self, slot: int, page: int | None) -> None:
        assert page is not None, "pages are counted before they are taken"
        holding = self._holdings[slot]
        self._host_table[slot, len(holding.pages)] = page
        self._table_changed = True
        holding.pages.append(page)
        holding.num_promised = max(0, holding.num_promised - 1)

    # -- Computing

    def fill(self, entries: Sequence[Request]) -> None:
        """As many tokens as one call takes. What another slot holds is shared, or copied where it does not fill a page; what another is
        about to compute in this call waits for the next."""
        self._allocate()
        chosen: list[tuple[Request, int]] = []
        copies: list[tuple[int, int]] = []
        under_way: set[bytes] = set()
        room = self._prefill_tokens
        for entry in entries:
            missing = self._share(entry, copies)
            length = entry.num_to_fill if entry.num_to_fill <= room else room // PAGE * PAGE
            if not length or missing in under_way:
                continue
            while len(self._holdings[entry.slot].pages) * PAGE < entry.num_cached + length:
                self._append(entry.slot, self.book.take())
            under_way.add(missing)
            room -= length
            chosen.append((entry, length))
        if copies:
            self._copy(copies)
        if chosen:
            self._upload_table()
            self._prefill([(entry.slot, entry.num_cached, entry.tokens[entry.num_cached :][:length]) for entry, length in chosen])
        for entry, length in chosen:
            entry.num_cached += length
            holding = self._holdings[entry.slot]
            for page, key in zip(holding.pages, holding.keys, strict=False) if holding.is_sealable else ():
                self.book.seal(page, key)

    def _share(self, entry: Request, copies: list[tuple[int, int]]) -> bytes:
        """Take over what is there already; the key of the first page that is not. Calls end with a page or with the tokens to fill, so
        that nothing is ever half done here."""
        holding = self._holdings[entry.slot]
        if not holding.keys:
            holding.keys = list(self.book.keys(entry.tokens[:-1]))
        while entry.num_to_fill:
            key = holding.keys[len(holding.pages)]
            page = self.book.find(key)
            if page is None:
                return key
            self.book.hold(page)
            if entry.num_to_fill >= PAGE:
                self._append(entry.slot, page)
                entry.num_cached += PAGE
            else:  # the slot goes on to write into this one
                own = self.book.take()
                self.book.release([page])
                self._append(entry.slot, own)
                copies.append((page, holding.pages[-1]))
                entry.num_cached += entry.num_to_fill
        return b""

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._store is not None
        sources, targets = (torch.tensor(pages, device=self.device) for pages in zip(*copies, strict=True))
        self._store.index_copy_(2, targets, self._store.index_select(2, sources))

    def _prefill(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Keys and values of (slot, first position, tokens)."""
        sizes = [len(tokens) for _, _, tokens in chunks]
        starts = np.cumsum([0, *sizes])
        tokens = self._send(np.concatenate([np.asarray(tokens, dtype=np.int64) for _, _, tokens in chunks]))
        slots = self._send(np.repeat([slot for slot, _, _ in chunks], sizes).astype(np.int32))
        positions = self._send(
            np.concatenate([np.arange(first, first + size) for (_, first, _), size in zip(chunks, sizes, strict=True)]).astype(np.int32)
        )
        blocks = [
            (starts[number] + begin, min(QUERY_BLOCK, size - begin))
            for number, size in enumerate(sizes)
            for begin in range(0, size, QUERY_BLOCK)
        ]
        stretches = self._send(np.asarray(blocks, dtype=np.int32).T.copy())

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return prefill_attention(qkv, stretches, slots, positions, self._table, keys, values, self.model.num_heads, self.model.scale)

        self.model.forward(self.model.embedding[tokens], slots, positions, self._table, self._pages(), attend)

    def enter(self, entries: Sequence[Request]) -> None:
        if not entries:
            return
        slots = self._send(np.asarray([entry.slot for entry in entries], dtype=np.int64))
        ints = np.asarray(
            [(e.tokens[-1], len(e.tokens) - 1, self._limit(e), e.num_sampled, signed(e.seed), e.sampling.top_k) for e in entries],
            dtype=np.int64,
        )
        floats = np.asarray([(e.sampling.temperature, e.sampling.top_p) for e in entries], dtype=np.float32)
        for target, column in zip(
            (self.state.tokens, self.state.positions, self.state.limits, self.state.counts, self.state.seeds, self.state.top_k),
            self._send(ints.T.copy()),
            strict=True,
        ):
            target.index_copy_(0, slots, column.to(target.dtype))
        for target, column in zip((self.state.temperatures, self.state.top_p), self._send(floats.T.copy()), strict=True):
            target.index_copy_(0, slots, column)
        for entry in entries:
            self._launched_upto[entry.slot] = len(entry.tokens) - 1
            self._holdings[entry.slot].num_promised = 0

    def launch(self, running: Mapping[int, Request]) -> Started | None:
        num_steps = min(STEPS, max(self._limit(entry) - self._launched_upto[slot] for slot, entry in running.items()))
        if num_steps <= 0:
            return None
        self._allocate()
        slots = list(running)
        num_rows = min(row_bucket(len(slots)), self._num_slots)
        truncates = any(entry.sampling.top_k > 0 or entry.sampling.top_p < 1 for entry in running.values())
        graph = self._graph(num_rows, truncates)
        if slots != self._slots_on_device:
            rows = np.full(self._num_slots, self.state.idle, dtype=np.int32)
            rows[: len(slots)] = slots
            self._rows.copy_(self._send(rows), non_blocking=True)
            self._slots_on_device = slots
        self._upload_table()
        self._step.zero_()
        for _ in range(num_steps):
            if graph is None:
                self._decode(num_rows, truncates)
            else:
                graph.replay()
        for slot in slots:
            self._launched_upto[slot] += num_steps
        if self.device.type == "cpu":
            return Started(self._ids[:num_steps].clone(), self._logp[:num_steps].clone(), None)
        shape = (num_steps, self._ids.shape[1])
        ids = torch.empty(shape, dtype=torch.int32, pin_memory=True).copy_(self._ids[:num_steps], non_blocking=True)
        logp = torch.empty(shape, dtype=torch.float32, pin_memory=True).copy_(self._logp[:num_steps], non_blocking=True)
        return Started(ids, logp, torch.cuda.current_stream(self.device).record_event())

    def read(self, flight: Started) -> Sampled:
        if flight.event is not None:
            flight.event.synchronize()
        return Sampled(flight.ids.T.tolist(), flight.logp.T.tolist())

    def _decode(self, num_rows: int, truncates: bool) -> None:
        """One step of the first rows, on the device alone."""
        rows, positions, state = self._rows[:num_rows], self._positions[:num_rows], self.state
        if num_rows not in self._attention:
            model = self.model
            self._attention[num_rows] = DecodeAttention(
                num_rows, model.num_heads, model.num_kv_heads, model.head_dim, model.scale, self.device
            )
        attention = self._attention[num_rows]

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention(qkv, rows, positions, self._table, keys, values)

        embedded = next_rows(rows, state, self.model.embedding, positions)
        hidden = self.model.forward(embedded, rows, positions, self._table, self._pages(), attend)
        logits = self.model.logits(hidden)
        if truncates:
            index = rows.long()
            logits = processed_logp(logits, state.temperatures[index], state.top_p[index], state.top_k[index], truncates=True)
        draw(logits, rows, state, self._step, self._ids, self._logp, is_processed=truncates)

    def _graph(self, num_rows: int, truncates: bool) -> torch.cuda.CUDAGraph | None:
        """The captured step; what warms it up and captures it finds idle rows only, and changes nothing."""
        if self.device.type == "cpu":
            return None
        if (num_rows, truncates) not in self._graphs:
            self._rows.fill_(self.state.idle)
            self._slots_on_device = []
            self._step.zero_()
            self._decode(num_rows, truncates)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            shared = next(iter(self._graphs.values())).pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
                self._decode(num_rows, truncates)
            self._graphs[num_rows, truncates] = graph
        return self._graphs[num_rows, truncates]

    # -- Weights and memory

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.by_name

    def sleep(self) -> None:
        self._graphs.clear()
        self._attention.clear()
        self._store = None
        self.model.to(torch.device("cpu"))
        settle(self.device)

    def wake(self) -> None:
        self.model.to(self.device)

    def _num_pages(self) -> int:
        """As many as were asked for, or as all slots can ever need, or as fit."""
        wanted = self._wanted_pages or self._num_slots * self._pages_of_context
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the model's weights were copied while they were joined
            free = torch.cuda.mem_get_info(self.device)[0]
            fitting = int(free * SHARE_OF_MEMORY) // self.model.bytes_per_page()
            if self._wanted_pages is None:
                wanted = min(wanted, fitting)
            elif wanted > fitting:
                raise ConfigError(
                    f"engine.cache_tokens: keys and values of {wanted * PAGE} tokens do not fit beside the model into the memory of "
                    f"{self.device}, of which {free / 2**30:.1f} GiB are free. At most {fitting * PAGE} would."
                )
        if wanted < self._pages_of_context:
            raise ConfigError(
                f"engine.context_tokens (got {self.limits.context}): the keys and values of a single request of that length do not fit "
                f"into {wanted * PAGE} tokens of cache. Lower it, or raise engine.cache_tokens."
            )
        return wanted

    def _allocate(self) -> None:
        if self._store is None:
            self._store = self.model.new_store(self.book.num_pages)

    def _pages(self) -> list[tuple[Tensor, Tensor]]:
        assert self._store is not None
        return [(layer[0], layer[1]) for layer in self._store]

    def _upload_table(self) -> None:
        if self._table_changed:
            self._table.copy_(self._send(self._host_table.copy()), non_blocking=True)
            self._table_changed = False

    def _send(self, values: NDArray[Any]) -> Tensor:
        """Onto the device without waiting for it."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    # -- Checking

    @torch.inference_mode()
    def _check_model(self, tokens: list[int], expected: Tensor) -> None:
        """Compare a short text's logits with the model's own, so that a model which is not what it seems is refused by name."""
        self._allocate()
        self._table[0].copy_(torch.arange(self._pages_of_context))
        if len(tokens) > 1:
            self._prefill([(0, 0, tokens[:-1])])
        position = torch.tensor([len(tokens) - 1], dtype=torch.int32, device=self.device)
        slot = torch.zeros_like(position)
        attention = DecodeAttention(1, self.model.num_heads, self.model.num_kv_heads, self.model.head_dim, self.model.scale, self.device)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attention(qkv, slot, position, self._table, keys, values)

        embedded = self.model.embedding[torch.tensor(tokens[-1:], device=self.device)]
        got = self.model.logits(self.model.forward(embedded, slot, position, self._table, self._pages(), attend))[0].float()
        refuse_other_logits(self._name, got, expected, self.model.dtype)


def row_bucket(num_rows: int) -> int:
    """1, 2, 4, 8, then steps of 8 up to 64, of 32 up to 256, of 64 beyond: graphs are few, and rows that do nothing too."""
    for upto, step in ((8, 1), (64, 8), (256, 32)):
        if num_rows <= upto:
            rounded = -(-num_rows // step) * step
            return 1 << (rounded - 1).bit_length() if upto == 8 else rounded
    return -(-num_rows // 64) * 64
