"""How long synchronous and asynchronous training take to the same success on FrozenLake when its environments are slow.

python benchmarks/async_agents.py [--target 0.8] [--median 0.5] [--staleness 2] [--steps 24] [--repeats 1]

Both sides are recipes/frozen_lake.yaml with the environment of benchmarks/slow_lake.py, one after the other, on the same machine, from the
same seed and the same weights: those of the recipe after its warm-up and one step. What is compared is the time of training, evaluations
aside, until the held-out success, sampled, first reaches the target, interpolated between evaluations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SLOW = ("plugins=[benchmarks/slow_lake.py]", "env.kind=slow_lake", "eval.every=4")
PHASES = ("time/rollout_s", "time/score_s", "time/update_s", "time/sync_s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--median", type=float, default=0.5)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    for seed in range(1, 1 + arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            compare(arguments, seed, Path(folder))


def compare(arguments: argparse.Namespace, seed: int, folder: Path) -> None:
    train(folder / "start", f"seed={seed}", "max_steps=1", "warmup.compare=false")
    own = (f"seed={seed}", f"max_steps={arguments.steps}", f"env.median_s={arguments.median}")
    start = (f"model={{path: {folder / 'start' / 'model' / 'final'}}}", "model.scratch=null", "warmup=null")
    sides = {
        "synchronous": ("rollout.max_staleness=0",),
        "asynchronous": (f"rollout.max_staleness={arguments.staleness}", "algo.correction={kind: truncated_is}"),
    }
    times = {}
    for name, changes in sides.items():
        curve = train(folder / name, *start, *SLOW, *own, *changes)
        times[name] = time_to(arguments.target, curve)
        print(f"seed {seed} {name:12} " + "  ".join(f"{seconds:.0f} s {success:.3f}" for seconds, success in curve), flush=True)
    synchronous, asynchronous = times.values()
    if synchronous is None or asynchronous is None:
        print(f"seed {seed}: {arguments.target} was not reached by {' and '.join(n for n, t in times.items() if t is None)}")
    else:
        share = asynchronous / synchronous
        print(f"seed {seed}: to {arguments.target} in {synchronous:.0f} s and {asynchronous:.0f} s, {share:.2f} of the time")


def train(run: Path, *changes: str) -> list[tuple[float, float]]:
    """Seconds of training and held-out success, at every evaluation."""
    command = (sys.executable, "-m", "drumroll", "train", "recipes/frozen_lake.yaml", f"run_dir={run}", *changes)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    evaluations, steps = ([json.loads(line) for line in (run / name).open()] for name in ("eval.jsonl", "metrics.jsonl"))
    spent = {0: 0.0}
    for line in steps:
        if "time/rollout_s" in line:
            spent[line["step"]] = spent[line["step"] - 1] + sum(line[phase] for phase in PHASES)
    return [(spent[line["step"]], line["sampled"]) for line in evaluations]


def time_to(target: float, curve: list[tuple[float, float]]) -> float | None:
    """Where the curve first crosses the target."""
    before = curve[0]
    for point in curve:
        if point[1] >= target:
            share = (target - before[1]) / (point[1] - before[1]) if point[1] > before[1] else 0.0
            return before[0] + share * (point[0] - before[0])
        before = point
    return None


if __name__ == "__main__":
    main()
