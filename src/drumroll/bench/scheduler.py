"""`drumroll bench scheduler`: how near each way of scheduling samples comes to what is possible, side by side.

The protocol. A step trains on 64 prompts × 8 samples. Lengths are lognormal with P99 = 10 × median, or Pareto with alpha = 1.5
capped at 20 × median; the median is 1,000 tokens at 20 ms each. Lengths of a group correlate by rho: the normal score of a length is
sqrt(rho) × the group's + sqrt(1 - rho) × its own, so that every marginal stays what it is. Engines have 16 slots each. Environment
latency, where there is any, is a lognormal of the same shape with a quarter of the median generation time as its median, once after
the reply. 1 % of first attempts hang at a random point of their reply, which a stall deadline of 10 s notices. An update takes as
long as the mean work of a step ÷ slots. No policy knows a length before the sample ends.

The policies:
    barrier             batches of as many samples as slots, the next when all have ended
    static partition    samples dealt to engines in advance; each engine goes through its own with continuous batching, and an
                        episode keeps its slot until it has ended
    sample queue        the scheduler of this library, as are all below; max_staleness 0
    queue + redundancy  16 groups more than needed, the first to be complete are taken
    tail batching       the same, and who comes too late gets a round of his own
    async k             max_staleness k, groups of at least 4; "continued": unfinished replies go on with new weights

What is measured. The bound of a step is the larger of its longest sample and its work ÷ slots, plus the update; for asynchronous
policies the larger of the mean work ÷ slots and the update. They are measured from the eleventh step, the others from the first.
Utilisation is the share of all slots' time in which tokens are sampled. Waste is the share of sampled tokens that were aborted,
dropped or masked for their age; those that hangs cost are apart. Staleness is that of the oldest token trained on. The kept length
is the mean length of the samples trained on, over that of all that were ever admitted, including those that a run's end cut off.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from drumroll.bench.controller import Cost, controller_cost
from drumroll.bench.ledger import LedgerFigures
from drumroll.bench.ledger import measure as measure_ledger
from drumroll.bench.workload import SLOTS_PER_ENGINE, STALL_S, TOKEN_S, Cell, Groups, Lengths, Population, Scale, Sizes, training_s
from drumroll.rollout.garbage import seldom_collected
from drumroll.rollout.lease import Lease
from drumroll.rollout.scheduler import Limits, RolloutScheduler
from drumroll.rollout.simulation import Script, SimulatedCluster, simulate
from drumroll.rollout.stream import Policy
from drumroll.types import SampleInfo

NUM_WORKERS = 4
"""Environment workers."""
FEW_ENGINES, MANY_ENGINES = 100, 10_000
FULL, QUICK = Scale(), Scale(num_steps=20)
FULL_SEEDS, QUICK_SEEDS = 20, 1
WIDTH = 120
"""Of the table, in characters."""
BASE = Cell()
"""What the headline figures are of."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A policy of the scheduler, on simulated engines."""

    max_staleness: int = 0
    extra_groups: int = 0
    tail_batching: bool = False
    continues: bool = True

    def policy(self) -> Policy:
        return Policy(
            max_staleness=self.max_staleness,
            min_group_size=4 if self.max_staleness else None,
            keeps_stragglers=self.continues,
            extra_groups=self.extra_groups,
            tail_batching=self.tail_batching,
            max_rejected=10**6,
            max_failed=10**6,
        )


