"""Verdicts per second of the mathematics and the code reward, in one reward worker and in two; and what the sandbox adds to a run.

    python benchmarks/rewards.py --verdicts 400 --repeats 3

Reward workers run over local Ray, as in training, and are asked through the client that environment workers use, with all questions at
once. Start-up (Ray's processes, the child process, the sandbox, imports) is measured apart. One worker and two alternate. For the
sandbox, the same programs run in turns in the sandbox and in a plain interpreter (`python -I -S`). Prints tables and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from drumroll.cluster.cluster import Cluster
from drumroll.cluster.session import LOCAL, Session
from drumroll.config.models import RayConfig
from drumroll.plan import Placement
from drumroll.rollout.reward_client import RewardClient
from drumroll.sandbox import Sandbox
from drumroll.types import Sampling, Task, Trajectory, Turn


def exercise(number: int) -> tuple[str, str, bool]:
    """Reference, reply, and whether it is right; no two are alike, so that nothing is remembered."""
    a, b = number + 100, 2 * number + 301
    kinds = [
        (f"{a * b}", f"That makes {a} × {b} eggs: \\boxed{{{a * b}}}.", True),
        (f"\\frac{{{a}}}{{{b}}}", f"We get $\\frac{{{3 * a}}}{{{3 * b}}}$, hence \\boxed{{\\frac{{{3 * a}}}{{{3 * b}}}}}.", True),
        (f"\\{{{a}, {b}, {a * b}\\}}", f"The solutions are \\boxed{{\\{{{a * b}, {a}, {b}\\}}}}.", True),
        (f"{a}\\sqrt{{3}}", f"The length is \\boxed{{\\sqrt{{{3 * a * a}}}}}.", True),
        (f"(x+{a})^2", f"Expand it: \\boxed{{x^2 + {2 * a}x + {a * a}}}.", True),
        (f"[{a}, \\infty)", f"So $x \\in [{a}, \\infty)$: \\boxed{{[{a},\\infty)}}.", True),
        (f"\\frac{{{a}x}}{{{b}}}", f"After simplification I obtain \\boxed{{\\frac{{{a}x}}{{{b + 1}}}}}.", False),
    ]
    return kinds[number % len(kinds)]


CODE = """Here it is:
```python
def is_prime(n):
    if n < 2:
        return False
    return all(n % d for d in range(2, int(n ** 0.5) + 1))
```
"""
TESTS = [f"assert is_prime({n}) == {n in (2, 3, 5, 7, 97, 7919)}" for n in (1, 2, 9, 97, 7919)]
PROGRAMS = {
    "pass": "pass",
    "a little work": "import collections, math, re\nprint(sum(math.gcd(i, 360) for i in range(2000)))",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verdicts", type=int, default=400, help="of each kind and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=int, default=100, help="of each program, in the sandbox and without")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with Session(RayConfig(cpu_slots=2)) as session:
        clusters = {num: launch(session, num) for num in (1, 2)}
        for num, (_, started_s) in clusters.items():
            figures[f"start_s_{num}"] = round(started_s, 2)
        for kind, sample in (("math", mathematics), ("code", code)):
            rates: dict[int, list[float]] = {1: [], 2: []}
            for repeat in range(arguments.repeats):
                numbers = range(repeat * arguments.verdicts, (repeat + 1) * arguments.verdicts)
                for num, (cluster, _) in clusters.items():
                    rates[num].append(asyncio.run(verdicts_per_second(cluster, kind, sample, numbers)))
            figures[kind] = {num: [round(rate, 1) for rate in of_num] for num, of_num in rates.items()}
    added = asyncio.run(sandbox_cost(arguments.runs))
    show(figures, added)


def launch(session: Session, num: int) -> tuple[Cluster, float]:
    """So many reward workers, and the seconds until the first verdict may be asked for."""
    started = time.perf_counter()
    rewards = {
        "math": [{"kind": "math"}],
        "code": [{"kind": "code"}],
    }
    placements = [Placement("reward", rank, LOCAL, (), "cpu") for rank in range(num)]
    cluster = Cluster.launch(session, placements, "drumroll.workers.reward:RewardWorker", kwargs={"rewards": rewards})
    cluster.all("open")
    asyncio.run(verdicts_per_second(cluster, "math", mathematics, range(-10 * num, 0)))  # imports sympy
    return cluster, time.perf_counter() - started


async def verdicts_per_second(cluster: Cluster, kind: str, sample: Callable[[int], Trajectory], numbers: Sequence[int]) -> float:
    client = RewardClient(cluster.handles)
    samples = [sample(number) for number in numbers]
    started = time.perf_counter()
    answers = await asyncio.gather(*(client.ask(kind, 0, each, []) for each in samples))
    seconds = time.perf_counter() - started
    expected = [float(exercise(number)[2]) if kind == "math" else 1.0 for number in numbers]
    assert [answer[kind] for answer in answers] == expected, f"a verdict of {kind} is not what it should be"
    return len(numbers) / seconds


def mathematics(number: int) -> Trajectory:
    reference, reply, _ = exercise(number)
    return trajectory(reply, {"answer": reference})


def code(number: int) -> Trajectory:
    return trajectory(CODE, {"tests": TESTS})


def trajectory(reply: str, data: dict[str, Any]) -> Trajectory:
    return Trajectory(
        sample_id="s",
        group_id="g",
        task=Task("t", prompt="?", data=data),
        turns=(Turn("environment", 0, 1, "?"), Turn("policy", 1, 2, reply)),
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        logp=np.zeros(2, np.float32),
        token_version=np.zeros(2, np.int32),
        sampling=Sampling(),
        seed=0,
        reward=None,
        stop_reason="stop",
    )


async def sandbox_cost(runs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every run of each program, in the sandbox and in a plain interpreter, in turns; and the sandbox's start."""
    seconds: dict[str, dict[str, list[float]]] = {}
    started = time.perf_counter()
    async with Sandbox() as sandbox:
        seconds["start"] = {"sandbox": [time.perf_counter() - started]}
        for name, program in PROGRAMS.items():
            of_program = seconds[name] = {"plain": [], "sandbox": []}
            for _ in range(runs):
                started = time.perf_counter()
                plain = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", program, stdout=asyncio.subprocess.PIPE)
                expected, _ = await plain.communicate()
                of_program["plain"].append(time.perf_counter() - started)
                started = time.perf_counter()
                run = await sandbox.run(program)
                of_program["sandbox"].append(time.perf_counter() - started)
                assert run.stdout == expected.decode(), run
    return seconds


