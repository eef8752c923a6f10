"""Runs the quickstart for several seeds, one after the other, and prints one table and one JSON line.

    python benchmarks/quickstart.py --seeds 1 2 3 --out runs/quickstart

Every run is the command that `make demo` runs, with its own seed. What the table must show: sampled success at most 0.50 before
and at least 0.90 after, greedy success up by 0.10, more SFT at least 0.10 behind RL, less than 240 seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="further overrides, for example max_steps=20")
    arguments = parser.parse_args()

    summaries: list[dict[str, Any]] = []
    print("| seed | sampled before | after | greedy before | after | more SFT, sampled | greedy | seconds | meets all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        folder = arguments.out / f"seed-{seed}"
        command = [sys.executable, "-m", "drumroll", "train", arguments.recipe, f"seed={seed}", f"run_dir={folder}", *arguments.overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((folder / "summary.json").read_text())
        summaries.append(summary)
        figures = [summary[stage][mode] for mode in ("sampled", "greedy") for stage in ("before", "after")]
        figures += [summary["comparison"]["sampled"], summary["comparison"]["greedy"]]
        shown = " | ".join(f"{figure:.3f}" for figure in figures)
        print(f"| {seed} | {shown} | {summary['seconds']['total']:.0f} | {'yes' if meets_all(summary) else 'no'} |", flush=True)
    print(json.dumps({"seeds": arguments.seeds, "all_met": all(map(meets_all, summaries)), "summaries": summaries}))


def meets_all(summary: dict[str, Any]) -> bool:
    before, after, comparison = summary["before"], summary["after"], summary["comparison"]
    return bool(
        before["sampled"] <= 0.50
        and after["sampled"] >= 0.90
        and after["greedy"] >= before["greedy"] + 0.10
        and after["sampled"] >= comparison["sampled"] + 0.10
        and summary["seconds"]["total"] < 240.0
    )


if __name__ == "__main__":
    main()
