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
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w+") as log:
        command = (sys.executable, "-m", "drumroll", "train", recipe, f"run_dir={name}/run", *settings)
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=log, stderr=log) as run:
            try:
                wait_for(Path(name) / "run" / "metrics.jsonl", run)
                return time.perf_counter() - started
            except TimeoutError as error:
                log.seek(0)
                raise SystemExit(f"{error}:\n{log.read()}") from error
            finally:
                run.terminate()


def wait_for(metrics: Path, run: subprocess.Popen[bytes]) -> None:
    """Until the file holds something."""
    end = time.perf_counter() + PATIENCE_S
    while not metrics.is_file() or not metrics.stat().st_size:
        if run.poll() is not None or time.perf_counter() > end:
            raise TimeoutError("the run has made no step")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
