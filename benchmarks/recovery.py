"""How long a run stands still after a death, and how much it gets done under faults: python benchmarks/recovery.py [--repeats 3]

Two ways, side by side in one run of this script, from the same config:

    role   the role that lost a worker starts anew, the rest of the run stays
    job    the whole job ends and is resumed from its checkpoint of the step before, by `drumroll train --supervise`

Recovery is the time from SIGKILL to the end of the next step. Goodput is useful steps an hour, from the end of the first step to the end
of the last, with one fault in every `--fault-every` steps, engines and trainers in turn. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drumroll.record.files import read_lines

Way = Literal["role", "job"]
PATIENCE_S = 300.0
CALM_S = 12.0
"""From the end of one recovery to the next death: whoever is lost sooner is taken for one that cannot stay up, and waited with."""
RECIPE = (
    "recipes/quickstart.yaml",
    "warmup=null",
    "data.heldout=null",
    "eval.every=0",
    "rewards=[{kind: './tests/e2e/rewards.py:positions'}]",  # which a model that knows nothing gets some of
    "devices.actor_train=0",
    "devices.actor_infer=[0,1]",
    "ray.cpu_slots=2",
    "checkpoint.every=1",
)
SETTINGS: dict[Way, tuple[str, ...]] = {"role": (), "job": ("supervision.max_restarts=0", "checkpoint.in_memory=false")}


@dataclass
class Run:
    """A run in a process of its own, seen through its folder."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def steps(self) -> int:
        return max((int(line["step"]) for line in read_lines(self.folder / "metrics.jsonl") if "weights" in line), default=0)

    def until(self, condition: Callable[[], bool]) -> float:
        """When that was, on the monotonic clock."""
        patience = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > patience:
                raise SystemExit(f"the run has ended or stands still at step {self.steps}: see {self.folder}")
            time.sleep(0.005)
        return time.monotonic()

    def kill(self, role: str) -> None:
        """End the newest process of every rank of an engine's role, or of the trainers'. All engines: with one left, a job would go on."""
        pids = {line["rank"]: line["pid"] for line in read_lines(self.folder / "workers.jsonl") if line["role"] == role}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)


def started(folder: Path, way: Way, steps: int) -> Run:
    command = [sys.executable, "-m", "drumroll", "train", *RECIPE, *SETTINGS[way], f"max_steps={steps}", f"run_dir={folder}"]
    if way == "job":
        command.append("--supervise")
    return Run(folder, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


def recovery(way: Way, role: str, repeats: int) -> list[float]:
    """Seconds from each death of a role's workers to the end of the next step."""
    with tempfile.TemporaryDirectory() as folder:
        run = started(Path(folder) / "run", way, steps=100_000)
        try:
            run.until(lambda: run.steps >= 3)
            seconds = []
            for _ in range(repeats):
                reached = run.steps
                run.until(lambda reached=reached: run.steps > reached)  # type: ignore[misc]
                reached, began = run.steps, time.monotonic()
                run.kill(role)
                seconds.append(run.until(lambda reached=reached: run.steps > reached) - began)  # type: ignore[misc]
                time.sleep(CALM_S)
            return seconds
        finally:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(60)


def goodput(way: Way | None, steps: int, fault_every: int) -> float:
    """Steps an hour; None: without faults."""
    with tempfile.TemporaryDirectory() as folder:
        run = started(Path(folder) / "run", way or "role", steps)
        first = run.until(lambda: run.steps >= 1)
        for number, at in enumerate(range(fault_every, steps, fault_every) if way else ()):
            run.until(lambda at=at: run.steps >= at)  # type: ignore[misc]
            run.kill(("actor_infer", "actor_train")[number % 2])
        last = run.until(lambda: run.steps >= steps)
        run.process.wait(60)
        return 3600 * (steps - 1) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--fault-every", type=int, default=30)
    arguments = parser.parse_args()
    report: dict[str, object] = {}
    print(f"{'death of':12} {'role-level':>22} {'whole job':>22}   ratio")
    for role in ("actor_infer", "actor_train"):
        seconds = {way: recovery(way, role, arguments.repeats) for way in SETTINGS}
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        texts = [f"{medians[way]:.1f} s ({', '.join(f'{value:.1f}' for value in seconds[way])})" for way in SETTINGS]
        print(f"{role:12} {texts[0]:>22} {texts[1]:>22}   {medians['role'] / medians['job']:.2f}", flush=True)
        report[role] = seconds
    ways: tuple[Way | None, ...] = (None, *SETTINGS)
    rates = {str(way): goodput(way, arguments.steps, arguments.fault_every) for way in ways}
    shares = ", ".join(f"{way} {rates[way]:.0f} ({rates[way] / rates['None']:.2f})" for way in SETTINGS)
    print(f"steps an hour with a fault in every {arguments.fault_every}: {shares}; without faults {rates['None']:.0f}")
    print(json.dumps({**report, "goodput": rates}))


if __name__ == "__main__":
    main()
