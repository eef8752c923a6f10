"""Evaluation on held-out tasks: sampled at the training temperature, and greedy."""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.config.models import RlConfig
from drumroll.pipelines.fleet import Fleet
from drumroll.record.recorder import Recorder
from drumroll.rollout.scheduler import GroupRequest
from drumroll.types import SampleInfo, Task


class Evaluator:
    """Runs the same held-out tasks with the same seeds each time, so that two evaluations differ only by the weights."""

    def __init__(self, cfg: RlConfig, tasks: Sequence[Task], fleet: Fleet, rec: Recorder) -> None:
        self._cfg = cfg
        self._tasks = tasks[: cfg.eval.num_tasks]
        self._fleet = fleet
        self._rec = rec

    def run(self, step: int, *, comparison: bool = False) -> None:
        """Evaluate the engines' current weights; without held-out tasks nothing happens."""
        if not self._tasks:
            return
        label = "comparison" if comparison else "eval"
        with self._rec.stage(f"evaluating on {len(self._tasks)} held-out tasks"), self._rec.phase("evaluate"):
            sampled = self._mode(label, step, "sampled")
            greedy = self._mode(label, step, "greedy")
        self._rec.log_evaluation(step, {"sampled": sampled, "greedy": greedy}, comparison=comparison)

    def _mode(self, label: str, step: int, mode: str) -> list[SampleInfo]:
        sampling = self._cfg.rollout.sampling.resolve(**({"temperature": 0.0} if mode == "greedy" else {}))
        size = self._cfg.eval.samples_per_task if mode == "sampled" else 1
        requests = [
            GroupRequest(f"{label}/{step:06d}/{mode}/{place:05d}", task, size, ("eval", mode)) for place, task in enumerate(self._tasks)
        ]
        rollout = self._fleet.roll_out(requests, sampling)
        self._fleet.record(label, step, rollout)
        return rollout.samples
