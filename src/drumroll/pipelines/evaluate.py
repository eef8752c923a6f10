"""Evaluation on held-out tasks: sampled at the training temperature, and greedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drumroll.config.models import RlConfig
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.keeper import Keeper
from drumroll.record.recorder import Recorder
from drumroll.rollout.source import GroupRequest
from drumroll.types import SampleInfo, Task, Version


class Evaluator:
    """Runs the same held-out tasks with the same seeds each time, so that two evaluations differ only by the weights."""

    def __init__(self, cfg: RlConfig, tasks: Mapping[str, Sequence[Task]], fleet: Fleet, rec: Recorder) -> None:
        """`tasks` by domain."""
        self._cfg = cfg
        self._tasks = [(task, cfg.mixture[name].sampling) for name, of_domain in tasks.items() for task in of_domain[: cfg.eval.num_tasks]]
        self._fleet = fleet
        self._rec = rec

    def run_if_due(self, keeper: Keeper) -> None:
        """Evaluate the engines' current weights before the first step, after the last, and every `eval.every` in between; once."""
        step, every = keeper.progress.step, self._cfg.eval.every
        is_due = step in (0, self._cfg.max_steps) or (every > 0 and step % every == 0)
        if not self._tasks or not is_due or keeper.progress.evaluated >= step:
            return
        results = self.run("eval", step, keeper.version(step))
        with keeper.turn():
            self._rec.log_evaluation(step, results)
            keeper.progress.evaluated = step

    def run_comparison(self, keeper: Keeper) -> None:
        """Hand the trainers' weights over, as one step more than RL has made, and evaluate them."""
        step = self._cfg.max_steps
        version = keeper.version(step + 1)
        self._fleet.push(version)
        self._rec.log_evaluation(step, self.run("comparison", step, version), stage="comparison")

    def run(self, label: str, step: int, version: Version) -> Mapping[str, Sequence[SampleInfo]]:
        """Samples by mode, of weights that the engines have."""
        with self._rec.stage(f"evaluating on {len(self._tasks)} held-out tasks"), self._rec.phase("evaluate"):
            return {mode: self._mode(label, step, version, mode) for mode in ("sampled", "greedy")}

    def _mode(self, label: str, step: int, version: Version, mode: str) -> list[SampleInfo]:
        size = self._cfg.eval.samples_per_task if mode == "sampled" else 1
        requests = [
            GroupRequest(
                group_id=f"{label}/{step:06d}/{mode}/{place:05d}",
                task=task,
                size=size,
                seed_parts=("eval", mode),
                sampling=replace(sampling, temperature=0.0) if mode == "greedy" else sampling,
            )
            for place, (task, sampling) in enumerate(self._tasks)
        ]
        rollout = self._fleet.roll_out(requests, version)
        self._fleet.record(label, step, rollout)
        self._rec.note_quarantined(rollout.quarantined)
        return rollout.samples
