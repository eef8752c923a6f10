"""Samples per second of the sample queue against static partition with continuous batching, on real engines over local Ray.

    python benchmarks/rollout.py --steps 8 --repeats 3

Both sides train the same tiny model on the same samples (their weights are compared), with the same engines, slots and seeds; the
environment answers after lognormal pauses. Static partition deals a step's samples to the engines in advance; every engine works off
its own list, as many episodes at a time as it has slots (and the queue's reserve, so that a slot is refilled as fast). The sample
queue sends a sample wherever a slot is free, and keeps as many episodes under way as the slots need to stay busy. The repeats
alternate. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from drumroll.cluster.cluster import Cluster, Ref
from drumroll.config.load import check_config
from drumroll.pipelines.fleet import RayTransport
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.rollout.router import Router

SLOTS = 8
ENGINES = 2


class EverybodyAtOnce(Router):
    """Hands everything out in turn: who waits where is the static partition's business."""

    def pick(self, preferred: int = -1) -> int | None:
        return self._num_in_flight % len(self.engines.capacities)


class StaticPartition:
    """A transport that gives every sample to an engine in advance, and each engine its next one when one of its own has ended."""

    def __init__(self, environments: Cluster, slots: Sequence[int]) -> None:
        self._inner = RayTransport(environments, slots)
        self.slots = slots
        self._dealt = 0
        self._lists: list[deque[tuple[int, Lease]]] = [deque() for _ in slots]
        self._running = [0 for _ in slots]
        self._engine_of: dict[str, int] = {}

    @property
    def num_workers(self) -> int:
        return self._inner.num_workers

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None:
        for lease in leases:
            engine = self._dealt % len(self.slots)
            self._dealt += 1
            self._engine_of[lease.sample_id] = engine
            self._lists[engine].append((worker, replace(lease, engine=engine)))
        await self._refill()

    async def abort(self, worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        await self._inner.abort(worker, attempts)

    async def poll(self, worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, Ref]:
        report, block = await self._inner.poll(worker, wait_s, linger_s)
        for info in report.infos:
            self._running[self._engine_of.pop(info.sample_id)] -= 1
        await self._refill()
        return report, block

    async def _refill(self) -> None:
        for engine, waiting in enumerate(self._lists):
            by_worker: dict[int, list[Lease]] = {}
            while waiting and self._running[engine] < self.slots[engine] + max(1, self.slots[engine] // 8):
                worker, lease = waiting.popleft()
                self._running[engine] += 1
                by_worker.setdefault(worker, []).append(lease)
            for worker, leases in by_worker.items():
                await self._inner.lease(worker, leases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--median-s", type=float, default=0.1, help="median pause of the environment")
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"static partition": [], "sample queue": []}
    busy: dict[str, list[float]] = {name: [] for name in rates}
    weights: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(arguments.repeats):
            for name in rates:
                lines = _run(Path(scratch) / f"{name} {repeat}", arguments, static=name == "static partition")
                steps = lines[1:]  # the first one also learns how many episodes keep the slots busy
                seconds = sum(line["time/rollout_s"] for line in steps)
                rates[name].append(sum(line["rollout/num_samples"] for line in steps) / seconds)
                busy[name].append(statistics.fmean(line["utilisation/actor_infer"] for line in steps))
                weights.add(lines[-1]["weights"])
    _print(rates, busy, same_samples=len(weights) == 1)


def _run(folder: Path, arguments: argparse.Namespace, *, static: bool) -> list[dict[str, Any]]:
    folder.mkdir()
    tasks = folder / "tasks.jsonl"
    digits = random.Random(1)
    tasks.write_text("".join(json.dumps({"prompt": f"{digits.randrange(10**6):06d}=", "answer": "1"}) + "\n" for _ in range(500)))
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    cfg = check_config(
        {
            "pipeline": "rl",
            "name": "rollout-benchmark",
            "seed": 1,
            "max_steps": arguments.steps,
            "run_dir": str(folder / "run"),
            "model": {"scratch": {"characters": "0123456789=", "config": {**sizes, "max_position_embeddings": 128}}},
            "data": {"train": {"path": str(tasks)}},
            "env": {"kind": "benchmarks/slow_environment.py:Thinking", "median_s": arguments.median_s},
            "rewards": [{"kind": "exact_match"}],
            "rollout": {"groups_per_step": 64, "group_size": 8, "sampling": {"max_new_tokens": 64}},
            "algo": {"advantage": {"kind": "reinforce", "subtract_mean": False}},
            "trainer": {"lr": 1e-6},
            "engine": {"num_slots": SLOTS},
            "devices": {"actor_train": 0, "actor_infer": f"0-{ENGINES - 1}"},
            "ray": {"cpu_slots": ENGINES},
            "record": {"tensorboard": False},
        }
    )
    with ExitStack() as stack:
        if static:
            stack.enter_context(patch("drumroll.pipelines.fleet.RayTransport", StaticPartition))
            stack.enter_context(patch("drumroll.rollout.scheduler.Router", EverybodyAtOnce))
        run = start(cfg)
    return [line for line in read_lines(run.metrics_file) if "weights" in line]


def _print(rates: dict[str, list[float]], busy: dict[str, list[float]], *, same_samples: bool) -> None:
    table = Table("", "samples/s", "slots busy", "each repeat", box=None)
    for name, values in rates.items():
        repeats = ", ".join(f"{value:.1f}" for value in values)
        table.add_row(name, f"{statistics.median(values):.1f}", f"{statistics.median(busy[name]):.2f}", repeats)
    Console().print(table)
    ratios = [queue / static for queue, static in zip(rates["sample queue"], rates["static partition"], strict=True)]
    print(
        json.dumps(
            {
                "queue_over_static": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "same_samples": same_samples,
            }
        )
    )


if __name__ == "__main__":
    main()
