"""How long synchronous and asynchronous training take to the same success on FrozenLake when its environments are slow.

python benchmarks/async_agents.py [--median 0.5] [--staleness 3] [--steps 12] [--async-steps 18] [--seeds 1 2 3] [--start MODEL]

Both sides are recipes/frozen_lake.yaml with the environment of benchmarks/slow_lake.py, one after the other, on the same machine, from the
same seed and the same weights: those of the recipe after its warm-up and one step, or the model in `--start`. Samples that are a step or
two old teach a little less, so the asynchronous side makes more steps. Both are evaluated before and after training only, because rollouts
go on during an evaluation. What is compared is the time of all steps, and the held-out success, sampled, after them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SLOW = ("plugins=[benchmarks/slow_lake.py]", "env.kind=slow_lake", "eval.every=100000")
PHASES = ("time/rollout_s", "time/score_s", "time/update_s", "time/sync_s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--median", type=float, default=0.5)
    parser.add_argument("--staleness", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--async-steps", type=int, default=18)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--start", type=Path)
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            compare(arguments, seed, Path(folder))


def compare(arguments: argparse.Namespace, seed: int, folder: Path) -> None:
    start = arguments.start
    if start is None:
        train(folder / "start", f"seed={seed}", "max_steps=1", "warmup.compare=false")
        start = folder / "start" / "model" / "final"
    own = (f"model={{path: {start}}}", "model.scratch=null", "warmup=null", f"seed={seed}", f"env.median_s={arguments.median}")
    staleness = f"rollout.max_staleness={arguments.staleness}"
    sides = {
        "synchronous": ("rollout.max_staleness=0", f"max_steps={arguments.steps}"),
        "asynchronous": (staleness, "algo.correction={kind: truncated_is}", f"max_steps={arguments.async_steps}"),
    }
    seconds = {}
    for name, changes in sides.items():
        seconds[name], before, after, num_steps = train(folder / name, *SLOW, *own, *changes)
        print(f"seed {seed} {name:12} {num_steps} steps in {seconds[name]:.0f} s, success {before:.3f} -> {after:.3f}", flush=True)
    share = seconds["asynchronous"] / seconds["synchronous"]
    print(f"seed {seed}: asynchronous training takes {share:.2f} of the time", flush=True)


def train(run: Path, *changes: str) -> tuple[float, float, float, int]:
    """Seconds of all steps, held-out success before and after, and the number of steps."""
    command = (sys.executable, "-m", "drumroll", "train", "recipes/frozen_lake.yaml", f"run_dir={run}", *changes)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    evaluations, lines = ([json.loads(line) for line in (run / name).open()] for name in ("eval.jsonl", "metrics.jsonl"))
    steps = [line for line in lines if "time/rollout_s" in line]
    seconds = sum(line[phase] for line in steps for phase in PHASES)
    return seconds, evaluations[0]["sampled"], evaluations[-1]["sampled"], len(steps)


if __name__ == "__main__":
    main()
