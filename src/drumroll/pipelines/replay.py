"""Train steps of a finished or cut-off run again, from their stored trajectories and without engines, and compare.

checkpoint before the step ──► trainers ◄── assembler ◄── trajectory store
                                  └── metrics and weights, beside what metrics.jsonl says of the step
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from drumroll.algo.algorithm import Carried, carried_by
from drumroll.cluster.session import Session
from drumroll.cluster.supervision import Supervisor
from drumroll.config.load import check_config
from drumroll.config.models import RlConfig
from drumroll.errors import CheckpointError, RunFolderError, UserError
from drumroll.models.prepare import prepare_model
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.job import roles_of
from drumroll.pipelines.sft import WARM
from drumroll.pipelines.start import checkpoint_store
from drumroll.plan import make_plan
from drumroll.record.checkpoint import Checkpoint, CheckpointStore
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import mean_of_updates
from drumroll.record.store import Bounds, Filter, Reader
from drumroll.rollout.stream import Rollout
from drumroll.types import Group, SampleInfo, Trajectory

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Replayed:
    """One step as it was recorded and as it came out again."""

    step: int
    recorded: Mapping[str, Any]
    again: Mapping[str, Any]
    same_weights: bool
    """Bit for bit."""

    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Metrics of the training that came out differently, recorded and again."""
        return {name: (self.recorded.get(name), value) for name, value in self.again.items() if not _same(self.recorded.get(name), value)}


def replay(path: str | Path, step: int) -> list[Replayed]:
    """Train again from the newest good checkpoint before `step` up to `step`; one result for each step."""
    folder = RunFolder.open(path)
    cfg = check_config({**folder.config(), "run_dir": str(folder.root)})
    if not isinstance(cfg, RlConfig):
        raise UserError(f"'{path}' is a run of supervised fine-tuning; only steps of RL can be replayed.")
    recorded = {line["step"]: line for line in read_lines(folder.metrics_file) if "weights" in line}
    if step not in recorded:
        raise RunFolderError(f"'{path}' has no step {step}: its steps of RL go up to {max(recorded, default=0)}.")
    with checkpoint_store(cfg, folder) as checkpoints, Reader(folder.store) as reader, _fleet(cfg, folder) as fleet:
        origin, first = _before(checkpoints, step)
        fleet.load(origin.path)
        if origin.name == WARM:
            fleet.begin("rl")
        fleet.start_reference(cfg)
        carried = {number: carried_by(recorded.get(number - 1, {})) for number in range(first + 1, step + 1)}
        return [_again(number, recorded[number], carried[number], fleet, reader) for number in carried]


def _before(checkpoints: CheckpointStore, step: int) -> tuple[Checkpoint, int]:
    """The checkpoint to begin with, and its step."""
    known = {int(match[1]): name for name in checkpoints.names() if (match := _STEP.fullmatch(name))}
    if WARM in checkpoints.names():
        known.setdefault(0, WARM)
    problems = []
    for number in sorted((number for number in known if number < step), reverse=True):
        try:
            return checkpoints.load(known[number]), number
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(f"no checkpoint of a step before {step} can be used to begin with. " + " ".join(problems))


def _again(step: int, recorded: Mapping[str, Any], carried: Carried, fleet: Fleet, reader: Reader) -> Replayed:
    rows = reader.query(Filter(phase="train", step=Bounds.at(step), state="consumed"))
    block = [reader.load(row.sample_id) for row in rows]
    rollout = Rollout(tuple(_groups(step, block, reader)), (block,))
    batch = fleet.assemble(step, rollout, carried)
    policy, critic = fleet.train(batch)
    again = {**batch.report, **mean_of_updates(policy), **mean_of_updates(critic, "critic")}
    return Replayed(step, recorded, again, same_weights=fleet.digest() == recorded["weights"])


def _groups(step: int, block: Sequence[Trajectory], reader: Reader) -> Iterator[Group]:
    """The step's groups, with the rewards of members that an earlier step has trained on."""
    members: dict[str, list[SampleInfo]] = {}
    for trajectory in block:
        members.setdefault(trajectory.group_id, []).append(SampleInfo.of(trajectory))
    for name, infos in members.items():
        earlier = reader.query(Filter(phase="train", group_id=name, state="consumed", step=Bounds(high=step, high_is_open=True)))
        yield Group(name, tuple(infos), tuple(row.reward for row in earlier if row.reward is not None))


@contextmanager
def _fleet(cfg: RlConfig, folder: RunFolder) -> Iterator[Fleet]:
    say = Console(stderr=True, soft_wrap=True, highlight=False).print
    with Session(cfg.ray) as session, Supervisor(cfg.supervision, lambda kind, text: say(text)) as supervisor:
        plan = make_plan(cfg, session.pool(), roles_of(cfg))
        fleet = Fleet(cfg, session, supervisor, plan, folder, prepare_model(cfg.model, folder.initial_model, cfg.seed))
        fleet.start_replay(cfg)
        yield fleet


def _same(recorded: Any, again: float) -> bool:
    if isinstance(recorded, float) and math.isnan(again):
        return math.isnan(recorded)
    return bool(recorded == again)
