"""The chaos suite: whole runs through real Ray under faults that go on for minutes, each against what must hold.

    python tests/faults/chaos.py FOLDER [--minutes 12] [--only kills,busy,...]

    kills    an engine is killed 20 times: idle, generating, syncing, starting
             no sample lost or duplicated; noticed within 2 s, serving again within 15 s; at most 1.3 times the clean time
    busy     twice as many busy processes as cores: nobody is taken for lost
    frozen   an engine, an environment worker, a reward worker are stopped: noticed within 15 s; no step takes more than 30 s
    moody    10 % of environments raise, 2 % hang, 1 % of rewards hang
             nothing without a verdict is trained on; at least 85 % of the clean throughput
    poison   one task in 200 always fails: at most two attempts each, all named in the report, the rest unaffected
    node     one of two nodes is lost, with an engine and an environment worker: the run goes on without them

Faults that take seconds are in `test_chaos.py`, killed controllers in `tests/e2e/chaos.py`. Prints a JSON line for each, with what was
seen; exit code 1 when anything does not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from sabotage import Outcome, Scene, at_random, sabotaged

from drumroll.config.load import merge
from drumroll.record.files import read_lines
from drumroll.record.report import read_summary
from drumroll.record.store import Filter, Reader

from tiny import tiny_tree, write_rows  # isort: skip

GROUPS, GROUP_SIZE = 16, 8
MOODS = ("idle", "generating", "syncing", "starting")
VERDICTS = {"positions", "sometimes_hangs"}
"""Rewards of the run with moody environments; the second counts nothing."""
PHASES = {"idle": "update", "generating": "rollout", "syncing": "sync"}


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run with steps of about half a second: two engines, an environment worker, no evaluation."""
    base = {
        "run_dir": str(folder / "run"),
        "model": {"scratch": {"config": {"hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": 64}}},
        "warmup": None,
        "data": {"train": {"path": write_rows(_made(folder) / "many.jsonl", 400, 1)}, "heldout": None},
        "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "sampling": {"max_new_tokens": 32}},
        "devices": {"actor_train": 0, "actor_infer": [0, 1]},
        "ray": {"cpu_slots": 2},
        "trainer": {"lr": 1e-5},  # or a policy that has settled on one reply soon has nothing to learn from any more
        "checkpoint": {"every_s": 3600.0},
    }
    return tiny_tree(folder, **merge(base, changes))


def nobody(scene: Scene) -> None:
    """A saboteur who does nothing."""


def kills(folder: Path, minutes: float) -> dict[str, Any]:
    """A clean run of that many minutes, then the same with its engines killed: twenty times in twelve minutes."""
    num_kills = max(len(MOODS), round(minutes * 20 / 12))
    pace = rl_seconds(sabotaged(tree(folder / "pace", max_steps=30), nobody)) / 30
    steps = max(40, round(60 * minutes / pace))
    clean = sabotaged(tree(folder / "clean", max_steps=steps), nobody)
    rng = random.Random(3)

    def plan(scene: Scene) -> None:
        for number, step in enumerate(at_random(rng, num_kills, 5, steps - 20)):
            mood = MOODS[number % len(MOODS)]
            scene.await_step(step)
            scene.await_incident("engine serves", number)
            if mood in PHASES:
                scene.await_phase(PHASES[mood])
            scene.strike("engines", number % 2)
            if mood == "starting":
                scene.strike_newcomer("engines", number % 2)
        scene.await_incident("engine serves", num_kills)

    faulty = sabotaged(tree(folder / "faulty", max_steps=steps), plan)
    faulty.check_samples(GROUPS, GROUP_SIZE)
    noticed = [faulty.first(blow, "worker lost", "worker not replaced") for blow in faulty.blows]
    served = [faulty.first(blow, "engine serves") for blow in faulty.blows]
    seconds = {"clean": rl_seconds(clean), "faulty": rl_seconds(faulty)}
    ratio = seconds["faulty"] / seconds["clean"]
    return {
        "steps": steps,
        "kills": len(faulty.blows),
        "noticed_s_max": max(noticed),
        "served_s_max": max(served),
        "seconds": seconds,
        "ratio": ratio,
        "holds": len(faulty.blows) >= num_kills and max(noticed) <= 2.0 and max(served) <= 15.0 and ratio <= 1.3,
    }


def busy(folder: Path, minutes: float) -> dict[str, Any]:
    with busy_processes(2 * (os.cpu_count() or 1)):
        outcome = sabotaged(tree(folder, max_steps=60), nobody)
    outcome.check_samples(GROUPS, GROUP_SIZE)
    return {"incidents": len(outcome.incidents), "steps": len(outcome.weights), "holds": outcome.incidents == []}


