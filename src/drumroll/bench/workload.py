"""What the scheduler is measured with: samples of heavy-tailed lengths, groups of which resemble each other, some of which hang.

A group's samples are a function of (cell, seed, number of the group), so that every policy gets the same ones. Nobody but the
simulated engines knows how long they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, isnan, log
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from drumroll.rollout.lease import Lease
from drumroll.rollout.simulation import Script
from drumroll.rollout.source import Fate, GroupRequest
from drumroll.types import SampleInfo, Task

TOKEN_S = 0.02
MEDIAN_TOKENS = 1000
SIGMA = log(10.0) / NormalDist().inv_cdf(0.99)
"""Of the logarithm of a length whose 99th percentile is ten times its median."""
PARETO_ALPHA = 1.5
PARETO_CAP = 20.0
"""Times the median."""
LATENCY_MEDIAN_S = 0.25 * MEDIAN_TOKENS * TOKEN_S
HANG_SHARE = 0.01
"""Of first attempts."""
STALL_S = 10.0
"""A reply that has not grown for half the median generation time is given up."""
SLOTS_PER_ENGINE = 16

Lengths = Literal["lognormal", "pareto"]

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the factors. The default is the one that the headline figures are of."""

    lengths: Lengths = "lognormal"
    slots: int = 128
    has_latency: bool = False
    """Whether the environment thinks for a while, after the reply."""
    rho: float = 0.0
    """Correlation of the normal scores of two lengths of one group."""

    def describe(self) -> str:
        return f"{self.lengths}, {self.slots} slots, {'environment latency, ' if self.has_latency else ''}rho {self.rho:g}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    num_groups: int = 64
    """Prompts of a step."""
    group_size: int = 8
    num_steps: int = 60
    num_warmup: int = 10
    """Steps before asynchronous policies are measured."""

    @property
    def samples_per_step(self) -> int:
        return self.num_groups * self.group_size


@dataclass(frozen=True, slots=True)
class Sizes:
    """Samples as the simulated world knows them; every array is [groups, group size]."""

    tokens: NDArray[np.int64]
    latency_s: NDArray[np.float64]
    hangs_at: NDArray[np.float64]
    """Share of the reply after which the first attempt hangs; nan where it does not."""

    @property
    def alone_s(self) -> NDArray[np.float64]:
        """How long each takes by itself when nothing hangs."""
        return self.tokens * TOKEN_S + self.latency_s

    @property
    def lost_tokens(self) -> NDArray[np.int64]:
        """What the attempts that hang have sampled."""
        return np.nan_to_num(self.tokens * self.hangs_at).astype(np.int64)

    @property
    def lost_s(self) -> NDArray[np.float64]:
        """What hangs add to each."""
        return np.where(np.isnan(self.hangs_at), 0.0, self.lost_tokens * TOKEN_S + STALL_S)


def length_factor(cell: Cell, score: NDArray[np.float64]) -> NDArray[np.float64]:
    """Length over median, from a normal score."""
    if cell.lengths == "lognormal":
        return np.exp(SIGMA * score)
    longer = _normal_cdf(-score)  # share of the population that is longer
    return np.minimum(PARETO_CAP, (2.0 * longer) ** (-1.0 / PARETO_ALPHA))


def mean_tokens(cell: Cell) -> float:
    """Of the distribution."""
    if cell.lengths == "lognormal":
        return MEDIAN_TOKENS * exp(SIGMA**2 / 2)
    least = 2.0 ** (-1.0 / PARETO_ALPHA)
    mean = least + (least - least**PARETO_ALPHA * PARETO_CAP ** (1.0 - PARETO_ALPHA)) / (PARETO_ALPHA - 1.0)
    return float(MEDIAN_TOKENS * mean)


def training_s(cell: Cell, scale: Scale) -> float:
    """An update takes as long as a step's replies would in slots that are never empty."""
    return mean_tokens(cell) * scale.samples_per_step * TOKEN_S / cell.slots


class Population:
    """The groups of a cell and a seed, by number."""

    def __init__(self, cell: Cell, scale: Scale, seed: int) -> None:
        self._cell = cell
        self._group_size = scale.group_size
        self._seed = seed
        self._blocks: list[Sizes] = []
        self._scripts: list[tuple[Script, Script]] = []
        """Of each sample: the first attempt, and all others."""

    def sizes(self, first: int, num_groups: int) -> Sizes:
        self._grow(first + num_groups)
        blocks = self._blocks[first // _BLOCK : (first + num_groups - 1) // _BLOCK + 1]
        rows = slice(first % _BLOCK, first % _BLOCK + num_groups)
        return Sizes(*(np.concatenate([getattr(block, f.name) for block in blocks])[rows] for f in fields(Sizes)))

    def script(self, lease: Lease) -> Script:
        """How an attempt goes: the same whenever it is asked for, but for the hang of a first one."""
        group, member = _place(lease.task.id, lease.sample_id)
        self._grow(group + 1)
        return self._scripts[group * self._group_size + member][lease.attempt > 0]

    def alone_s(self, samples: Iterable[SampleInfo]) -> list[float]:
        """How long each of these would take by itself."""
        scripts = [
            self._scripts[group * self._group_size + member][1] for group, member in (_place(s.task_id, s.sample_id) for s in samples)
        ]
        return [tokens * TOKEN_S + latency_s for script in scripts for tokens, latency_s in script.turns]

    def _grow(self, num_groups: int) -> None:
        while len(self._blocks) * _BLOCK < num_groups:
            sizes = self._make_block(len(self._blocks))
            self._blocks.append(sizes)
            for tokens, latency_s, hangs_at in zip(*(getattr(sizes, f.name).ravel().tolist() for f in fields(Sizes)), strict=True):
                good = Script(((tokens, latency_s),))
                self._scripts.append((good if isnan(hangs_at) else replace(good, hangs_at=hangs_at), good))

    def _make_block(self, number: int) -> Sizes:
        rng = np.random.default_rng([self._seed, number])
        shape = (_BLOCK, self._group_size)
        common, own, latency = rng.standard_normal((_BLOCK, 1)), rng.standard_normal(shape), rng.standard_normal(shape)
        hangs, hangs_at = rng.random(shape) < HANG_SHARE, rng.random(shape)
        score = self._cell.rho**0.5 * common + (1.0 - self._cell.rho) ** 0.5 * own
        return Sizes(
            tokens=np.maximum(1, MEDIAN_TOKENS * length_factor(self._cell, score)).astype(np.int64),
            latency_s=LATENCY_MEDIAN_S * np.exp(SIGMA * latency) if self._cell.has_latency else np.zeros(shape),
            hangs_at=np.where(hangs, hangs_at, np.nan),
        )


class Groups:
    """A source of all groups of a population, in order."""

    def __init__(self, group_size: int) -> None:
        self.num_drawn = 0
        self._group_size = group_size

    def draw(self) -> GroupRequest:
        number = self.num_drawn
        self.num_drawn += 1
        return GroupRequest(str(number), Task(str(number)), self._group_size, (number,))

    def settle(self, group_id: str, fate: Fate, samples: Sequence[SampleInfo]) -> None:
        pass


def _normal_cdf(score: NDArray[np.float64]) -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.cdf(each) for each in score.ravel()]).reshape(score.shape)


def _place(task_id: str, sample_id: str) -> tuple[int, int]:
    """Number of the group, and place in it."""
    return int(task_id), int(sample_id[-3:])
