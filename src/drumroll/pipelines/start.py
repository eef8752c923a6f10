"""From a checked config to a finished run: prepare, make the run folder, run the pipeline. And from a cut-off run to a finished one.

An evaluation is a run without training: its folder has no checkpoints and no model, and is not resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from drumroll.config.load import apply_override, check_config, named_kinds
from drumroll.config.models import RunConfig
from drumroll.errors import ConfigError, RunFolderError
from drumroll.imports import importing
from drumroll.pipelines import preference, rl, sft
from drumroll.pipelines.evaluate import Evaluator
from drumroll.pipelines.fleet import launch
from drumroll.pipelines.job import Job, PreferenceJob, RlJob, prepare, prepare_evaluation
from drumroll.pipelines.keeper import Incarnation
from drumroll.record.checkpoint import CheckpointStore
from drumroll.record.files import write_json
from drumroll.record.folder import RunFolder
from drumroll.record.metrics import rewind
from drumroll.record.recorder import Recorder
from drumroll.registry import REGISTRY
from drumroll.types import Version


def start(cfg: RunConfig, folder: RunFolder | None = None) -> RunFolder:
    """Run to the end; returns the run's folder. Nothing is started or written before every check has passed."""
    with importing():
        job = prepare(cfg)
    folder = folder or RunFolder.claim(cfg.run_dir, cfg.name)
    with folder.lock(), checkpoint_store(cfg, folder) as checkpoints:
        folder.save_config(cfg.model_dump(mode="json"))
        folder.save_plugins(_plugin_sources(cfg))
        _run(job, folder, Incarnation(folder.begin_incarnation(resumed_from=""), checkpoints))
    return folder


def evaluate(cfg: RunConfig, folder: RunFolder | None = None) -> RunFolder:
    """Play the held-out tasks of a config of RL with its model, as it is; returns the evaluation's folder."""
    job = prepare_evaluation(cfg)
    folder = folder or RunFolder.claim(cfg.run_dir, f"{cfg.name}-eval")
    with folder.lock():
        folder.save_config(cfg.model_dump(mode="json"))
        folder.save_plugins(_plugin_sources(cfg))
        write_json(folder.evaluated_file, {"model": cfg.model.path or "from scratch"})
        with Recorder(cfg, folder) as rec, launch(job, folder, rec) as fleet:
            version = Version(folder.begin_incarnation(resumed_from=""), 0)
            fleet.push(version)
            rec.log_evaluation(0, Evaluator(job.cfg, job.heldout, fleet, rec).run("eval", 0, version), stage="evaluation")
    return folder


def with_model(cfg: RunConfig, model: str) -> RunConfig:
    """The config with another model, which is there already: a folder, a hub id, or a run, whose final model that is."""
    path = Path(model).expanduser()
    if (path / RunFolder(path).config_file.name).is_file():
        model = str(RunFolder.open(path).trained_model())
    tree = cfg.model_dump(mode="json")
    kept = {name: value for name, value in tree["model"].items() if name not in ("path", "revision", "scratch")}
    return check_config({**tree, "model": {**kept, "path": model}})


def config_of(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a finished run, with its final model, and what `overrides` change in it."""
    folder = RunFolder.open(path)
    tree = with_model(check_config(folder.config()), str(folder.root)).model_dump(mode="json")
    for override in overrides:
        apply_override(tree, override)
    return check_config(tree)


def resume(path: str | Path, overrides: Sequence[str] = (), changed_files: Collection[str] = ()) -> RunFolder:
    """Go on with a run from its newest good checkpoint, to the end.

    The run's own config holds. What has changed in it since the checkpoint is refused unless `overrides` names it
    (`trainer.lr=1e-4`); a plugin file that has changed, unless `changed_files` names it."""
    folder = RunFolder.open(path)
    say = Console(stderr=True, soft_wrap=True, highlight=False).print
    if folder.evaluated_file.exists():
        raise RunFolderError(f"'{folder.root}' holds an evaluation, which has no state to go on from. Evaluate again: drumroll eval")
    with folder.lock():
        if folder.summary_file.exists():
            say(f"{folder.root} is finished: there is nothing left to do.")
            return folder
        tree = folder.config()
        for override in overrides:
            apply_override(tree, override)
        cfg = check_config({**tree, "run_dir": str(folder.root)})
        _refuse_changed_plugins(folder, cfg, changed_files)
        with checkpoint_store(cfg, folder) as checkpoints:
            found = checkpoints.newest_good()
            origin, skipped = found if found is not None else (None, [])
            for damaged in skipped:
                say(f"[yellow]skipped[/] {damaged.name}: {damaged.reason}")
                folder.incident("damaged checkpoint", name=damaged.name, reason=damaged.reason)
            if origin is not None:
                _refuse_changes(origin.state["config"], cfg.model_dump(mode="json"), {text.partition("=")[0] for text in overrides})
            with importing():
                job = prepare(cfg)
            folder.save_config(cfg.model_dump(mode="json"))
            folder.save_plugins(_plugin_sources(cfg))
            name = origin.name if origin is not None else ""
            say(f"going on from {name}" if name else "the run ended before its first checkpoint and begins again from its start")
            rewind(folder, origin.state["parts"]["recorder"]["sizes"] if origin is not None else {})
            _run(job, folder, Incarnation(folder.begin_incarnation(name), checkpoints, origin))
    return folder


def checkpoint_store(cfg: RunConfig, folder: RunFolder) -> CheckpointStore:
    """The checkpoints of a run, where and as its config says."""
    options = cfg.checkpoint
    root = options.root or folder.root / "checkpoints"
    return CheckpointStore(root, keep_last=options.keep_last, keep_best=options.keep_best)


def _run(job: Job, folder: RunFolder, life: Incarnation) -> None:
    if isinstance(job, RlJob):
        rl.run(job, folder, life)
    elif isinstance(job, PreferenceJob):
        preference.run(job, folder, life)
    else:
        sft.run(job, folder, life)


def _plugin_sources(cfg: RunConfig) -> dict[str, str]:
    return REGISTRY.sources([*cfg.plugins, *named_kinds(cfg.model_dump())])


def _refuse_changed_plugins(folder: RunFolder, cfg: RunConfig, accepted: Collection[str]) -> None:
    index = folder.plugins / "index.json"
    known = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
    changed = [
        path
        for path, source in _plugin_sources(cfg).items()
        if path in known and known[path]["sha256"] != hashlib.sha256(source.encode()).hexdigest() and path not in accepted
    ]
    if changed:
        named = " ".join(f"--changed {path}" for path in changed)
        raise ConfigError(
            f"{', '.join(changed)}: not what the run was begun with, which is kept in '{folder.plugins}'. "
            f"Put it back, or accept the change by name: {named}"
        )


def _refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Raise for every difference that was not asked for by its name or by the name of its section."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key) and key != "run_dir")
    refused = [key for key in changed if not any(key == name or key.startswith(f"{name}.") for name in accepted)]
    if refused:
        lines = [f"  {key}: {json.dumps(old.get(key))} → {json.dumps(new.get(key))}" for key in refused]
        named = " ".join(f"{key}={json.dumps(new.get(key))}" for key in refused)
        raise ConfigError(
            "the run's config.yaml is not the one that its checkpoint was written with:\n" + "\n".join(lines) + "\n"
            f"Put the old values back, or accept the new ones by name: drumroll resume RUN {named}"
        )


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a config by its dotted key."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}{key}.")
    elif isinstance(tree, list) and tree:
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{prefix}{place}.")
    else:
        yield prefix.removesuffix("."), tree