def show(figures: dict[str, Any], added: dict[str, dict[str, list[float]]]) -> None:
    console = Console()
    table = Table("", "one worker, verdicts/s", "two workers, verdicts/s", "two / one", box=None)
    for kind in ("math", "code"):
        one, two = (statistics.median(figures[kind][num]) for num in (1, 2))
        table.add_row(kind, f"{one:.0f}", f"{two:.0f}", f"{two / one:.2f}")
        figures[f"{kind}_two_over_one"] = round(two / one, 2)
    console.print(table)
    console.print(f"start-up: one worker {figures['start_s_1']} s, two workers {figures['start_s_2']} s")
    table = Table("program", "plain interpreter, ms", "sandbox, ms", "added, ms", box=None)
    for name in PROGRAMS:
        plain, inside = (1000 * statistics.median(added[name][way]) for way in ("plain", "sandbox"))
        table.add_row(name, f"{plain:.1f}", f"{inside:.1f}", f"{inside - plain:+.1f}")
        figures[f"sandbox_added_ms_{name.replace(' ', '_')}"] = round(inside - plain, 1)
        figures[f"sandbox_ms_{name.replace(' ', '_')}"] = round(inside, 1)
        figures[f"sandbox_p95_ms_{name.replace(' ', '_')}"] = round(1000 * percentile(added[name]["sandbox"], 95), 1)
    console.print(table)
    figures["sandbox_start_ms"] = round(1000 * added["start"]["sandbox"][0], 1)
    print(json.dumps(figures))


def percentile(values: Sequence[float], percent: int) -> float:
    return float(np.percentile(values, percent))


if __name__ == "__main__":
    main()
