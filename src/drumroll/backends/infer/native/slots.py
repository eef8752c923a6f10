"""Any causal LM of transformers in fixed shapes: each request in a slot of its own, keys and values in static tensors. Models of the Llama
family are taken apart for that (`lean`); others run as they are (`whole`).

Two calls do all the work. A prefill writes the keys and values of [rows, chunk] tokens into slots; it needs no logits. A decode step
computes one token for each of the first R slots, samples the next one and leaves it in place for the next call, so that the host
only reads.
Shapes are bucketed:

    prefill   chunk lengths from `chunk_length`, attention over `cache_length` positions, the same for all rows of a call
    decode    rows in steps of 16, attention over `cache_length` positions

A prefill's shape depends on the request's own length alone. For decode's shapes, float32 products on one CPU thread give a row
the same bits in every bucket, so a request's tokens do not depend on its neighbours, its slot or the number of slots. Requests with the
same prompt share its prefill: whoever comes later gets a copy of the keys and values, which are the bits that it would have computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drumroll.backends.infer.desk import Limits, limits_from, limits_of
from drumroll.backends.infer.native.cache import LEAST_LENGTH, SlotCache
from drumroll.backends.infer.native.compiled_model import open_lean
from drumroll.backends.infer.native.decode import Decode
from drumroll.backends.infer.native.layers import take_apart, why_not_taken_model
from drumroll.backends.infer.native.lean import LeanModel
from drumroll.backends.infer.native.runner import (
    Runner,
    Sampled,
    own_logits,
    refuse_other_logits,
    signed,
    trial_tokens,
)
from drumroll.backends.infer.native.whole import WholeModel
from drumroll.backends.offload import settle
from drumroll.backends.sampling import processed_logp, sample, uniform
from drumroll.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from drumroll.backends.infer.base import Bucket, Checksums
    from drumroll.backends.infer.native import Native
    from drumroll.backends.infer.request import Request
    from drumroll.backends.llama_folder import LlamaFolder

ROW_STEP = 16
"""Decode's rows come in multiples of this; smaller matrix products may round differently."""


class Chunk(NamedTuple):
    """Tokens of one slot for one prefill call, from position `start` on."""

    slot: int
    start: int
    tokens: list[int]


class Rest(NamedTuple):
    """A slot that nobody uses, and the tokens whose keys and values it holds."""

    slot: int
    tokens: list[int]


class DecodeShape(NamedTuple):
    """What a decode step depends on besides the slots' own state."""

    num_rows: int
    num_positions: int
    truncates: bool
    greedy: bool

    @classmethod
    def of(cls, running: Mapping[int, Request]) -> DecodeShape:
        entries = running.values()
        return cls(
            num_rows=max(running) + 1,
            num_positions=max(len(entry.tokens) for entry in entries),
            truncates=any(entry.sampling.top_k > 0 or entry.sampling.top_p < 1 for entry in entries),
            greedy=any(entry.sampling.temperature == 0 for entry in entries),
        )

    @property
    def advanced(self) -> DecodeShape:
        """Of the next step, when the same requests go on."""
        return self._replace(num_positions=self.num_positions + 1)


def bucket(size: int, step: int) -> int:
    """The smallest bucket that holds `size`: `step` times 1, 2, 3, 4, 6, 8, 12, 16, ..., so that at most a third is padding."""
    power = step
    while power < size:
        if power > step and power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def cache_length(size: int) -> int:
    """Positions that attention reads so that `size` are covered: 32, 48, 64, 96, 128, 192, ... A row's bits are the same for each."""
    return bucket(max(size, LEAST_LENGTH), 16)


def _functions(cfg: Native.Config) -> Decode | None:
    return Decode.open() if cfg.compiles else None