BASELINES = ("barrier", "static partition")
SIMULATED = {
    "sample queue": Simulated(),
    "queue + redundancy": Simulated(extra_groups=16),
    "tail batching": Simulated(extra_groups=16, tail_batching=True),
    **{
        f"async k={staleness}{', continued' if continues else ''}": Simulated(max_staleness=staleness, continues=continues)
        for staleness, continues in product((1, 2, 4), (False, True))
    },
}
POLICIES = (*BASELINES, *SIMULATED)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of a policy in a cell comes to."""

    step_s: float
    over_bound: float
    utilisation: float
    waste: float
    lost_to_hangs: float
    """Share of sampled tokens."""
    staleness: float
    kept_length_ratio: float


@dataclass(frozen=True, slots=True)
class Job:
    """One run. It can be sent to another process."""

    cell: Cell
    policy: str
    seed: int
    scale: Scale

    def run(self) -> Figures:
        population = Population(self.cell, self.scale, self.seed)
        if self.policy in BASELINES:
            return run_baseline(self.policy, self.cell, self.scale, population)
        with seldom_collected():
            return simulate(run_simulated(SIMULATED[self.policy], self.cell, self.scale, population, self.seed))


# The baselines, and the bounds.


def bound_s(alone_s: Sequence[float], num_tokens: int, slots: int) -> float:
    """No schedule generates samples in less time: neither the longest one nor the work of all."""
    return max(max(alone_s), num_tokens * TOKEN_S / slots)


def barrier_s(sizes: Sizes, slots: int) -> float:
    """Batches of as many samples as slots; the next begins when all of one have ended."""
    taken_s = (sizes.alone_s + sizes.lost_s).ravel()
    return float(sum(taken_s[start : start + slots].max() for start in range(0, len(taken_s), slots)))


def static_partition_s(sizes: Sizes, slots: int) -> float:
    """Samples dealt to engines one by one; in each engine a slot that frees takes the next of its own."""
    taken_s = (sizes.alone_s + sizes.lost_s).ravel()
    num_engines = slots // SLOTS_PER_ENGINE
    return max(_queue_s(taken_s[engine::num_engines].tolist(), SLOTS_PER_ENGINE) for engine in range(num_engines))


def _queue_s(taken_s: Sequence[float], slots: int) -> float:
    """How long it takes until the last of these has ended, each begun in their order as soon as a slot is free."""
    free_at = [0.0] * slots
    for each_s in taken_s:
        heapq.heapreplace(free_at, free_at[0] + each_s)
    return max(free_at)


def run_baseline(name: str, cell: Cell, scale: Scale, population: Population) -> Figures:
    generate = barrier_s if name == "barrier" else static_partition_s
    wall_s = bounds_s = num_tokens = num_lost = 0.0
    for step in range(scale.num_steps):
        sizes = population.sizes(step * scale.num_groups, scale.num_groups)
        wall_s += generate(sizes, cell.slots) + training_s(cell, scale)
        bounds_s += bound_s(sizes.alone_s.ravel().tolist(), int(sizes.tokens.sum()), cell.slots) + training_s(cell, scale)
        num_tokens += int(sizes.tokens.sum())
        num_lost += int(sizes.lost_tokens.sum())
    return Figures(
        step_s=wall_s / scale.num_steps,
        over_bound=wall_s / bounds_s,
        utilisation=(num_tokens + num_lost) * TOKEN_S / (cell.slots * wall_s),
        waste=0.0,
        lost_to_hangs=num_lost / (num_tokens + num_lost),
        staleness=0.0,
        kept_length_ratio=1.0,
    )


# The scheduler, in virtual time.


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a simulated run comes to."""

    wall_s: float
    bound_s: float
    """Of a synchronous step, without the update."""
    num_samples: int
    """That are trained on."""
    num_trained: int
    """Their tokens, masked ones included."""
    num_masked: float
    num_wasted: float
    num_lost: int
    """To hangs."""
    sampling_s: float
    """Of all slots together."""
    staleness: int


async def run_simulated(contender: Simulated, cell: Cell, scale: Scale, population: Population, seed: int) -> Figures:
    """All steps of one policy: take, train for as long as an update takes, hand the weights over."""
    hung: list[int] = []
    """Tokens of each reply that hangs."""

    def workload(lease: Lease) -> Script:
        script = population.script(lease)
        if script.hangs_at is not None:
            hung.append(int(script.num_tokens * script.hangs_at))
        return script

    num_engines = cell.slots // SLOTS_PER_ENGINE
    cluster = SimulatedCluster(
        workload, num_engines=num_engines, slots=SLOTS_PER_ENGINE, num_workers=NUM_WORKERS, token_s=TOKEN_S, continues=contender.continues
    )
    scheduler = RolloutScheduler(cluster, seed=seed, limits=Limits(deadline_s=1e6, stall_s=STALL_S), clock=cluster.clock)
    source = Groups(scale.group_size)
    stream = scheduler.open(source, contender.policy())
    steps: list[Step] = []
    for version in range(scale.num_steps):
        began, occupied_s = cluster.loop.now, cluster.slot_seconds()
        rollout = await scheduler.take(stream, scale.num_groups, version)
        await asyncio.sleep(training_s(cell, scale))
        cluster.push(version + 1)
        samples, oldest = rollout.samples, version - contender.max_staleness
        num_trained = sum(sample.num_new_tokens for sample in samples)
        steps.append(
            Step(
                wall_s=cluster.loop.now - began,
                bound_s=bound_s(population.alone_s(samples), num_trained, cell.slots),
                num_samples=len(samples),
                num_trained=num_trained,
                num_masked=sum(cluster.tokens_older_than(oldest, sample) for sample in samples),
                num_wasted=rollout.report["rollout/wasted_tokens"] + rollout.report.get("rollout/stale_tokens", 0.0),
                num_lost=sum(hung),
                sampling_s=cluster.slot_seconds() - occupied_s - STALL_S * len(hung),
                staleness=max(_staleness(sample, version, contender.max_staleness) for sample in samples),
            )
        )
        hung.clear()
    await scheduler.stop()
    return _figures(contender, cell, scale, steps, population.sizes(0, source.num_drawn))


