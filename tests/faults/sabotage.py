"""Whole runs through real Ray whose workers are killed, stopped and cut off while they work.

    def plan(scene: Scene) -> None:
        scene.await_step(2)
        scene.strike("engines", 0, signal.SIGSTOP)

    outcome = sabotaged(folder, plan, tree)

The run goes on in the calling thread, the saboteur in another one. What a run with faults must have in common with one without is in
`Outcome`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from drumroll.cluster.host import HostInfo
from drumroll.cluster.session import Session
from drumroll.config.load import check_config
from drumroll.life import unpack_life
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.phases import PhaseTimer
from drumroll.record.recorder import Recorder
from drumroll.record.store import Filter, Reader

PATIENCE_S = 240.0
"""What a saboteur waits for must have happened by then."""


@dataclass
class Blow:
    """What was done to whom, and when."""

    cluster: str
    rank: int
    number: signal.Signals
    time: float
    where: str


@dataclass
class Scene:
    """What a saboteur sees of a run, and does to it."""

    run: RunFolder
    fleet: Fleet | None = None
    phase: str = "start"
    step: int = 0
    """The last one that is on record."""
    blows: list[Blow] = field(default_factory=list)
    newcomers: list[int] = field(default_factory=list)
    """Processes of all workers so far, in the order in which they came up, each before it has imported what it needs."""
    is_over: bool = False
    errors: list[BaseException] = field(default_factory=list)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Looks often, so that a phase of milliseconds is seen; conditions must cost next to nothing, or they would slow the run down."""
        patience = time.monotonic() + PATIENCE_S
        while not condition():
            if self.is_over:
                raise SystemExit  # the run has ended, and the saboteur with it
            assert time.monotonic() < patience, f"{what} has not happened within {PATIENCE_S:g} s"
            time.sleep(0.002)

    def await_step(self, step: int) -> None:
        """Until this step is on record."""
        self.until(lambda: self.fleet is not None and self.step >= step, f"step {step}")

    def await_phase(self, name: str) -> None:
        """Until a phase of a step begins."""
        self.until(lambda: self.phase != name, f"the end of {name}")
        self.until(lambda: self.phase == name, name)

    def await_incident(self, kind: str, count: int = 1) -> None:
        file = self.run.incidents_file
        size = [-1]

        def came() -> bool:
            if count == 0 or not file.exists() or file.stat().st_size == size[0]:
                return count == 0
            size[0] = file.stat().st_size
            return self.incidents[kind] >= count

        self.until(came, f"{count} × {kind}")

    @property
    def incidents(self) -> Counter[str]:
        return Counter(line["kind"] for line in read_lines(self.run.incidents_file))

    def strike(self, cluster: str, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a worker's process a signal."""
        handle = getattr(self.fleet, cluster).handles[rank]
        self._send(handle.pid, Blow(cluster, rank, number, time.time(), handle.where))

    def strike_newcomer(self, cluster: str, rank: int) -> None:
        """End the next process that comes up to take a worker's place, while it starts."""
        known = len(self.newcomers)
        self.until(lambda: len(self.newcomers) > known, "a process that takes its place")
        handle = getattr(self.fleet, cluster).handles[rank]
        self._send(self.newcomers[known], Blow(cluster, rank, signal.SIGKILL, time.time(), handle.where))

    def _send(self, pid: int, blow: Blow) -> None:
        os.kill(pid, blow.number)
        self.blows.append(blow)


@dataclass
class Outcome:
    """What became of a run."""

    run: RunFolder
    blows: list[Blow]
    seconds: float

    @property
    def weights(self) -> list[str]:
        """Digest of the weights after each step."""
        return [line["weights"] for line in read_lines(self.run.metrics_file) if "weights" in line]

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return read_lines(self.run.incidents_file)

    def first(self, blow: Blow, *kinds: str) -> float:
        """Seconds from a blow to the first incident of these kinds after it that speaks of the same worker."""
        found = [
            line["time"] - blow.time
            for line in self.incidents
            if line["kind"] in kinds and line["time"] > blow.time and blow.where in line["reason"]
        ]
        assert found, f"{blow}: nothing of {kinds} followed"
        return min(found)

    def most_leases(self, task_ids: Collection[str]) -> int:
        """How often that sample of these tasks was leased which was leased most often."""
        with Reader(self.run.store) as reader:
            rows = [row for row in reader.query(Filter(phase="train")) if row.task_id in task_ids]
        return max(sum(stamp.state == "leased" for stamp in unpack_life(row.life)) for row in rows)

    def check_samples(self, groups_per_step: int, group_size: int) -> None:
        """Every step trained on its full number of samples, and no sample was trained on twice, or left without a word."""
        with Reader(self.run.store) as reader:
            rows = list(reader.query(Filter(phase="train", state="consumed")))
            assert len({row.sample_id for row in rows}) == len(rows), "a sample was trained on twice"
            per_step = Counter(row.step for row in rows)
            steps = range(1, len(self.weights) + 1)
            assert dict(per_step) == dict.fromkeys(steps, groups_per_step * group_size), "samples are missing"
            assert all(row.reward is not None for row in rows), "something without a verdict was trained on"


def sabotaged(tree: Mapping[str, Any], plan: Callable[[Scene], None], *patches: Any) -> Outcome:
    """Run a config while `plan` goes on beside it. What the run or the plan raises is raised here."""
    cfg = check_config(tree)
    assert cfg.run_dir is not None
    scene = Scene(RunFolder(Path(cfg.run_dir)))
    start_rl, init = Fleet.start_rl, PhaseTimer.__init__

    def noticed(fleet: Fleet, *args: Any) -> None:
        start_rl(fleet, *args)
        scene.fleet = fleet

    def watched(timer: PhaseTimer, *args: Any, on_change: Callable[[str], None], **kwargs: Any) -> None:
        def changed(name: str) -> None:
            scene.phase = name
            on_change(name)

        init(timer, *args, on_change=changed, **kwargs)

    log_step = Recorder.log_step

    def logged(rec: Recorder, step: int, *args: Any, **kwargs: Any) -> None:
        log_step(rec, step, *args, **kwargs)
        scene.step = step

    came_up = Session.came_up

    def welcomed(session: Session, info: HostInfo) -> None:
        came_up(session, info)
        scene.newcomers.append(info.pid)

    def play() -> None:
        try:
            plan(scene)
        except SystemExit:
            pass
        except BaseException as error:
            scene.errors.append(error)

    saboteur = threading.Thread(target=play, name="saboteur", daemon=True)
    began = time.monotonic()
    with ExitStack() as stack:
        own = (
            patch.object(Fleet, "start_rl", noticed),
            patch.object(PhaseTimer, "__init__", watched),
            patch.object(Recorder, "log_step", logged),
            patch.object(Session, "came_up", welcomed),
        )
        for each in (*own, *patches):
            stack.enter_context(each)
        saboteur.start()
        try:
            start(cfg)
        finally:
            scene.is_over = True
            saboteur.join(10.0)
    if scene.errors:
        raise scene.errors[0]
    return Outcome(scene.run, scene.blows, time.monotonic() - began)


def at_random(rng: random.Random, count: int, first_step: int, last_step: int) -> list[int]:
    """Steps at which something happens, spread evenly with some chance."""
    width = (last_step - first_step) / count
    return [round(first_step + (number + rng.random()) * width) for number in range(count)]
