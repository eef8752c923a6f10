"""Supervised fine-tuning: a pipeline of its own, and the warm-up before RL."""

from __future__ import annotations

import time
from collections.abc import Callable

from drumroll.config.models import SftConfig
from drumroll.errors import DivergedError
from drumroll.pipelines.evaluate import Evaluator
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.job import SftJob
from drumroll.pipelines.keeper import Incarnation, Keeper, Progress, at_work
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
    with at_work(job, folder, life, progress) as (fleet, rec, keeper):

        def work() -> None:
            if not progress.begun:
                with keeper.turn():
                    rec.log_heldout(0, fleet.heldout_loss(), last=False)
                    fleet.begin(progress.phase)
                    progress.begun = True
            with rec.stage("imitating demonstrations", total=cfg.steps), rec.phase("update"):
                imitate(0, cfg.steps, fleet, rec, keeper)
            fleet.export(folder.final_model)
            rec.log_heldout(cfg.steps, fleet.heldout_loss(), last=True)

        keeper.see_through(work)


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
            fleet.begin(progress.phase, progress.planned)  # a learning rate that had decayed to nothing would make it no comparison
            progress.begun = True
    text = "comparing: the same compute as more supervised fine-tuning"
    with rec.stage(text, total=progress.planned), rec.phase("comparison"):
        imitate(cfg.steps, progress.planned, fleet, rec, keeper)
    evaluator.run_comparison(keeper)


def imitate(first: int, steps: int, fleet: Fleet, rec: Recorder, keeper: Keeper) -> None:
    """The phase's updates up to `steps`, on the demonstrations' endless order from its update `first` on."""

    def learn(update: int, count: int) -> None:
        rec.log_imitation(first + update, fleet.imitate(first + update, count))

    rec.stand_at(keeper.progress.step)
    repeat(learn, steps, rec, keeper, "demonstrations", "`warmup.lr`, `sft.lr`")


def repeat(learn: Callable[[int, int], None], steps: int, rec: Recorder, keeper: Keeper, rows: str, lr_keys: str) -> None:
    """Updates of the phase up to `steps`, by `learn(first, count)`, with checkpoints; some `count` at a time where they are quick.

    A run whose numbers are no longer finite ends: it would see the same `rows` again. `lr_keys` name what to lower."""
    progress, count = keeper.progress, 1
    while progress.step < steps:
        count = min(count, steps - progress.step)
        started = time.monotonic()
        with keeper.turn():
            learn(progress.step, count)
            progress.step += count
        if rec.num_nonfinite >= MAX_NONFINITE:
            raise DivergedError(
                f"the losses or gradients of {rec.num_nonfinite} updates in a row on {rows} were not finite. "
                f"Lower the learning rate ({lr_keys}) or look at the {rows}."
            )
        keeper.save_if_due()
        if time.monotonic() - started < CALL_S / 2:
            count = min(2 * count, MAX_UPDATES_PER_CALL)
