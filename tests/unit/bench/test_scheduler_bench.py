"""The scheduler's benchmark: its workload, the arithmetic of baselines and bounds, and the whole of it at a tiny scale."""

import json
from math import nan
from pathlib import Path

import numpy as np
import pytest

from drumroll.bench import scheduler as bench_scheduler
from drumroll.bench.controller import controller_cost
from drumroll.bench.ledger import pass_through
from drumroll.bench.scheduler import (
    BASE,
    POLICIES,
    Job,
    Probe,
    all_cells,
    barrier_s,
    bound_s,
    quick_cells,
    static_partition_s,
)
from drumroll.bench.workload import MEDIAN_TOKENS, STALL_S, TOKEN_S, Cell, Population, Scale, Sizes, mean_tokens, training_s
from drumroll.rollout.lease import Lease
from drumroll.rollout.simulation import Script
from drumroll.types import Sampling, Task

TINY = Scale(num_groups=8, group_size=4, num_steps=4, num_warmup=1)


def sizes_of(seconds: list[float], latency_s: float = 0.0, hangs_at: dict[int, float] | None = None) -> Sizes:
    """Samples that take that long to generate, in one group."""
    hangs = np.full((1, len(seconds)), nan)
    for place, share in (hangs_at or {}).items():
        hangs[0, place] = share
    return Sizes(np.array([[round(each / TOKEN_S) for each in seconds]]), np.full((1, len(seconds)), latency_s), hangs)


def lease_of(group: int, member: int, attempt: int = 0) -> Lease:
    return Lease(f"{group}/{member:03d}", str(group), Task(str(group)), 1, Sampling(), 0, attempt)


def test_the_bound_is_the_longest_sample_or_the_work_of_all() -> None:
    assert bound_s([10.0, 2.0], 600, 4) == 10.0
    assert bound_s([10.0, 2.0], 600, 1) == 600 * TOKEN_S


def test_a_barrier_waits_for_the_longest_of_every_batch() -> None:
    assert barrier_s(sizes_of([1.0, 5.0, 2.0, 3.0, 4.0]), slots=2) == pytest.approx(5.0 + 3.0 + 4.0)


def test_environment_latency_and_hangs_keep_a_barrier_waiting() -> None:
    assert barrier_s(sizes_of([1.0, 2.0], latency_s=3.0), slots=2) == pytest.approx(5.0)
    assert barrier_s(sizes_of([1.0, 4.0], hangs_at={1: 0.5}), slots=2) == pytest.approx(2.0 + STALL_S + 4.0)


def test_a_static_partition_deals_samples_to_engines_and_never_moves_them() -> None:
    # Two engines of 16 slots: even samples go to one, odd ones to the other, which has all the long ones.
    assert static_partition_s(sizes_of([1.0, 10.0] * 32), slots=32) == pytest.approx(20.0)
    assert static_partition_s(sizes_of([2.0] * 32 + [3.0]), slots=32) == pytest.approx(5.0)


@pytest.mark.parametrize("lengths", ["lognormal", "pareto"])
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_lengths_have_the_marginal_that_they_should_whatever_their_correlation(lengths: str, rho: float) -> None:
    cell = Cell(lengths, rho=rho)  # type: ignore[arg-type]
    tokens = Population(cell, Scale(), seed=1).sizes(0, 20_000).tokens
    assert np.median(tokens) == pytest.approx(MEDIAN_TOKENS, rel=0.05)
    assert tokens.mean() == pytest.approx(mean_tokens(cell), rel=0.05)
    if lengths == "lognormal":
        assert np.percentile(tokens, 99) == pytest.approx(10 * MEDIAN_TOKENS, rel=0.1)
    else:
        assert tokens.max() == 20 * MEDIAN_TOKENS
    ranks = np.argsort(np.argsort(tokens, axis=0), axis=0)
    assert np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1] == pytest.approx(rho, abs=0.05)


def test_one_first_attempt_in_a_hundred_hangs_and_no_later_one() -> None:
    population = Population(BASE, Scale(), seed=1)
    sizes = population.sizes(0, 20_000)
    hangs = ~np.isnan(sizes.hangs_at)
    assert hangs.mean() == pytest.approx(0.01, rel=0.1)
    group, member = (int(each) for each in np.argwhere(hangs)[0])
    first, second = (population.script(lease_of(group, member, attempt)) for attempt in (0, 1))
    assert first == Script(second.turns, hangs_at=sizes.hangs_at[group, member])
    assert second.hangs_at is None
    assert second.num_tokens == sizes.tokens[group, member]


