"""Supervised fine-tuning: a pipeline of its own, and the warm-up before RL."""

from __future__ import annotations

import math

from drumroll.config.models import SftConfig
from drumroll.pipelines.fleet import Fleet, launch
from drumroll.pipelines.job import SftJob
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import Recorder
from drumroll.types import Version

UPDATES_PER_CALL = 20
"""Updates that the trainers make between two looks of the controller."""


def run(job: SftJob, folder: RunFolder) -> None:
    """Imitate demonstrations for `sft.steps` updates; report the held-out loss before and after."""
    with Recorder(job.cfg, folder) as rec, launch(job, folder, rec) as fleet:
        steps = job.cfg.sft.steps
        rec.log_heldout_loss(0, fleet.heldout_loss(), last=False)
        fleet.begin_sft(job.cfg.sft)
        with rec.stage("imitating demonstrations", total=steps), rec.phase("update"):
            imitate(0, steps, fleet, rec)
        rec.log_heldout_loss(steps, fleet.heldout_loss(), last=True)
        fleet.export(folder.final_model)


def warm_up(cfg: SftConfig, fleet: Fleet, rec: Recorder) -> None:
    """Fine-tune the trainers before RL, and remember where that led."""
    fleet.begin_sft(cfg)
    with rec.stage("warming up on demonstrations", total=cfg.steps), rec.phase("warmup"):
        imitate(0, cfg.steps, fleet, rec)
    fleet.remember("warm")


def continue_warm_up(cfg: SftConfig, fleet: Fleet, rec: Recorder) -> None:
    """Go back to the warmed-up weights and spend on more of the same demonstrations what RL has spent."""
    fleet.recall("warm")
    steps = math.ceil(rec.compute.rl_tokens / max(1.0, rec.compute.sft_tokens_per_update))
    with rec.stage("comparing: the same compute as more supervised fine-tuning", total=steps), rec.phase("comparison"):
        imitate(cfg.steps, steps, fleet, rec)
    fleet.push(Version(1, 0))


def imitate(first: int, steps: int, fleet: Fleet, rec: Recorder) -> None:
    """Updates `first` to `first + steps` of the demonstrations' endless order."""
    for start in range(first, first + steps, UPDATES_PER_CALL):
        count = min(UPDATES_PER_CALL, first + steps - start)
        rec.log_imitation(start, fleet.imitate(start, count))
