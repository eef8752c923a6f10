"""Supervised fine-tuning: a pipeline of its own, and the warm-up before RL."""

from __future__ import annotations

import time

from drumroll.config.models import SftConfig
from drumroll.errors import DivergedError
from drumroll.pipelines.evaluate import Evaluator
from drumroll.pipelines.fleet import Fleet, launch
from drumroll.pipelines.job import SftJob
from drumroll.pipelines.keeper import Incarnation, Keeper, Progress
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import MAX_NONFINITE, Recorder

WARM = "warm"
"""Name of the checkpoint of a warmed-up run, before RL."""

MAX_UPDATES_PER_CALL = 20
CALL_S = 1.0
"""Updates between two looks of the controller: as many as take about this long."""


def run(job: SftJob, folder: RunFolder, life: Incarnation) -> None:
    """Imitate demonstrations for `sft.steps` updates; report the held-out loss before and after."""
    cfg = job.cfg.sft
    progress = Progress("sft")
    with (
        Recorder(job.cfg, folder) as rec,
        launch(job, folder, rec) as fleet,
        Keeper(job.cfg, folder, life, fleet, rec, progress, {}) as keeper,
    ):
        if not progress.begun:
            with keeper.turn():
                rec.log_heldout_loss(0, fleet.heldout_loss(), last=False)
                fleet.begin(progress.phase)
                progress.begun = True
        with rec.stage("imitating demonstrations", total=cfg.steps), rec.phase("update"):
            imitate(0, cfg.steps, fleet, rec, keeper)
        fleet.export(folder.final_model)
        rec.log_heldout_loss(cfg.steps, fleet.heldout_loss(), last=True)


def warm_up(cfg: SftConfig, fleet: Fleet, rec: Recorder, keeper: Keeper) -> None:
    """Fine-tune the trainers before RL, and keep where that led."""
    progress = keeper.progress
    if not progress.begun:
        with keeper.turn():
            fleet.begin(progress.phase)
            progress.begun = True
    with rec.stage("warming up on demonstrations", total=cfg.steps), rec.phase("warmup"):
        imitate(0, cfg.steps, fleet, rec, keeper)
    keeper.save(WARM, pinned=True)
    with keeper.turn():
        progress.enter("rl")


def compare(cfg: SftConfig, fleet: Fleet, rec: Recorder, keeper: Keeper, evaluator: Evaluator) -> None:
    """Go back to the warmed-up weights, spend on more of the same demonstrations what RL has spent, and evaluate."""
    progress = keeper.progress
    if not progress.begun:
        with keeper.turn():
            keeper.load_trainers(WARM)
            progress.begun = True
    text = "comparing: the same compute as more supervised fine-tuning"
    with rec.stage(text, total=progress.planned), rec.phase("comparison"):
        imitate(cfg.steps, progress.planned, fleet, rec, keeper)
    evaluator.run_comparison(keeper)


def imitate(first: int, steps: int, fleet: Fleet, rec: Recorder, keeper: Keeper) -> None:
    """The phase's updates up to `steps`, on the demonstrations' endless order from its update `first` on."""
    progress, count = keeper.progress, 1
    rec.stand_at(progress.step)
    while progress.step < steps:
        count = min(count, steps - progress.step)
        started = time.monotonic()
        with keeper.turn():
            rec.log_imitation(first + progress.step, fleet.imitate(first + progress.step, count))
            progress.step += count
        if rec.num_nonfinite >= MAX_NONFINITE:
            raise DivergedError(
                f"the losses or gradients of {rec.num_nonfinite} updates in a row on demonstrations were not finite. "
                f"Lower the learning rate (`warmup.lr`, `sft.lr`) or look at the demonstrations."
            )
        keeper.save_if_due()
        if time.monotonic() - started < CALL_S / 2:
            count = min(2 * count, MAX_UPDATES_PER_CALL)
