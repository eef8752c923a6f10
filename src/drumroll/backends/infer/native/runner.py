"""The model on its device: fixed shapes in, tokens and log-probabilities out. One thread calls it.

Two calls do all the work. `prefill` writes the keys and values of [rows, chunk] tokens into slots; it needs no logits.
`decode` computes one token for each of the first R slots, samples the next one and leaves it in place for the next call, so
that the host only reads. Shapes are bucketed:

    prefill   chunk lengths from `chunk_length`, always with the same number of rows for a length
    decode    rows in steps of 16, attention over `cache_length` positions

A prefill's shape depends on the request's own length alone. For decode's shapes, float32 products on one CPU thread give a row
the same bits in every bucket, so a request's tokens do not depend on its neighbours, its slot or the number of slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from drumroll.backends.checksum import checksum
from drumroll.backends.infer.native.cache import ATTENTION, SlotCache
from drumroll.backends.sampling import processed_logp, sample, uniform
from drumroll.errors import ConfigError, ModelError, WeightSyncError
from drumroll.models.loading import check_complete, load_model
from drumroll.registry import nearest
from drumroll.types import Sampling

if TYPE_CHECKING:
    from drumroll.backends.infer.base import Bucket, Checksums

ROW_STEP = 16
"""Decode's rows come in multiples of this; smaller matrix products may round differently."""


class Chunk(NamedTuple):
    """Tokens of one slot for one prefill call, from position `start` on."""

    slot: int
    start: int
    tokens: list[int]


class Entrant(NamedTuple):
    """A slot that begins to decode: `token` stands at `position`, the reply has `num_sampled` tokens so far."""

    slot: int
    token: int
    position: int
    num_sampled: int
    seed: int
    sampling: Sampling


def bucket(size: int, step: int) -> int:
    """The smallest bucket that holds `size`: `step` times 1, 2, 3, 4, 6, 8, 12, 16, ..., so that at most a third is padding."""
    power = step
    while power < size:
        if power > step and power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def cache_length(size: int) -> int:
    """Positions that attention reads so that `size` are covered: 64, 128, 192, 256, 384, 512, ..."""
    return bucket(size, 64)


