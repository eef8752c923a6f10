"""How the ranks of a trainer share the work on one model: a grid of ranks with named axes, and what travels along them.

    rank = ((replicate · S + shard) · C + cp) · T + tp           neighbours along `tp` are neighbours on a node

    replicate  ranks with copies of the same weights (hybrid sharding)
    shard      ranks with different trajectories; FSDP2 shards weights over shard × cp, and sums their gradients over replicate as well
    cp         ranks with different tokens of the same trajectories
    tp         ranks with different parts of every matrix, for the same tokens
    ep         ranks with different experts: replicate × (shard × cp × tp) divided once more, for the layers that have some

Every function here that moves tensors knows its own backward pass, by one rule: the loss is computed alike on all ranks of a shard, and
counts once. A tensor that is the same on all ranks of an axis so has the same gradient on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from drumroll.backends.train.group import RankGroup
from drumroll.config.models import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """This rank's place in a line of ranks. Along a line of one nothing travels."""

    size: int = 1
    index: int = 0
    group: ProcessGroup | None = None

    def entered(self, tensor: Tensor) -> Tensor:
        """What is the same on all ranks, for each to use in a part of its own: the gradients of the parts add up."""
        return tensor if self.size == 1 else _Entered.apply(tensor, self)  # type: ignore[no-untyped-call]

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on each of them."""
        return tensor if self.size == 1 else _Summed.apply(tensor, self)  # type: ignore[no-untyped-call]

    def gathered(self, tensor: Tensor, dim: int) -> Tensor:
        """All ranks' parts in a row, on each of them."""
        return tensor if self.size == 1 else _Gathered.apply(tensor, self, dim)  # type: ignore[no-untyped-call]

    def taken(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of what is the same on all of them."""
        return tensor if self.size == 1 else _Taken.apply(tensor, self, dim)  # type: ignore[no-untyped-call]

    def swapped(self, tensor: Tensor) -> Tensor:
        """[size, ...] → [size, ...]: part i goes to rank i, and what rank i sent is part i."""
        return tensor if self.size == 1 else _Swapped.apply(tensor, self)  # type: ignore[no-untyped-call]

    def sent(self, rows: Tensor, counts: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """The first `counts[0]` rows go to rank 0, the next to rank 1, and so on; `arriving[i]` rows come from rank i, in that order."""
        if self.size == 1:
            return rows
        moved: Tensor = _Sent.apply(rows, self, list(counts), list(arriving))  # type: ignore[no-untyped-call]
        return moved

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's equal part of a whole tensor, without a gradient."""
        assert tensor.shape[dim] % self.size == 0, f"{tuple(tensor.shape)} cannot be divided by {self.size} along dim {dim}"
        return tensor.chunk(self.size, dim)[self.index] if self.size > 1 else tensor

    def whole(self, tensor: Tensor, dim: int) -> Tensor:
        """All ranks' equal parts in a row, without a gradient."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, without a gradient."""
        if self.size == 1:
            return tensor
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def exchange(self, tensor: Tensor, counts: Sequence[int] | None = None, arriving: Sequence[int] | None = None) -> Tensor:
        """`swapped`, or with numbers of rows `sent`, without a gradient."""
        rows = len(tensor) if arriving is None else sum(arriving)
        result = tensor.new_empty(rows, *tensor.shape[1:])
        given = None if arriving is None else list(arriving)
        dist.all_to_all_single(result, tensor.contiguous(), given, None if counts is None else list(counts), group=self.group)
        return result


ALONE = Axis()


class Grid:
    """This rank's place in the grid of its role's ranks."""

    def __init__(self, group: RankGroup, parallel: ParallelConfig) -> None:
        problem = parallel.problem_with(group.world)
        assert problem is None, f"{group.world} ranks: {problem}"
        self._group = group
        self.rank = group.rank
        self.parallel = parallel
        num_shards = group.world // parallel.devices_per_shard
        sharded_over = parallel.shard or num_shards
        self.num_copies = num_shards // sharded_over
        ranks = torch.arange(group.world).view(self.num_copies, -1, parallel.cp, parallel.tp)
        self.replicate = self._axis(ranks, 0)
        self.cp = self._axis(ranks, 2)
        self.tp = self._axis(ranks, 3)
        self._dense = ranks.flatten(1, 2).movedim(-1, 0)
        """[tp, replicate, shard × cp]"""
        self._of_experts = ranks.reshape(self.num_copies, -1, parallel.ep).movedim(-1, 0)
        """[ep, replicate, shard × cp × tp / ep]"""
        self.ep = self._axis(self._of_experts, 0)
        self.sharded, self.experts_sharded = (self._axis(planes, 2) for planes in (self._dense, self._of_experts))
        """The ranks over which FSDP2 shards what layers have in common, and this rank's experts."""

    def gather(self, value: T) -> list[T]:
        """Collective: a small value of every shard, whose ranks all have the same one."""
        return self._group.gather(value)[:: self.parallel.devices_per_shard]

    def mesh(self, *, of_experts: bool = False) -> DeviceMesh:
        """The ranks that hold the same weights, or the same experts, as FSDP2 takes them: [shard × cp], or with copies [replicate, …]."""
        planes = self._of_experts if of_experts else self._dense
        plane = next(plane for plane in planes if (plane == self.rank).any())
        lines = [line for line in plane.tolist() if self.rank in line]
        if self.num_copies > 1:
            lines = [line for line in plane.T.tolist() if self.rank in line] + lines
        return self._group.mesh([self._group.of(line) for line in lines], plane)

    def tokens(self, num_tokens: int) -> TokenSlice:
        """Which tokens of a pass this rank computes on."""
        size = -(-num_tokens // self.cp.size)
        return TokenSlice(self.cp.index * size, size, size * self.cp.size - num_tokens)

    def _axis(self, ranks: Tensor, dim: int) -> Axis:
        """Collective: the line of ranks along a dim in which this rank is."""
        line = next(line for line in ranks.movedim(dim, -1).flatten(0, -2).tolist() if self.rank in line)
        return Axis(len(line), line.index(self.rank), self._group.of(line)) if len(line) > 1 else ALONE


@dataclass(frozen=True)
class TokenSlice:
    """Contiguous tokens of a pass, whose end is padded so that all ranks have equally many.

    Example: 10 tokens on the second of four ranks: `TokenSlice(start=3, size=3, padding=2)`."""

    start: int
    size: int
    padding: int
    """Of the whole pass, at its end."""

    def holds(self, places: Tensor) -> Tensor:
        """Which of these places in the pass are this rank's."""
        return (places >= self.start) & (places < self.start + self.size)

    def of(self, values: Tensor) -> Tensor:
        """This rank's part of a value for each token; 0 in the padding."""
        if self.padding:
            values = torch.nn.functional.pad(values, (0, self.padding))
        return values[self.start : self.start + self.size]


class HeadExchange:
    """Attention over tokens that lie on several ranks (DeepSpeed-Ulysses, arXiv 2309.14509): every rank gets all tokens of some heads,
    and gives back some tokens of all heads. Legend: t tokens of this rank, T of all, H heads, D numbers of a head."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, H, D] each → [T, H / ranks, D] each. Where there are too few key heads, several ranks get the same one."""
        ranks = self._axis.size
        times = ranks // math.gcd(key.shape[1], ranks)
        if times > 1:
            key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
        # Queries, keys and values of the same rank side by side, so that they travel together.
        parts = [states.reshape(len(states), ranks, -1, states.shape[2]) for states in (query, key, value)]
        moved = self._axis.swapped(torch.cat(parts, dim=2).transpose(0, 1)).flatten(0, 1)
        query, key, value = torch.split(moved, [part.shape[2] for part in parts], dim=1)
        return query, key, value

    def to_tokens(self, states: Tensor) -> Tensor:
        """[T, H / ranks, D] → [t, H, D]."""
        return self._axis.swapped(states.reshape(self._axis.size, -1, *states.shape[1:])).transpose(0, 1).flatten(1, 2)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.total(gradient), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return axis.total(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.whole(tensor, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.part(gradient, ctx.dim).contiguous(), None, None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.part(tensor, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.whole(gradient, ctx.dim), None, None


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.exchange(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.exchange(gradient), None


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, counts: list[int], arriving: list[int]) -> Tensor:
        ctx.axis, ctx.counts, ctx.arriving = axis, counts, arriving
        return axis.exchange(rows, counts, arriving)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.exchange(gradient, ctx.arriving, ctx.counts), None, None, None