def _staleness(sample: SampleInfo, version: int, max_staleness: int) -> int:
    """Of the sample's oldest token that is trained on at `version`: older ones than allowed are masked, if there are others."""
    return max(min(version - sample.oldest_version, max_staleness), version - sample.newest_version)


def _figures(contender: Simulated, cell: Cell, scale: Scale, steps: Sequence[Step], admitted: Sizes) -> Figures:
    measured = steps[scale.num_warmup if contender.max_staleness else 0 :]
    update_s = training_s(cell, scale)
    wall_s = sum(step.wall_s for step in measured)
    num_trained, num_masked, num_wasted, num_lost = (
        sum(getattr(step, name) for step in measured) for name in ("num_trained", "num_masked", "num_wasted", "num_lost")
    )
    if contender.max_staleness:
        ideal_s = max(num_trained * TOKEN_S / cell.slots, len(measured) * update_s)
    else:
        ideal_s = sum(step.bound_s + update_s for step in measured)
    num_sampled = num_trained + num_wasted + num_lost
    kept_length = sum(step.num_trained for step in steps) / sum(step.num_samples for step in steps)
    return Figures(
        step_s=wall_s / len(measured),
        over_bound=wall_s / ideal_s,
        utilisation=sum(step.sampling_s for step in measured) / (cell.slots * wall_s),
        waste=(num_wasted + num_masked) / num_sampled,
        lost_to_hangs=num_lost / num_sampled,
        staleness=max(step.staleness for step in steps),
        kept_length_ratio=kept_length / float(admitted.tokens.mean()),
    )


# All of it.


@dataclass(frozen=True, slots=True)
class Probe:
    """A measurement of the controller: its costs with some number of engines, or a number of samples through the ledger."""

    num_samples: int
    num_engines: int = 0

    def run(self) -> Cost | LedgerFigures:
        return controller_cost(self.num_engines, self.num_samples) if self.num_engines else measure_ledger(self.num_samples)


QUICK_COSTS = [Probe(80_000, MANY_ENGINES), Probe(20_000, FEW_ENGINES)]
FULL_COSTS = [Probe(480_000, number) for number in (FEW_ENGINES, MANY_ENGINES) for _ in range(3)]
QUICK_LEDGER, FULL_LEDGER = Probe(200_000), Probe(1_000_000)


def all_cells() -> list[Cell]:
    lengths: tuple[Lengths, ...] = ("lognormal", "pareto")
    return [Cell(*factors) for factors in product(lengths, (128, 512), (False, True), (0.0, 0.3, 0.7))]


def quick_cells() -> list[Cell]:
    """The base cell, and every other level of one factor at a time."""
    return [BASE, Cell(rho=0.3), Cell(rho=0.7), Cell(has_latency=True), Cell(slots=512), Cell(lengths="pareto")]


def run_all(tasks: Sequence[Job | Probe], num_processes: int) -> list[Any]:
    """In the order of the tasks."""
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(_run, tasks)
        return list(track(results, "measuring", total=len(tasks), console=Console(stderr=True), transient=True))


def _run(task: Job | Probe) -> Any:
    return task.run()


def means(jobs: Sequence[Job], results: Sequence[Figures]) -> dict[tuple[Cell, str], Figures]:
    """Over the seeds; of staleness the worst."""
    rows: dict[tuple[Cell, str], list[Figures]] = {}
    for job, figures in zip(jobs, results, strict=True):
        rows.setdefault((job.cell, job.policy), []).append(figures)
    return {key: _mean(each) for key, each in rows.items()}


def _mean(figures: Sequence[Figures]) -> Figures:
    values = {f.name: statistics.fmean(getattr(each, f.name) for each in figures) for f in fields(Figures)}
    return Figures(**values | {"staleness": max(each.staleness for each in figures)})


