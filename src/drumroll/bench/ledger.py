"""What it takes to see samples through the ledger and into the store: memory, bytes on disk, rows a second.

    python -m drumroll.bench.ledger 1000000

It has a process of its own, so that the memory is its own. As many samples are in the ledger at a time as ten thousand engines of 16
slots keep there. Rows are written without tokens and text, whose size is the run's affair.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from drumroll.life import Departure, State, stamp
from drumroll.record.store import Writer
from drumroll.rollout.garbage import seldom_collected
from drumroll.rollout.ledger import Ledger, Sample

IN_FLIGHT = 160_000
BATCH = 4096
"""Departures that are written together."""
WORKER_STATES: tuple[State, ...] = ("environment", "waiting", "generating", "environment", "reward", "done")


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    num_samples: int
    rss_mib: float
    """The most that the process ever had in memory."""
    bytes_per_sample: float
    rows_per_s: float
    """While rows are written, the disk included."""
    us_per_sample: float
    """Processor time of ledger and store."""


def measure(num_samples: int) -> LedgerFigures:
    """In a process of its own."""
    done = subprocess.run([sys.executable, "-m", __name__, str(num_samples)], check=True, stdout=subprocess.PIPE)
    return LedgerFigures(**json.loads(done.stdout))


def pass_through(num_samples: int, folder: Path) -> LedgerFigures:
    """Admit samples one after another; once enough are under way, the oldest leaves for each that comes."""
    ticks = count()
    ledger = Ledger(lambda: next(ticks) * 1e-3)
    under_way: deque[Sample] = deque()
    departures: list[Departure] = []
    write_s, began_s = 0.0, time.process_time()
    with Writer(folder) as writer:
        for number in range(num_samples + IN_FLIGHT):
            if number < num_samples:
                sample = Sample(
                    f"train/{number >> 3:08d}/{number & 7:03d}", None, number & 7, f"train/{number >> 3:08d}", "task", "default"
                )
                ledger.admit(sample)
                ledger.move(sample, "leased", 0)
                under_way.append(sample)
            if number >= IN_FLIGHT and under_way:
                sample = under_way.popleft()
                ledger.follow(sample, b"".join([stamp(state, number, 0, 0) for state in WORKER_STATES]))
                departures.append(ledger.leave(sample, "consumed"))
            if len(departures) == BATCH or (departures and not under_way):
                write_s += _write(writer, departures)
                departures = []
        cpu_s = time.process_time() - began_s
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return LedgerFigures(num_samples, _peak_mib(), num_bytes / num_samples, num_samples / write_s, cpu_s / num_samples * 1e6)


def _write(writer: Writer, departures: Sequence[Departure]) -> float:
    began = time.perf_counter()
    writer.add("train", 1, departures)
    return time.perf_counter() - began


def _peak_mib() -> float:
    """The process's largest resident memory, from Linux's own account."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, seldom_collected():
        print(json.dumps(asdict(pass_through(int(sys.argv[1]), Path(folder)))))


if __name__ == "__main__":
    main()
