"""How long a run takes to its first update and to its first step of RL: python benchmarks/start.py [--recipe FILE] [--repeats 3]

The time is that of a user: from the start of `drumroll train` to the first line of metrics.jsonl. Its first step comes at once where the
warm-up is left out, which is what the second figure is of: weights have been handed over, samples rolled out, judged and learnt from.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for name, settings in (("first update", []), ("first step of RL", ["warmup=null", "eval.every=0", "data.heldout=null"])):
        seconds = [to_first_line(arguments.recipe, settings) for _ in range(arguments.repeats)]
        print(f"{name:18} {statistics.median(seconds):6.1f} s   ({', '.join(f'{value:.1f}' for value in seconds)})", flush=True)


def to_first_line(recipe: str, settings: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = (sys.executable, "-m", "drumroll", "train", recipe, f"run_dir={folder}/run", *settings)
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            try:
                while not metrics.is_file() or not metrics.stat().st_size:
                    if run.poll() is not None:
                        raise SystemExit(f"the run ended before its first step:\n{run.stderr.read() if run.stderr else ''}")
                    if time.perf_counter() - started > PATIENCE_S:
                        raise SystemExit(f"no step within {PATIENCE_S:g} s")
                    time.sleep(0.02)
                return time.perf_counter() - started
            finally:
                run.terminate()
                run.communicate()


if __name__ == "__main__":
    main()