def headline(rows: Mapping[tuple[Cell, str], Figures]) -> dict[str, float]:
    """The figures that the scheduler is judged by, of the base cell."""
    barrier, queue, tail, plain, continued = (
        rows[BASE, policy] for policy in ("barrier", "sample queue", "tail batching", "async k=4", "async k=4, continued")
    )
    return {
        "queue_over_bound": queue.over_bound,
        "queue_speedup_over_barrier": barrier.step_s / queue.step_s,
        "async4_over_ideal": plain.over_bound,
        "async4_worst_staleness": plain.staleness,
        "async4_waste": plain.waste,
        "async4_kept_length_ratio": plain.kept_length_ratio,
        "async4_continued_over_ideal": continued.over_bound,
        "async4_continued_worst_staleness": continued.staleness,
        "async4_continued_waste": continued.waste,
        "async4_continued_kept_length_ratio": continued.kept_length_ratio,
        "tail_kept_length_ratio": tail.kept_length_ratio,
    }


def table(rows: Mapping[tuple[Cell, str], Figures]) -> Table:
    names = ("policy", "step, s", "÷ bound", "slots busy", "wasted", "hangs", "staleness", "kept length")
    made = Table(*names, box=None)
    made.columns[0].no_wrap = True
    for column in made.columns[1:]:
        column.justify = "right"
    cell = None
    for (row_cell, policy), figures in rows.items():
        if row_cell != cell:
            cell = row_cell
            made.add_row(f"[bold]{cell.describe()}[/]")
        made.add_row(
            policy,
            f"{figures.step_s:.1f}",
            f"{figures.over_bound:.3f}",
            f"{figures.utilisation:.1%}",
            f"{figures.waste:.2%}",
            f"{figures.lost_to_hangs:.2%}",
            f"{figures.staleness:.0f}",
            f"{figures.kept_length_ratio:.3f}",
        )
    return made


def controller_figures(probes: Sequence[Probe], results: Sequence[Any]) -> dict[str, float]:
    """Medians of the repeats."""
    few, many = (
        [result for probe, result in zip(probes, results, strict=True) if probe.num_engines == number]
        for number in (FEW_ENGINES, MANY_ENGINES)
    )
    few_us, many_us = (statistics.median(cost.controller_us for cost in costs) for costs in (few, many))
    ledger = next(result for result in results if isinstance(result, LedgerFigures))
    return {
        "controller_us_100": few_us,
        "controller_us_10k": many_us,
        "controller_ratio_10k_100": many_us / few_us,
        "controller_stage_us_10k": statistics.median(cost.stage_us for cost in many),
        "ledger_num_samples": ledger.num_samples,
        "ledger_million_rss_mib": ledger.rss_mib,
        "ledger_us_per_sample": ledger.us_per_sample,
        "store_bytes_per_sample": ledger.bytes_per_sample,
        "store_rows_per_s": ledger.rows_per_s,
    }


def bench(
    *, quick: bool = False, base: bool = False, num_seeds: int | None = None, num_processes: int | None = None, out: Path | None = None
) -> None:
    """Run it, print the table and, last, one line of JSON; `out` gets every row as well. `base`: the base cell alone."""
    began = time.perf_counter()
    num_processes = num_processes or os.cpu_count() or 1
    scale, cells, costs, ledger = (
        (QUICK, quick_cells(), QUICK_COSTS, QUICK_LEDGER) if quick else (FULL, all_cells(), FULL_COSTS, FULL_LEDGER)
    )
    cells = [BASE] if base else cells
    seeds = range(1, 1 + (num_seeds or (QUICK_SEEDS if quick else FULL_SEEDS)))
    jobs = [Job(cell, policy, seed, scale) for cell, policy, seed in product(cells, POLICIES, seeds)]
    probes = [*costs, ledger]
    # Costs are best measured on a machine that does nothing else; a quick look takes them beside the simulations.
    results = run_all([*probes, *jobs], num_processes) if quick else run_all(probes, 1) + run_all(jobs, num_processes)
    rows = means(jobs, results[len(probes) :])
    Console(width=WIDTH).print(table(rows))
    summary = {
        "quick": quick,
        "num_seeds": len(seeds),
        "num_steps": scale.num_steps,
        **headline(rows),
        **controller_figures(probes, results[: len(probes)]),
        "wall_s": time.perf_counter() - began,
    }
    if out is not None:
        records = [{**asdict(cell), "policy": policy, **asdict(figures)} for (cell, policy), figures in rows.items()]
        out.write_text(json.dumps({**summary, "rows": records}, indent=1))
    print(json.dumps(summary))