class Runner:
    """A causal LM with a slot cache and the sampling state of every slot."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str,
        *,
        num_slots: int,
        context_tokens: int | None,
        prefill_tokens: int | None,
        trust_remote_code: bool,
    ) -> None:
        self.device = torch.device(device)
        self.model = _load_model(folder, dtype, self.device, trust_remote_code)
        text_config = self.model.config.get_text_config()
        self.context = _context(text_config, context_tokens, folder)
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]
        self.end_ids = _ids(text_config.eos_token_id) | _ids(getattr(self.model.generation_config, "eos_token_id", None))
        self.num_rows = -(-num_slots // ROW_STEP) * ROW_STEP
        self.cache = SlotCache(self.num_rows, cache_length(self.context))
        self._prefill_tokens = prefill_tokens or (256 if self.device.type == "cpu" else 8192)
        self._places = torch.arange(self.cache.capacity, device=self.device)
        # One column for each slot; columns are written when a request enters or leaves, and advance on the device.
        self._ints = torch.zeros(6, self.num_rows, dtype=torch.int64, device=self.device)  # token position index active seed top_k
        self._floats = torch.ones(2, self.num_rows, dtype=torch.float32, device=self.device)  # temperature top_p
        self._check_model()

    # -- Computing

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
        self._forward(self.model.base_model, on_device[0], on_device[1], reach)

    def enter(self, entrants: Sequence[Entrant]) -> None:
        """Slots take part in decoding."""
        if not entrants:
            return
        slots = torch.tensor([e.slot for e in entrants], device=self.device)
        ints = [(e.token, e.position, e.num_sampled, 1, _signed(e.seed), e.sampling.top_k) for e in entrants]
        floats = [(e.sampling.temperature, e.sampling.top_p) for e in entrants]
        self._ints.index_copy_(1, slots, torch.tensor(ints, dtype=torch.int64).T.to(self.device))
        self._floats.index_copy_(1, slots, torch.tensor(floats, dtype=torch.float32).T.to(self.device))

    def leave(self, slots: Sequence[int]) -> None:
        """Slots take no part any more; their rows compute, but write nothing that anyone reads."""
        if slots:
            columns = torch.tensor(slots, device=self.device)
            self._ints.index_fill_(1, columns, 0)
            self._floats.index_fill_(1, columns, 1.0)

    def decode(self, num_rows: int, num_positions: int, *, truncates: bool, greedy: bool) -> tuple[list[int], list[float]]:
        """One step of the first `num_rows` slots, none of them beyond `num_positions`: ids and log-probabilities, by slot.

        `truncates` and `greedy` say whether any slot needs that."""
        num_rows = -(-num_rows // ROW_STEP) * ROW_STEP
        token, position, index, active, seed, top_k = self._ints[:, :num_rows]
        temperature, top_p = self._floats[:, :num_rows]
        reach = cache_length(num_positions)
        self.cache.aim(num_rows, torch.where(active > 0, position, self.cache.waste)[:, None], reach)
        logits = self._forward(self.model, token[:, None], position[:, None], reach).logits[:, -1]
        logp = processed_logp(logits, temperature, top_p, top_k, truncates=truncates)
        ids = sample(logp, uniform(seed, index), temperature == 0 if greedy else None)
        chosen = logp.gather(-1, ids[:, None])[:, 0]
        token.copy_(ids)
        position += active
        index += active
        host_ids, host_logp = torch.stack((ids.double(), chosen.double())).tolist()  # the step's only wait for the device
        return [int(i) for i in host_ids], host_logp

    def _forward(self, model: nn.Module, tokens: Tensor, positions: Tensor, reach: int) -> Any:
        hidden = self._places[:reach] > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True)

    # -- Weights and memory

    def take_weights(self, buckets: Iterator[Bucket]) -> Checksums:
        """Copy every parameter in place, strictly: each exactly once, under any of its names, in its own shape."""
        sums: Checksums = {}
        taken: dict[int, str] = {}
        targets: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        for received in buckets:
            for name, tensor in received:
                target = targets.get(name)
                if target is None:
                    raise WeightSyncError(f"'{name}' is no tensor of {type(self.model).__name__}.{nearest(name, targets)}")
                if target.shape != tensor.shape:
                    raise WeightSyncError(f"'{name}' arrived with shape {tuple(tensor.shape)}, expected {tuple(target.shape)}.")
                if id(target) in taken:
                    raise WeightSyncError(f"'{name}' arrived a second time (first as '{taken[id(target)]}').")
                taken[id(target)] = name
                target.copy_(tensor)
                sums[name] = checksum(target if target.dtype == tensor.dtype else tensor.to(self.device))
        missing = [name for name, target in self.model.named_parameters() if id(target) not in taken]
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of the model's tensors did not arrive: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}"
            )
        return sums

    @torch.inference_mode(False)  # a parameter cannot be pointed at a tensor that was made in inference mode
    def sleep(self) -> None:
        """Give the device's memory back."""
        self.cache.drop()
        self.model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode(False)
    def wake(self) -> None:
        """Back onto the device; the cache comes with the first prefill or decode."""
        self.model.to(self.device)

    # -- Checking

    @torch.inference_mode()
    def _check_model(self) -> None:
        """Compare a short text's logits with the model's own forward, so that a model which the slot cache does not serve is refused
        by name instead of served wrongly. Allocates the cache."""
        name = type(self.model).__name__
        tokens = [i * 7 % self.vocab_size for i in range(min(24, self.context - 1))]
        try:
            got, expected = self._own_logits(tokens), self._model_logits(tokens)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"engine.num_slots (got {self.num_rows}) times engine.context_tokens (got {self.context}): the keys and values of so many "
                f"tokens do not fit beside the model into the memory of {self.device}. Lower one of them."
            ) from error
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{name} does not run on the native engine: {type(error).__name__}: {error}. Use another engine.") from error
        num_layers = self.model.config.get_text_config().num_hidden_layers
        if len(self.cache.layers) != num_layers:
            kept = len(self.cache.layers)
            raise ModelError(f"{name} keeps keys and values of {kept} of its {num_layers} layers in the native engine. Use another engine.")
        share = float((got - expected).abs().max() / (expected - expected.mean()).abs().max().clamp_min(1e-6))
        if not share < (1e-3 if self.model.dtype == torch.float32 else 0.1):
            raise ModelError(f"{name} gives other logits in the native engine than by itself (off by {share:.1%}). Use another engine.")

    def _own_logits(self, tokens: list[int]) -> Tensor:
        """[V] after the tokens, the engine's way."""
        last = len(tokens) - 1
        if last:
            self.prefill([Chunk(0, 0, tokens[:-1])], self.chunk_length(last))
        token = torch.full((ROW_STEP, 1), tokens[-1], device=self.device)
        position = torch.full_like(token, last)
        self.cache.aim(ROW_STEP, position, cache_length(len(tokens)))
        logits: Tensor = self._forward(self.model, token, position, cache_length(len(tokens))).logits
        return logits[0, -1].float()

    def _model_logits(self, tokens: list[int]) -> Tensor:
        """[V] after the tokens, the model's own way."""
        self.model.set_attn_implementation("eager")
        try:
            logits: Tensor = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits
        finally:
            self.model.set_attn_implementation(ATTENTION)
        return logits[0, -1].float()


def _load_model(folder: Path, dtype: str, device: torch.device, trust_remote_code: bool) -> Any:
    model, missing = load_model(
        folder, "lm", trust_remote_code=trust_remote_code, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
    )
    check_complete(folder, missing)
    return model.eval().requires_grad_(False).to(device)


def _context(config: Any, wanted: int | None, folder: Path) -> int:
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if wanted is None and limit is None:
        raise ConfigError(f"engine.context_tokens: '{folder}' names no limit of its own, so set one.")
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(f"engine.context_tokens: got {wanted}, but the model's max_position_embeddings is {limit}. Lower it.")
    return wanted or limit or 0


def _signed(seed: int) -> int:
    """The seed's 64 bits as the int64 that torch can hold."""
    seed &= (1 << 64) - 1
    return seed - ((seed >> 63) << 64)


def _ids(value: int | list[int] | None) -> frozenset[int]:
    """Configs give end tokens as nothing, a number or a list."""
    return frozenset([value] if isinstance(value, int) else value or ())
