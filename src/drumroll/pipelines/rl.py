"""The RL loop: roll out, score, learn, hand the new weights over."""

from __future__ import annotations

from collections.abc import Callable

from drumroll.algo.algorithm import carried_by
from drumroll.config.models import ANY, RlConfig
from drumroll.data.curriculum import Curriculum
from drumroll.data.cursor import TaskCursor
from drumroll.pipelines.evaluate import Evaluator
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.job import RlJob
from drumroll.pipelines.keeper import Incarnation, Keeper, Progress, at_work
from drumroll.pipelines.sft import compare, warm_up
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import MAX_NONFINITE, Recorder
from drumroll.registry import REGISTRY
from drumroll.rollout.source import Mixture, Source, TaskSource
from drumroll.types import sample_seed


def run(job: RlJob, folder: RunFolder, life: Incarnation) -> None:
    """Warm up, train for `max_steps`, compare: each phase from where the run stands."""
    cfg = job.cfg
    progress = Progress("warmup" if cfg.warmup else "rl")
    source = training_source(job, attempt=lambda: progress.rollbacks)
    with at_work(job, folder, life, progress, source=source) as (fleet, rec, keeper):
        evaluator = Evaluator(cfg, job.heldout, fleet, rec)

        def work() -> None:
            if progress.phase == "warmup":
                assert cfg.warmup is not None
                warm_up(cfg.warmup, fleet, rec, keeper)
            if progress.phase == "rl":
                reinforce(cfg, source, folder, fleet, rec, keeper, evaluator)
            if progress.phase == "comparison":
                assert cfg.warmup is not None
                compare(cfg.warmup, fleet, rec, keeper, evaluator)

        keeper.see_through(work)


def training_source(job: RlJob, attempt: Callable[[], int]) -> TaskSource | Mixture:
    """Where training tasks come from: one domain's, or all domains' by their shares."""
    sources: dict[str, TaskSource] = {}
    has_greedy = "greedy" in REGISTRY.lookup("advantage", job.cfg.algo.advantage.kind).needs
    for name, domain in job.cfg.mixture.items():
        if domain.share == 0:
            continue
        seed = job.cfg.seed if name == ANY else sample_seed(job.cfg.seed, "domain", name)
        cursor = TaskCursor(job.tasks[name], seed)
        sources[name] = TaskSource(
            Curriculum(cursor, domain.curriculum) if domain.curriculum else cursor,
            groups_per_round=max(1, round(domain.share * job.cfg.rollout.groups_per_step)),
            group_size=job.cfg.rollout.group_size,
            sampling=domain.sampling,
            label="train" if name == ANY else f"train/{name}",
            attempt=attempt,
            has_greedy=has_greedy,
        )
    if ANY in sources:
        return sources[ANY]
    return Mixture(sources, {name: domain.share for name, domain in job.cfg.mixture.items()})


def reinforce(cfg: RlConfig, source: Source, folder: RunFolder, fleet: Fleet, rec: Recorder, keeper: Keeper, evaluator: Evaluator) -> None:
    """Steps until `max_steps`, with an evaluation before the first, after the last, and in between."""
    progress = keeper.progress
    is_resumed = progress.begun
    if not is_resumed:
        with keeper.turn():
            fleet.begin("rl")
            fleet.keep_reference(cfg)
            progress.begun = True
    fleet.start_reference(cfg)
    if is_resumed:
        fleet.reschedule("rl")  # of a critic that has only just been started
    else:
        keeper.save()  # what a run that diverges early goes back to
    fleet.push(keeper.version(progress.step))
    evaluator.run_if_due(keeper)
    fleet.open_training(cfg, source)

    while progress.step < cfg.max_steps:
        take_step(cfg, fleet, rec, keeper)
        if rec.num_nonfinite >= MAX_NONFINITE:
            fleet.close_training(progress.step)
            keeper.roll_back(f"the losses or gradients of {rec.num_nonfinite} updates in a row were not finite")
            fleet.push(keeper.version(progress.step))
            fleet.open_training(cfg, source)
        evaluator.run_if_due(keeper)
        keeper.save_if_due()
    fleet.close_training(progress.step)
    fleet.export(folder.final_model)
    fleet.export_critic(folder.critic_model)
    if cfg.warmup and cfg.warmup.compare:
        with keeper.turn():
            progress.enter("comparison", planned=rec.compute.equal_sft_updates)
        keeper.save_if_due()


def take_step(cfg: RlConfig, fleet: Fleet, rec: Recorder, keeper: Keeper) -> None:
    """One step waits for enough groups that are fresh enough, then for its updates."""
    step = keeper.progress.step + 1
    with rec.phase("rollout"):  # never staler than `rollout.max_staleness`
        rollout = fleet.take_groups(cfg, keeper.version(step - 1))
    with rec.phase("score"):  # packing, log-probabilities, values, advantages
        batch = fleet.assemble(step, rollout, keeper.progress.carried)
    with keeper.turn():
        with rec.phase("update"):
            updates, of_critic = fleet.train(batch)
        with rec.phase("sync"):
            sync = fleet.push(keeper.version(step))
        fleet.record("train", step, rollout)
        rec.note_quarantined(rollout.quarantined)
        fleet.record_spans(rec.take_spans(step))
        report = {**rollout.report, **batch.report, **sync.metrics, **fleet.take_peaks()}
        rec.log_step(step, rollout.samples, report, updates, sync.digest, critic=of_critic)
        keeper.progress.step, keeper.progress.carried = step, carried_by(batch.report)