def test_a_group_depends_on_seed_and_number_alone() -> None:
    early, late = Population(BASE, Scale(), seed=1), Population(BASE, Scale(), seed=1)
    script = early.script(lease_of(700, 3))
    late.sizes(0, 10)
    assert late.script(lease_of(700, 3)) == script
    assert Population(BASE, Scale(), seed=2).script(lease_of(700, 3)) != script
    assert early.sizes(700, 1).tokens[0, 3] == script.num_tokens


def test_an_update_takes_as_long_as_full_slots_need_for_a_step() -> None:
    assert training_s(BASE, Scale()) == pytest.approx(512 * mean_tokens(BASE) * 0.02 / 128)
    assert training_s(Cell(slots=512), Scale()) == pytest.approx(training_s(BASE, Scale()) / 4)


def test_the_full_bench_crosses_all_factors_and_the_quick_one_has_each_level() -> None:
    assert len(set(all_cells())) == 24
    assert set(quick_cells()) <= set(all_cells())
    for factor in ("lengths", "slots", "has_latency", "rho"):
        assert {getattr(cell, factor) for cell in quick_cells()} == {getattr(cell, factor) for cell in all_cells()}


def test_a_synchronous_queue_takes_what_the_baselines_take_and_no_bound_is_beaten() -> None:
    figures = {policy: Job(Cell(slots=16), policy, 1, TINY).run() for policy in ("barrier", "static partition", "sample queue")}
    for each in figures.values():
        assert each.over_bound >= 1.0 - 1e-9
        assert 0.0 < each.utilisation <= 1.0
        assert each.waste == 0.0
        assert each.kept_length_ratio == pytest.approx(1.0)
    bounds = [each.step_s / each.over_bound for each in figures.values()]
    assert bounds == pytest.approx([bounds[0]] * 3)
    assert figures["sample queue"].step_s <= figures["barrier"].step_s


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.startswith("async")])
def test_asynchronous_policies_keep_their_staleness(policy: str) -> None:
    figures = Job(Cell(slots=32), policy, 1, TINY).run()
    assert figures.staleness <= int(policy.partition("k=")[2][0])
    assert 0.0 <= figures.waste < 1.0
    assert 0.0 < figures.utilisation <= 1.0
    assert Job(Cell(slots=32), policy, 1, TINY).run() == figures


def test_the_costs_of_the_controller_are_counted_without_the_stage() -> None:
    cost = controller_cost(num_engines=4, num_samples=64)
    assert cost.controller_us > 0
    assert cost.stage_us > 0


def test_every_sample_passes_through_the_ledger_into_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumroll.bench.ledger.IN_FLIGHT", 50)
    monkeypatch.setattr("drumroll.bench.ledger.BATCH", 64)
    figures = pass_through(1000, tmp_path)
    assert figures.num_samples == 1000
    assert min(figures.bytes_per_sample, figures.rows_per_s, figures.rss_mib) > 1


def test_all_figures_are_in_the_table_and_in_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_scheduler, "QUICK", TINY)
    monkeypatch.setattr(bench_scheduler, "quick_cells", lambda: [BASE])
    monkeypatch.setattr(bench_scheduler, "QUICK_COSTS", [Probe(64, 4), Probe(64, 2)])
    monkeypatch.setattr(bench_scheduler, "MANY_ENGINES", 4)
    monkeypatch.setattr(bench_scheduler, "FEW_ENGINES", 2)
    monkeypatch.setattr(bench_scheduler, "QUICK_LEDGER", Probe(100))
    monkeypatch.setattr(bench_scheduler, "run_all", lambda tasks, num_processes: [task.run() for task in tasks])
    bench_scheduler.bench(quick=True, num_processes=1, out=tmp_path / "all.json")
    *shown, last = capsys.readouterr().out.strip().splitlines()
    summary = json.loads(last)
    assert {
        "queue_over_bound", "queue_speedup_over_barrier", "async4_over_ideal", "async4_worst_staleness", "async4_waste",
        "async4_kept_length_ratio", "async4_continued_waste", "tail_kept_length_ratio", "controller_us_10k",
        "controller_ratio_10k_100", "ledger_million_rss_mib", "store_bytes_per_sample", "store_rows_per_s",
    } <= set(summary)  # fmt: skip
    for policy in POLICIES:
        assert any(line.strip().startswith(policy) for line in shown)
    written = json.loads((tmp_path / "all.json").read_text())
    assert [row["policy"] for row in written["rows"]] == list(POLICIES)
    assert {name: written[name] for name in summary} == summary
