"""Kills the tiny run with SIGKILL at random points, resumes it, and compares with the run that nobody killed.

    python tests/e2e/killpoints.py FOLDER --kills 20 --seed 7
    python tests/e2e/killpoints.py FOLDER --kills 20 --seed 7 --staleness 2

Every run is a forked process with its workers inside (see `local_cluster`), so that one costs a second. It counts *points*: each
call of a worker, each line of metrics, each fsync and rename. A run that is to be killed sends itself SIGKILL at a point that is
drawn beforehand, whatever its threads are doing. An asynchronous run (`--staleness`) does not repeat; of it must be true that every
step trained on as many groups as it should, and that no group was trained on twice. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from local_cluster import LocalHandle, local_cluster
from tiny import tiny_tree

from drumroll.config.load import check_config
from drumroll.pipelines.start import resume, start
from drumroll.record.files import JsonLines, read_lines
from drumroll.record.phases import PhaseTimer
from drumroll.record.store import Filter, Reader

MAX_STEPS = 4
GROUPS_PER_STEP = 3
VARYING = ("time", "sync/seconds", "rollout/tokens_per_s")
"""Metrics that measure time."""


class Points:
    """Counts points in this process, and ends it at one of them."""

    def __init__(self, last: int | None, told: Path) -> None:
        self.count = 0
        self._last = last
        self._told = told
        self._lock = threading.Lock()
        self._phase = "start"

    def watch(self) -> None:
        for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (JsonLines, "append"), (LocalHandle, "submit")):
            setattr(owner, name, self._counted(getattr(owner, name)))
        before = PhaseTimer.__init__

        def init(timer: PhaseTimer, *args: Any, on_change: Callable[[str], None], **kwargs: Any) -> None:
            def changed(name: str) -> None:
                self._phase = name or "between"
                on_change(name)

            before(timer, *args, on_change=changed, **kwargs)

        PhaseTimer.__init__ = init  # type: ignore[method-assign,assignment]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                if self.count == self._last:
                    self._told.write_text(self._phase)
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted


def forked(go: Callable[[], object], folder: Path, last: int | None = None) -> int | None:
    """Run in a child process; its number of points, or None where it was killed at its point `last`."""
    told, log = folder / "told", folder / "log"
    told.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = 1
        try:
            torch.set_num_threads(1)
            points = Points(last, told)
            points.watch()
            with local_cluster():
                go()
            told.write_text(str(points.count))
            (folder / "modules").write_text("\n".join(sys.modules))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and last is not None:
        return None
    if status:
        raise SystemExit(f"a run ended with status {status}:\n{log.read_text()[-4000:]}")
    return int(told.read_text())


def tree(folder: Path, run: Path, staleness: int = 0) -> dict[str, Any]:
    filters = [{"kind": "reward_variance", "min_variance": 0.002}]
    changes: dict[str, Any] = {
        "max_steps": MAX_STEPS,
        "eval": {"every": 2, "num_tasks": 4},
        "checkpoint": {"every": 1},
        "rollout": {"groups_per_step": GROUPS_PER_STEP, "filters": filters, "max_staleness": staleness},
        "run_dir": str(run),
        "warmup": {"steps": 6},
    }
    if staleness:
        changes |= {"algo": {"correction": "truncated_is"}, "devices": {"actor_train": 0, "actor_infer": 1}, "ray": {"cpu_slots": 2}}
    return tiny_tree(folder, **changes, deterministic=not staleness, model={"dtype": "float32"}, record={"tensorboard": False})


def begin_or_go_on(folder: Path, run: Path, staleness: int = 0) -> None:
    if (run / "config.yaml").exists():
        resume(run)
    else:  # killed before it was a run
        if run.exists():
            run.rename(run.with_name(f"{run.name}-{len(list(run.parent.iterdir()))}"))
        start(check_config(tree(folder, run, staleness)))


def result(run: Path) -> dict[str, Any]:
    """What must not depend on kills."""
    lines = {
        name: [
            {key: value for key, value in line.items() if key not in VARYING and not key.startswith(("time/", "utilisation/", "queue/"))}
            for line in read_lines(run / name)
        ]
        for name in ("metrics.jsonl", "eval.jsonl")
    }
    with Reader(run / "store") as reader:
        samples = {row.sample_id: [row.step, row.reward, row.reply, row.seed] for row in reader.query(Filter())}
    summary = json.loads((run / "summary.json").read_text())
    del summary["seconds"]
    return {**lines, "samples": samples, "summary": summary, "weights": (run / "model/final/model.safetensors").read_bytes().hex()}


def wrong_steps(run: Path) -> list[str]:
    """What is not as it must be even where runs do not repeat."""
    with Reader(run / "store") as reader:
        rows = reader.query(Filter(phase="train", state="consumed"))
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "weights" in line]
    wrong = [f"steps {steps}"] if steps != list(range(1, MAX_STEPS + 1)) else []
    first: dict[str, int] = {}
    for row in rows:  # stragglers of a group may follow in later steps; one used twice would be missing where it was used first
        first[row.group_id] = min(row.step, first.get(row.group_id, row.step))
    wrong += [f"step {step} has {count} groups" for step, count in Counter(first.values()).items() if count != GROUPS_PER_STEP]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--staleness", type=int, default=0)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(arguments.seed)
    whole = folder / "whole"
    staleness: int = arguments.staleness
    total = forked(lambda: begin_or_go_on(folder, whole, staleness), folder)
    assert total is not None
    for module in (folder / "modules").read_text().splitlines():  # imported once, for all runs to come
        with suppress(Exception):
            importlib.import_module(module)
    expected = result(whole)
    kills: Counter[str] = Counter()
    different: list[str] = []
    num_runs = 0
    while sum(kills.values()) < arguments.kills:
        run = folder / f"run-{num_runs}"
        num_runs += 1
        while True:
            left = arguments.kills - sum(kills.values())
            ended = forked(lambda run=run: begin_or_go_on(folder, run, staleness), folder, rng.randrange(1, total) if left else None)  # type: ignore[misc]
            if ended is not None:
                break
            kills[(folder / "told").read_text()] += 1
        if staleness:
            different += [f"{run.name}: {what}" for what in wrong_steps(run)]
            continue
        got = result(run)
        different += [f"{run.name}: {name}" for name in expected if got[name] != expected[name]]
    rejected = sum(line["rollout/num_rejected"] for line in read_lines(whole / "metrics.jsonl") if "weights" in line)
    print(json.dumps({"points": total, "runs": num_runs, "kills": kills, "rejected_groups": rejected, "different": different}))


if __name__ == "__main__":
    main()
