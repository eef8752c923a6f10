"""The RL loop: roll out, score, learn, hand the new weights over."""

from __future__ import annotations

from drumroll.pipelines.evaluate import Evaluator
from drumroll.pipelines.fleet import launch
from drumroll.pipelines.job import RlJob
from drumroll.pipelines.sft import continue_warm_up, warm_up
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import Recorder
from drumroll.rollout.scheduler import GroupRequest
from drumroll.types import Version


def run(job: RlJob, folder: RunFolder) -> None:
    """Warm up, evaluate, train for `max_steps`, evaluate again. One step waits for its slowest sample, then for its updates."""
    cfg = job.cfg
    with Recorder(cfg, folder) as rec, launch(job, folder, rec) as fleet:
        evaluator = Evaluator(cfg, job.heldout, fleet, rec)
        if cfg.warmup:
            warm_up(cfg.warmup, fleet, rec)
        fleet.begin_rl(cfg)
        fleet.push(Version(0, 0))
        evaluator.run(step=0)

        for step in range(1, cfg.max_steps + 1):
            with rec.phase("rollout"):
                rollout = fleet.roll_out(next_groups(job, step), cfg.rollout.sampling.resolve())
            with rec.phase("score"):  # packing, reference log-probabilities, advantages
                batch = fleet.assemble(step, rollout)
            with rec.phase("update"):
                updates = fleet.train(batch)
            with rec.phase("sync"):
                sync = fleet.push(Version(0, step))
            fleet.record("train", step, rollout)
            rec.log_step(step, rollout.samples, {**rollout.report, **batch.report}, updates, sync)
            if cfg.eval.every and step % cfg.eval.every == 0 and step < cfg.max_steps:
                evaluator.run(step)
            if cfg.record.checkpoint_every and step % cfg.record.checkpoint_every == 0:
                fleet.export(folder.checkpoint(step))

        evaluator.run(cfg.max_steps)
        fleet.export(folder.final_model)
        if cfg.warmup and cfg.warmup.compare:
            continue_warm_up(cfg.warmup, fleet, rec)
            evaluator.run(cfg.max_steps, comparison=True)


def next_groups(job: RlJob, step: int) -> list[GroupRequest]:
    """The tasks of one step, each to be attempted `group_size` times."""
    rollout = job.cfg.rollout
    tasks = job.cursor.take(rollout.groups_per_step)
    ids = [f"train/{step:06d}/{place:04d}" for place in range(len(tasks))]
    return [GroupRequest(group_id, task, rollout.group_size, (group_id,)) for group_id, task in zip(ids, tasks, strict=True)]
