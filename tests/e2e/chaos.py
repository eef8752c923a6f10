"""Kills the tiny run, through real Ray, with SIGKILL at random moments, resumes it, and compares with the run that nobody killed.

    python tests/e2e/chaos.py FOLDER --kills 50 --seed 11

The controller's process is killed, and whatever it started must be gone 10 s later. Prints one JSON line; exit code 1 when
anything differs or is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from killpoints import result, tree
from test_cli import MARK, processes


def launch(arguments: list[str], mark: str, kill_after: float | None) -> int:
    """The exit code; -9 where it was killed. The run must leave nothing behind."""
    environment = {**os.environ, MARK: mark}
    process = subprocess.Popen([sys.executable, "-m", "drumroll", *arguments], stdout=subprocess.DEVNULL, env=environment)
    try:
        code = process.wait(kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        code = process.wait()
    patience = time.monotonic() + 10
    while processes(mark):
        if time.monotonic() > patience:
            raise SystemExit(f"processes {processes(mark)} are there 10 s after the end of the run")
        time.sleep(0.1)
    return code


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    rng = random.Random(arguments.seed)

    def config(run: Path) -> str:
        path = folder / f"{run.name}.yaml"
        path.write_text(yaml.safe_dump(tree(folder, run)))
        return str(path)

    started = time.monotonic()
    assert launch(["train", config(folder / "whole")], "whole", None) == 0
    seconds = time.monotonic() - started
    expected = result(folder / "whole")
    report: dict[str, Any] = {"seconds": seconds, "kills": 0, "runs": 0, "different": []}
    while report["kills"] < arguments.kills:
        run = folder / f"run-{report['runs']}"
        report["runs"] += 1
        while True:
            command = ["resume", str(run)] if (run / "config.yaml").exists() else ["train", config(run)]
            patience = rng.uniform(0.0, seconds) if report["kills"] < arguments.kills else None
            if launch(command, run.name, patience) != -signal.SIGKILL:
                break
            report["kills"] += 1
            if run.exists() and not (run / "config.yaml").exists():  # killed before it was a run
                run.rename(folder / f"empty-{report['kills']}")
        got = result(run)
        report["different"] += [f"{run.name}: {name}" for name in expected if got[name] != expected[name]]
        print(json.dumps(report), flush=True)
    sys.exit(bool(report["different"]))


if __name__ == "__main__":
    main()