def _rows(size: int) -> int:
    """Rows of a decode step over the first `size` slots."""
    return -(-size // ROW_STEP) * ROW_STEP


@contextmanager
def _refused_by(name: str) -> Iterator[None]:
    """Whatever a model raises becomes a `ModelError` with its name."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{name} does not run on the native engine: {type(error).__name__}: {error}. Use another engine.") from error


class SlotRunner(Runner):
    """A causal LM with a slot cache and the sampling state of every slot."""

    num_ahead = 0

    def __init__(self, model: WholeModel | LeanModel, device: torch.device, limits: Limits, cfg: Native.Config) -> None:
        self.model = model
        self.device = device
        self.limits = limits
        self.num_rows = _rows(cfg.num_slots)
        self.cache = SlotCache(self.num_rows, cache_length(self.limits.context))
        self._prefill_tokens = cfg.prefill_tokens or (256 if self.device.type == "cpu" else 8192)
        self._places = torch.arange(self.cache.capacity, device=self.device)
        # One column for each slot; columns are written when a request enters or leaves, and advance on the device.
        self._ints = torch.zeros(6, self.num_rows, dtype=torch.int64, device=self.device)  # token position index active seed top_k
        self._floats = torch.ones(2, self.num_rows, dtype=torch.float32, device=self.device)  # temperature top_p
        self._functions = _functions(cfg) if device.type == "cpu" else None
        self._free = list(range(cfg.num_slots))
        self._resting: dict[str, Rest] = {}
        """Slots that keep what a session's last request left, by session, the longest at rest first."""
        self._decoding: set[int] = set()
        """Slots that take part in decoding."""
        self._left: list[int] = []
        """Slots that take no part in decoding any more, which the device has not been told yet."""
        self._shape: DecodeShape | None = None
        """What the next decode step takes; None after requests have entered or left."""
        self._prompt_of: dict[int, bytes] = {}
        """All tokens of a prompt but the last, by the slot that began with nothing but them."""
        self._holders: dict[bytes, set[int]] = {}
        """Slots that hold the keys and values of a prompt."""
        self._fillers: dict[bytes, int] = {}
        """The slot that is about to get them."""

    @classmethod
    def of_folder(cls, found: LlamaFolder, dtype: torch.dtype, cfg: Native.Config) -> SlotRunner:
        """On the CPU, of a folder that drumroll reads by itself."""
        ends = [source.get("eos_token_id") for source in (found.config, found.generation)]
        limits = limits_from(
            found.config.get("max_position_embeddings"), found.config["vocab_size"], ends, cfg.context_tokens, found.folder
        )
        runner = cls(open_lean(found.read(dtype, limits.context), _functions(cfg)), torch.device("cpu"), limits, cfg)
        runner._try_out(str(found.folder))
        return runner

    @classmethod
    @torch.inference_mode()
    def of_model(cls, model: Any, folder: Path, cfg: Native.Config) -> SlotRunner:
        """Of a model of transformers. A short text's logits are compared with those of its own forward, so that a model which is not
        served rightly is refused by name."""
        name, limits = type(model).__name__, limits_of(model.config, model.generation_config, cfg.context_tokens, folder)
        with _refused_by(name):
            expected = own_logits(model, trial_tokens(limits.vocab_size, limits.context))
            optional = frozenset(name for name, _ in model.named_buffers())
            own = WholeModel(model) if why_not_taken_model(model) else open_lean(take_apart(model, limits.context), _functions(cfg))
        runner = cls(own, model.device, limits, cfg)
        runner.optional = optional
        refuse_other_logits(name, runner._try_out(name), expected, own.dtype)
        return runner

    # -- Places

    def admit(self, entry: Request) -> bool:
        """One that goes on with a session takes its slot, others a free one, lowest first, so that decoding runs few rows, and when there
        is none the one that has been at rest for longest."""
        if not self._free and not self._resting:
            return False
        rest = self._resting.get(entry.session)
        if rest is not None and entry.begins_with(rest.tokens):
            del self._resting[entry.session]
            entry.take_slot(rest.slot, len(rest.tokens))
            return True
        self._give_up(entry.session if rest is not None or self._free else next(iter(self._resting)))
        slot, prompt = heapq.heappop(self._free), np.asarray(entry.tokens[:-1], dtype=np.int64).tobytes()
        if slot in self._holders.get(prompt, ()):
            entry.take_slot(slot, len(entry.tokens) - 1)
            return True
        self._disown(slot)
        self._prompt_of[slot] = prompt
        entry.take_slot(slot)
        return True

    def leave(self, entry: Request, *, keep: bool) -> None:
        if entry.slot in self._decoding:
            self._decoding.discard(entry.slot)
            self._left.append(entry.slot)
            self._shape = None
        else:
            self._disown(entry.slot)
        if keep and entry.session:
            self._give_up(entry.session)
            self._resting[entry.session] = Rest(entry.slot, entry.tokens[:-1])
        else:
            heapq.heappush(self._free, entry.slot)

    def forget(self, *, sessions: bool) -> None:
        self._holders.clear()
        self._fillers.clear()
        for session in list(self._resting) if sessions else ():
            self._give_up(session)

    def make_room(self, running: Sequence[Request]) -> list[Request]:
        return []

    def tidy(self, running: Mapping[int, Request]) -> bool:
        """Rows cost time whether they are needed or not, so requests in the last slots move to free ones before them, where that saves
        a step of rows."""
        num_rows = _rows(len(running))
        if self._shape is not None or _rows(max(running) + 1) == num_rows:
            return False
        outside = sorted((slot for slot in running if slot >= num_rows), reverse=True)
        moves: list[tuple[int, int]] = []
        while outside and self._free and self._free[0] < num_rows:
            moves.append((outside.pop(), heapq.heappop(self._free)))
        for source, target in moves:
            entry = running[source]
            self._disown(target)
            self.cache.copy(source, target, len(entry.tokens) - 1)
            entry.slot = target
            self._decoding.discard(source)
            self._decoding.add(target)
            heapq.heappush(self._free, source)
        if moves:
            self._tell_left()
            sources, targets = (torch.tensor(slots, device=self.device) for slots in zip(*moves, strict=True))
            for state in (self._ints, self._floats):
                state.index_copy_(1, targets, state.index_select(1, sources))
            self._left += [source for source, _ in moves]
        return bool(moves)

    def wipe(self, entry: Request) -> None:
        self._disown(entry.slot)
        self.cache.wipe(entry.slot)

    def _give_up(self, session: str) -> None:
        rest = self._resting.pop(session, None)
        if rest is not None:
            heapq.heappush(self._free, rest.slot)

    def _disown(self, slot: int) -> None:
        """What the slot holds is no prompt that others could have a copy of."""
        prompt = self._prompt_of.pop(slot, b"")
        holders = self._holders.get(prompt, set())
        holders.discard(slot)
        if not holders:
            self._holders.pop(prompt, None)
        if self._fillers.get(prompt) == slot:
            del self._fillers[prompt]

    # -- Computing

    def fill(self, entries: Sequence[Request]) -> None:
        """One call for the oldest request and those whose chunk has the same length and reaches as far back, and a copy for those whose
        prompt is complete in another slot; whose prompt is on its way in another slot waits for it."""
        rows: list[Request] = []
        shape, has_progress = (0, 0), False
        for entry in entries:
            if not entry.num_to_fill:
                has_progress = True
                continue
            if not entry.num_cached:
                prompt = self._prompt_of[entry.slot]
                holders = self._holders.get(prompt)
                if holders:
                    self.cache.copy(min(holders), entry.slot, entry.num_to_fill)
                    entry.num_cached += entry.num_to_fill
                    holders.add(entry.slot)
                    has_progress = True
                    continue
                if self._fillers.setdefault(prompt, entry.slot) != entry.slot:
                    continue
            own_length = self.chunk_length(entry.num_to_fill)
            own_shape = own_length, cache_length(entry.num_cached + min(own_length, entry.num_to_fill))
            shape = shape if rows else own_shape
            if own_shape == shape and len(rows) < self.chunk_rows(own_length):
                rows.append(entry)
        assert rows or has_progress, "whoever is waited for is among those to fill"
        length, _ = shape
        if rows:
            self.prefill([Chunk(e.slot, e.num_cached, e.tokens[e.num_cached : -1][:length]) for e in rows], length)
        for entry in rows:
            entry.num_cached += min(length, entry.num_to_fill)
            prompt = self._prompt_of.get(entry.slot, b"")
            if not entry.num_to_fill and self._fillers.get(prompt) == entry.slot:
                del self._fillers[prompt]
                self._holders.setdefault(prompt, set()).add(entry.slot)

    def chunk_length(self, num_tokens: int) -> int:
        """Length of the prefill call that a request with this many tokens to fill takes part in next."""
        return min(bucket(num_tokens, ROW_STEP), max(ROW_STEP, self._prefill_tokens))

    def chunk_rows(self, length: int) -> int:
        """Rows of a prefill call of this length at most."""
        return max(1, self._prefill_tokens // length)

    def prefill(self, chunks: Sequence[Chunk], length: int) -> None:
        """Keys and values of up to `chunk_rows(length)` chunks, none longer than `length`."""
        num_rows = min(bucket(len(chunks), 1), self.chunk_rows(length))
        tokens, positions, writes = np.zeros((3, num_rows, length), dtype=np.int64)
        writes[:] = self.cache.waste
        slots = np.zeros(num_rows, dtype=np.int64)
        for row, chunk in enumerate(chunks):
            end = len(chunk.tokens)
            tokens[row, :end] = chunk.tokens
            positions[row, :end] = writes[row, :end] = np.arange(chunk.start, chunk.start + end)
            slots[row] = chunk.slot
        reach = cache_length(max(chunk.start + len(chunk.tokens) for chunk in chunks))
        on_device = [torch.from_numpy(values).to(self.device) for values in (tokens, positions, writes, slots)]
        self.cache.aim(on_device[3], on_device[2], reach)
        self.model.fill(on_device[0], on_device[1], self._mask(on_device[1], reach), self.cache)

    def enter(self, entries: Sequence[Request]) -> None:
        if not entries:
            return
        self._shape = None
        self._decoding.update(entry.slot for entry in entries)
        slots = torch.tensor([entry.slot for entry in entries], device=self.device)
        ints = [(e.tokens[-1], len(e.tokens) - 1, e.num_sampled, 1, signed(e.seed), e.sampling.top_k) for e in entries]
        floats = [(e.sampling.temperature, e.sampling.top_p) for e in entries]
        self._tell_left()
        self._ints.index_copy_(1, slots, torch.tensor(ints, dtype=torch.int64).T.to(self.device))
        self._floats.index_copy_(1, slots, torch.tensor(floats, dtype=torch.float32).T.to(self.device))

    def launch(self, running: Mapping[int, Request]) -> Sampled:
        self._tell_left()
        shape = self._shape or DecodeShape.of(running)
        self._shape = shape.advanced
        return self.decode(shape)

    def read(self, flight: Sampled) -> Sampled:
        return flight

    def _tell_left(self) -> None:
        """Slots that were left take no part any more; their rows compute, but write nothing that anyone reads."""
        if self._left:
            columns = torch.tensor(self._left, device=self.device)
            self._ints.index_fill_(1, columns, 0)
            self._floats.index_fill_(1, columns, 1.0)
            self._left = []

    def decode(self, shape: DecodeShape) -> Sampled:
        """One step of the first slots."""
        num_rows = _rows(shape.num_rows)
        token, position, index, active, seed, top_k = self._ints[:, :num_rows]
        temperature, top_p = self._floats[:, :num_rows]
        reach = cache_length(shape.num_positions)
        self.cache.aim(num_rows, torch.where(active > 0, position, self.cache.waste)[:, None], reach)
        logits = self.model.next_logits(token[:, None], position[:, None], self._mask(position[:, None], reach), self.cache)
        ids, chosen = self._drawn(logits, shape, temperature, top_p, top_k, seed, index)
        token.copy_(ids)
        position += active
        index += active
        host_ids, host_logp = torch.stack((ids.double(), chosen.double()))[:, :, None].tolist()  # the only wait for the device
        return Sampled([[int(i) for i in line] for line in host_ids], host_logp)

    def _drawn(
        self, logits: Tensor, shape: DecodeShape, temperature: Tensor, top_p: Tensor, top_k: Tensor, seed: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[R] tokens and [R] their log-probabilities. How a row draws depends on its own settings alone."""
        functions = self._functions if logits.dtype == torch.float32 else None
        if functions is not None and not shape.truncates:
            return functions.draw(logits, temperature, seed, index)
        logp = processed_logp(logits, temperature, top_p, top_k, truncates=shape.truncates)
        ids = sample(logp, uniform(seed, index), temperature == 0 if shape.greedy else None)
        chosen = logp.gather(-1, ids[:, None])[:, 0]
        if functions is None:
            return ids, chosen
        is_whole = (top_k == 0) & (top_p >= 1)
        drawn = functions.draw(logits, temperature, seed, index)
        return torch.where(is_whole, drawn[0], ids), torch.where(is_whole, drawn[1], chosen)

    def _mask(self, positions: Tensor, reach: int) -> Tensor:
        """[R, 1, Q, reach]: 0 for what tokens at `positions` [R, Q] see, -inf for the rest."""
        hidden = self._places[:reach] > positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device).masked_fill_(hidden, -torch.inf)

    # -- Weights and memory

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.weights()

    def take_weights(self, buckets: Iterator[Bucket]) -> Checksums:
        sums = super().take_weights(buckets)
        self.model.renew()
        return sums

    def sleep(self) -> None:
        """Give the device's memory back."""
        self.cache.drop()
        self.model.to(torch.device("cpu"))
        settle(self.device)

    def wake(self) -> None:
        """Back onto the device; the cache comes with the first prefill or decode."""
        self.model.to(self.device)

    # -- Checking

    @torch.inference_mode()
    def _try_out(self, name: str) -> Tensor:
        """[V] the logits of a short text. Allocates the cache."""
        try:
            with _refused_by(name):
                logits = self._logits(trial_tokens(self.limits.vocab_size, self.limits.context))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"engine.num_slots (got {self.num_rows}) times engine.context_tokens (got {self.limits.context}): the keys and values of "
                f"so many tokens do not fit beside the model into the memory of {self.device}. Lower one of them."
            ) from error
        kept, num_layers = len(self.cache.layers), self.model.num_layers
        if kept != num_layers:
            raise ModelError(f"{name} keeps keys and values of {kept} of its {num_layers} layers in the native engine. Use another engine.")
        return logits

    def _logits(self, tokens: list[int]) -> Tensor:
        """[V] after the tokens, the engine's way."""
        last = len(tokens) - 1
        if last:
            self.prefill([Chunk(0, 0, tokens[:-1])], self.chunk_length(last))
        token = torch.full((ROW_STEP, 1), tokens[-1], device=self.device)
        position = torch.full_like(token, last)
        self.cache.aim(ROW_STEP, position, cache_length(len(tokens)))
        mask = self._mask(position, cache_length(len(tokens)))
        return self.model.next_logits(token, position, mask, self.cache)[0].float()
