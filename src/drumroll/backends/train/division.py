"""A model divided over the ranks of a grid: matrices over `tp`, experts over `ep`; and what a rank holds of each tensor.

The model is changed in place, before FSDP2 shards what is left on each rank:

    embedding, head   rows of the vocabulary; both stay whole where `tp` does not divide it
    layers            see `models.division`
    experts           each rank has some, and computes them for the tokens of all; the ranks of `tp`, which have the same tokens, take a
                      part of them each, so that no token is computed twice
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from drumroll.backends.sharded import is_sharded, local
from drumroll.backends.train.grid import Axis, Grid
from drumroll.backends.train.head import VocabularyPart
from drumroll.backends.train.lora import ADAPTER
from drumroll.backends.train.shards import Box
from drumroll.models.division import DIVIDED_COLUMNS, DIVIDED_ROWS, OF_EACH_HEAD, WITH_EP

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Cut(NamedTuple):
    """A tensor of which each rank of an axis has an equal part."""

    axis: Axis
    dim: int


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one tensor, before and after FSDP2 has sharded it."""

    grid: Grid
    shape: tuple[int, ...]
    """Of the whole tensor."""
    cut: Cut | None = None
    of_expert: bool = False
    is_partial: bool = False
    """The ranks of `tp`, which hold the same, have gradients of their own, to be added up."""

    def box(self, tensor: Tensor) -> Box:
        """Where in the whole tensor this rank's part of it lies."""
        box = [(0, size) for size in self.shape]
        if self.cut is not None:
            size = self.shape[self.cut.dim] // self.cut.axis.size
            box[self.cut.dim] = (self.cut.axis.index * size, (self.cut.axis.index + 1) * size)
        if is_sharded(tensor):
            axis, dim, size = self._sharding(tensor)
            first, end = box[dim]
            chunk = -(-size // axis.size)
            box[dim] = (min(first + axis.index * chunk, end), min(first + (axis.index + 1) * chunk, end))
            held = tuple(end - start for start, end in box)
            assert held == tuple(tensor.to_local().shape), f"this rank holds {tuple(tensor.to_local().shape)}, not {held}"
        return tuple(box)

    def whole(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All of it, floats in that dtype. Every rank must ask."""
        held = local(tensor).detach()
        if dtype is not None and held.is_floating_point():
            held = held.to(dtype)
        if is_sharded(tensor):
            axis, dim, size = self._sharding(tensor)
            missing = -(-size // axis.size) - held.shape[dim]  # the last ranks hold less, or nothing
            if missing:
                held = torch.cat([held, held.new_empty(*held.shape[:dim], missing, *held.shape[dim + 1 :])], dim)
            held = axis.whole(held, dim).narrow(dim, 0, size)
        return held if self.cut is None else self.cut.axis.whole(held, self.cut.dim)

    def _sharding(self, tensor: DTensor) -> tuple[Axis, int, int]:
        """Over which ranks FSDP2 has sharded what was left to it, along which dim, and how long that was. Not asked of the tensor's own
        mesh: torch remembers meshes beyond the life of their groups."""
        dim: int = tensor.placements[-1].dim  # type: ignore[attr-defined]
        return self.grid.experts_sharded if self.of_expert else self.grid.sharded, dim, tensor.shape[dim]

    @property
    def num_copies(self) -> int:
        """Ranks that hold the very same part."""
        return self.grid.num_copies * (1 if self.of_expert or self.cut is not None else self.grid.tp.size)

    def is_first_copy(self, tensor: Tensor) -> bool:
        """Whether no rank before this one holds the same part."""
        if not is_sharded(tensor):
            return self.grid.rank == 0
        return self.grid.replicate.index == 0 and (self.of_expert or self.cut is not None or self.grid.tp.index == 0)


@dataclass(frozen=True)
class Division:
    """How a model was divided."""

    pieces: dict[str, Piece]
    """By the names of the model's parameters and buffers, all names of each."""
    vocabulary: VocabularyPart | None
    """This rank's part of the head, where that is divided."""
    experts: list[nn.Module]
    """What is sharded over the ranks that have the same experts."""


def divide(model: Any, grid: Grid) -> Division:
    """Divide a model on the CPU; each rank has loaded all of it."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    pieces = {name: Piece(grid, tuple(tensor.shape)) for name, tensor in tensors.items()}
    vocabulary, experts = None, []
    if grid.tp.size > 1:
        for name, change in _over_tp(model, grid.tp):
            pieces[name] = replace(pieces[name], **change)
        vocabulary = _divide_vocabulary(model, grid.tp)
        if vocabulary is not None:
            ends = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
            for name, tensor in tensors.items():
                if any(tensor is weight for weight in ends):
                    pieces[name] = replace(pieces[name], cut=Cut(grid.tp, 0))
    if (grid.tp.size > 1 or grid.ep.size > 1) and model.config.model_type in WITH_EP:
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                _divide_experts(module, grid.tp, grid.ep)
                experts.append(module)
                for own, _ in module.named_parameters():
                    cut = Cut(grid.ep, 0) if grid.ep.size > 1 else None
                    pieces[f"{name}.{own}"] = replace(pieces[f"{name}.{own}"], cut=cut, of_expert=True)
    for name, tensor in tensors.items():
        if (cut := pieces[name].cut) is not None and tuple(tensor.shape) == pieces[name].shape:
            tensor.data = cut.axis.part(tensor.data, cut.dim).clone()
    return Division(pieces, vocabulary, experts)


def _over_tp(model: Any, tp: Axis) -> Iterator[tuple[str, dict[str, Any]]]:
    """Prepare the layers to compute with their parts; what becomes of each parameter, by its name."""
    rows, columns, whole = {"cut": Cut(tp, 0)}, {"cut": Cut(tp, 1)}, {"is_partial": True}
    entered: set[nn.Module] = set()
    parents = {child: module for module in model.modules() for child in module.children()}
    for name, module in model.named_modules():
        kind = name.rpartition(".")[-1]
        if kind in OF_EACH_HEAD:
            yield f"{name}.weight", whole
        if kind not in DIVIDED_ROWS | DIVIDED_COLUMNS:
            continue
        adapted = hasattr(module, "base_layer")
        base, stem = (module.base_layer, f"{name}.base_layer") if adapted else (module, name)
        yield f"{stem}.weight", rows if kind in DIVIDED_ROWS else columns
        if kind in DIVIDED_ROWS:
            if base.bias is not None:
                yield f"{stem}.bias", rows
            if parents[module] not in entered:
                entered.add(parents[module])
                parents[module].register_forward_pre_hook(_entering(tp), with_kwargs=True)
        else:
            if base.bias is not None:
                yield f"{stem}.bias", whole
                _share_bias(base, tp)
            module.register_forward_hook(lambda _, __, output: tp.summed(output))
        if adapted:
            down, up = f"{name}.lora_A.{ADAPTER}.weight", f"{name}.lora_B.{ADAPTER}.weight"
            yield down, whole if kind in DIVIDED_ROWS else columns
            yield up, rows if kind in DIVIDED_ROWS else whole


def _entering(tp: Axis) -> Any:
    """A module's input, which is the same on all ranks, is used by each for its own heads or inner numbers."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (tp.entered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": tp.entered(kwargs["hidden_states"])}

    return enter


def _share_bias(layer: Any, tp: Axis) -> None:
    """Every rank adds its share of a bias, so that the sum over the ranks has it once."""
    layer.forward = lambda hidden: linear(hidden, layer.weight, layer.bias / tp.size)


def _divide_vocabulary(model: Any, tp: Axis) -> VocabularyPart | None:
    """Prepare embedding and head for a part of the vocabulary each; none where it cannot be divided."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    size = table.num_embeddings // tp.size
    if table.num_embeddings % tp.size or (head is not None and head.bias is not None):
        return None
    part = VocabularyPart(tp, tp.index * size, size)
    padding = table.padding_idx - part.start if table.padding_idx is not None else None
    padding = padding if padding is not None and 0 <= padding < size else None

    def look_up(token_ids: Tensor) -> Tensor:
        own = part.own(token_ids)
        found = embedding(own.clamp(min=0), table.weight, padding_idx=padding)
        return tp.summed(found.masked_fill((own < 0)[..., None], 0.0))

    table.forward = look_up
    if head is not None:
        head.forward = lambda hidden: tp.gathered(linear(tp.entered(hidden), head.weight), -1)
    return part


def _divide_experts(module: Any, tp: Axis, ep: Axis) -> None:
    """Make a layer's experts compute for the tokens of all ranks that share them. Legend: t tokens of this rank, K experts of a token."""
    compute = module.forward
    module.num_experts //= ep.size

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_tokens, k = top_k_index.shape
        padding = -num_tokens % tp.size
        hidden, weights = (tp.taken(pad(values, (0, 0, 0, padding)), 0) for values in (hidden_states, top_k_weights))
        chosen = tp.part(pad(top_k_index, (0, 0, 0, padding)), 0).flatten()
        order = chosen.argsort(stable=True)  # so that a rank's experts, and each expert's tokens, stand in a row
        counts = chosen.bincount(minlength=ep.size * module.num_experts).view(ep.size, -1)
        arriving = ep.exchange(counts) if ep.size > 1 else counts
        leave, arrive = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = ep.sent(hidden[order // k], leave, arrive)
        expert = torch.arange(module.num_experts, device=rows.device).repeat(ep.size).repeat_interleave(arriving.flatten())
        if not len(expert):  # every rank must take part in the backward pass, also one whose experts nobody wants
            rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
        answers = compute(rows, expert[:, None], rows.new_ones(len(rows), 1))[: sum(arrive)]
        answers = ep.sent(answers, arrive, leave)
        answers = torch.zeros_like(answers).index_copy(0, order, answers).view(len(hidden), k, -1)
        return tp.gathered((answers * weights[..., None]).sum(1), 0)[:num_tokens]

    module.forward = forward
