"""From a checked config to a finished run: prepare, make the run folder, run the pipeline."""

from __future__ import annotations

from drumroll.config.load import named_kinds
from drumroll.config.models import RunConfig
from drumroll.pipelines import rl, sft
from drumroll.pipelines.job import RlJob, prepare
from drumroll.record.folder import RunFolder
from drumroll.registry import REGISTRY


def start(cfg: RunConfig, folder: RunFolder | None = None) -> RunFolder:
    """Run to the end; returns the run's folder. Nothing is started or written before every check has passed."""
    job = prepare(cfg)
    folder = folder or RunFolder.claim(cfg.run_dir, cfg.name)
    folder.save_config(cfg.model_dump(mode="json"))
    folder.save_plugins(REGISTRY.sources([*cfg.plugins, *named_kinds(cfg.model_dump())]))
    if isinstance(job, RlJob):
        rl.run(job, folder)
    else:
        sft.run(job, folder)
    return folder
