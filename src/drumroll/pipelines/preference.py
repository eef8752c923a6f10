"""Learning from preferences: DPO, IPO, KTO and SimPO train a policy, `reward_model` a model that scores."""

from __future__ import annotations

from drumroll.config.models import PreferenceConfig
from drumroll.pipelines.fleet import Fleet
from drumroll.pipelines.job import PreferenceJob
from drumroll.pipelines.keeper import Incarnation, Keeper, Progress, at_work
from drumroll.pipelines.sft import repeat
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import Recorder

SCORES = ("heldout_accuracy", "heldout_loss", "heldout_margin")
"""Figures of the held-out rows that a run ends with; the others are in eval.jsonl."""


def run(job: PreferenceJob, folder: RunFolder, life: Incarnation) -> None:
    """`preference.steps` updates; loss and accuracy on the held-out rows before, every `eval_every` updates, and after."""
    cfg = job.cfg.preference
    progress = Progress("preference")
    with at_work(job, folder, life, progress) as (fleet, rec, keeper):

        def work() -> None:
            if not progress.begun:
                with keeper.turn():
                    fleet.begin(progress.phase)
                    progress.begun = True
            evaluate_if_due(cfg, fleet, rec, keeper)
            with rec.stage("learning from preferences", total=cfg.steps), rec.phase("update"):
                rec.stand_at(progress.step)
                while progress.step < cfg.steps:
                    learn(_next_stop(progress.step, cfg), fleet, rec, keeper)
                    evaluate_if_due(cfg, fleet, rec, keeper)
            fleet.export(folder.final_model)

        keeper.see_through(work)


def learn(until: int, fleet: Fleet, rec: Recorder, keeper: Keeper) -> None:
    """Updates up to `until`."""

    def update(first: int, count: int) -> None:
        rec.log_preferences(first, fleet.prefer(first, count))

    repeat(update, until, rec, keeper, "preferences", "`preference.lr`")


def evaluate_if_due(cfg: PreferenceConfig, fleet: Fleet, rec: Recorder, keeper: Keeper) -> None:
    """Judge the held-out rows, where there are some, before the first update, after the last, and in between; each time once."""
    progress = keeper.progress
    is_due = progress.step in (0, cfg.steps) or (cfg.eval_every > 0 and progress.step % cfg.eval_every == 0)
    if cfg.heldout is None or not is_due or progress.evaluated >= progress.step:
        return
    with rec.phase("evaluate"):
        figures = fleet.heldout_preferences()
    with keeper.turn():
        scores = {name: figures[name] for name in SCORES if name in figures}
        rec.log_heldout(progress.step, scores, figures, last=progress.step == cfg.steps)
        progress.evaluated = progress.step


def _next_stop(step: int, cfg: PreferenceConfig) -> int:
    """The next update after which there is an evaluation."""
    return min(cfg.steps, (step // cfg.eval_every + 1) * cfg.eval_every) if cfg.eval_every else cfg.steps