def frozen(folder: Path, minutes: float) -> dict[str, Any]:
    rewards = [{"kind": "exact_match", "pooled": True}, {"kind": "./tests/e2e/rewards.py:positions", "weight": 0.5}]

    def plan(scene: Scene) -> None:
        for number, cluster in enumerate(("engines", "environments", "rewards")):
            scene.await_step(10 + 20 * number)
            scene.await_phase("rollout")
            scene.strike(cluster, 0, signal.SIGSTOP)
            scene.await_incident("worker replaced", number + 1)

    changes = {"max_steps": 80, "rewards": rewards, "reward_workers": 2, "rollout": {"num_env_workers": 2}}
    outcome = sabotaged(tree(folder, **changes), plan)
    outcome.check_samples(GROUPS, GROUP_SIZE)
    noticed = {blow.cluster: outcome.first(blow, "worker lost") for blow in outcome.blows}
    longest = max(step_seconds(outcome))
    holds = len(noticed) == 3 and max(noticed.values()) <= 15.0 and longest <= 30.0
    return {"noticed_s": noticed, "longest_step_s": longest, "holds": holds}


def moody(folder: Path, minutes: float) -> dict[str, Any]:
    """Asynchronous, as runs with slow and unreliable environments are. An attempt that hangs takes a second, which is about as long as a
    step."""
    changes = {
        "max_steps": 40,
        "plugins": ["./tests/faults/moody.py"],
        "rollout": {
            "max_staleness": 2,
            "env_deadline_s": 1.0,
            "reward_deadline_s": 1.0,
            "num_env_workers": 1,
            "groups_per_step": 4 * GROUPS,
        },
        "algo": {"correction": {"kind": "truncated_is"}},
    }

    def moods(share: float) -> dict[str, Any]:
        env = {"kind": "moody", "raises": 0.1 * share, "hangs": 0.02 * share}
        rewards = [
            {"kind": "./tests/e2e/rewards.py:positions"},
            {"kind": "./tests/faults/moody.py:sometimes_hangs", "share": 0.01 * share, "pooled": True, "weight": 0.0},
        ]
        return {**changes, "env": env, "rewards": rewards, "reward_workers": 2}

    clean = sabotaged(tree(folder / "clean", **moods(0.0)), nobody)
    faulty = sabotaged(tree(folder / "faulty", **moods(1.0)), nobody)
    per_second = {name: trained_samples(outcome) / rl_seconds(outcome) for name, outcome in (("clean", clean), ("faulty", faulty))}
    share = per_second["faulty"] / per_second["clean"]
    return {"samples_per_s": per_second, "share": share, "holds": share >= 0.85 and no_leak(faulty)}


def poison(folder: Path, minutes: float) -> dict[str, Any]:
    rows = read_lines(Path(write_rows(_made(folder) / "plain.jsonl", 1000, 1)))
    poisoned = [number for number in range(len(rows)) if number % 200 == 17]
    path = folder / "poisoned.jsonl"
    path.write_text("".join(json.dumps({**row, "poison": number in poisoned}) + "\n" for number, row in enumerate(rows)))
    changes = {"plugins": ["./tests/faults/moody.py"], "env": {"kind": "moody"}, "max_steps": 80}
    outcome = sabotaged(tree(folder, **changes, data={"train": {"path": str(path)}}), nobody)
    outcome.check_samples(GROUPS, GROUP_SIZE)
    named = set(read_summary(outcome.run)["quarantined"])
    expected = {f"train-{number}" for number in poisoned}
    attempts = outcome.most_leases(expected)
    return {"named": sorted(named), "attempts": attempts, "holds": named == expected and attempts <= 2}


def node(folder: Path, minutes: float) -> dict[str, Any]:
    """In a process of its own, because it joins a cluster."""
    answer = subprocess.run([sys.executable, str(Path(__file__).parent / "lose_node.py"), str(folder)], capture_output=True, text=True)
    if answer.returncode:
        return {"holds": False, "error": answer.stderr[-2000:]}
    return dict(json.loads(answer.stdout.splitlines()[-1]))


SUITE: dict[str, Callable[[Path, float], dict[str, Any]]] = {
    "busy": busy,
    "frozen": frozen,
    "moody": moody,
    "poison": poison,
    "node": node,
    "kills": kills,
}


def rl_seconds(outcome: Outcome) -> float:
    return sum(step_seconds(outcome))


def step_seconds(outcome: Outcome) -> list[float]:
    lines = [line for line in read_lines(outcome.run.metrics_file) if "weights" in line]
    return [sum(value for name, value in line.items() if name.startswith("time/") and "reward" not in name) for line in lines]


def trained_samples(outcome: Outcome) -> float:
    return sum(line["rollout/num_samples"] for line in read_lines(outcome.run.metrics_file) if "weights" in line)


def no_leak(outcome: Outcome) -> bool:
    """Whether all that was trained on had a verdict of every reward, and no other reward than these give."""
    with Reader(outcome.run.store) as reader:
        rows = reader.query(Filter(phase="train", state="consumed"))
    return bool(rows) and all(set(row.reward_parts) == VERDICTS and row.reward == row.reward_parts["positions"] for row in rows)


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0, help="of the clean run that kills are compared with")
    parser.add_argument("--only", default=",".join(SUITE))
    arguments = parser.parse_args()
    failed = []
    for name in arguments.only.split(","):
        report = SUITE[name](arguments.folder / name, arguments.minutes)
        print(json.dumps({"fault": name, **report}), flush=True)
        if not report["holds"]:
            failed.append(name)
    sys.exit(f"does not hold: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
