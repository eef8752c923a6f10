"""The run folder: where everything of a run lies, and the promise that no run is ever overwritten.

    <run>/config.yaml                  resolved config; its presence says that the folder holds a run
          plugins/                     sources of the plugin files that the config names, and index.json with their hashes
          metrics.jsonl, tensorboard/  numbers of every step
          eval.jsonl                   held-out results
          store/                       every trajectory (see `record.store`)
          checkpoints/step-000010/     Hugging Face folders
          model/initial/, model/final/ Hugging Face folders
          curve.png, summary.json      what the end prints

Files are written whole (see `record.files`); a name that begins with a dot is a draft that a crash left behind.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drumroll.errors import RunFolderError
from drumroll.record.files import aside, write_json, write_text, write_yaml


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. `create` makes a new folder, `open` finds an existing one; both give absolute paths."""

    root: Path

    @classmethod
    def claim(cls, path: str | Path | None, name: str) -> RunFolder:
        """A new or empty folder (`runs/<name>-<time>` when `path` is None) that belongs to this run alone from now on."""
        return cls._fresh(name) if path is None else cls._claim(Path(path))

    @classmethod
    def create(cls, path: str | Path | None, name: str, config: Mapping[str, Any]) -> RunFolder:
        """Claim a folder and write the resolved config into it."""
        folder = cls.claim(path, name)
        folder.save_config(config)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The run in an existing folder."""
        folder = cls(Path(path).expanduser().absolute())
        if not folder.config_file.is_file():
            raise RunFolderError(
                f"'{path}' holds no run: it {folder._what_is_there()}. Give the folder that the run printed.{folder._nearby()}"
            )
        return folder

    def give_up(self) -> None:
        """Undo `claim`, unless a run has begun in the folder: then it stays as it is."""
        if not self.config_file.exists():
            shutil.rmtree(self.root)

    @property
    def config_file(self) -> Path:
        return self.root / "config.yaml"

    @property
    def plugins(self) -> Path:
        return self.root / "plugins"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def eval_file(self) -> Path:
        return self.root / "eval.jsonl"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def initial_model(self) -> Path:
        return self.root / "model" / "initial"

    @property
    def final_model(self) -> Path:
        return self.root / "model" / "final"

    @property
    def curve_file(self) -> Path:
        return self.root / "curve.png"

    @property
    def summary_file(self) -> Path:
        return self.root / "summary.json"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after a step. Write it with `files.aside`, so that it is there whole or not at all."""
        return self.root / "checkpoints" / f"step-{step:06d}"

    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints that exist, by step, oldest first."""
        found = {int(path.name[5:]): path for path in self.root.glob("checkpoints/step-*") if path.name[5:].isdigit()}
        return dict(sorted(found.items()))

    def save_config(self, config: Mapping[str, Any]) -> None:
        write_yaml(self.config_file, config)

    def config(self) -> dict[str, Any]:
        """The resolved config as plain values."""
        config: dict[str, Any] = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
        return config

    def model(self, step: int | None = None) -> Path:
        """The model of a checkpoint, or the final one; of a run that goes on or was cut short, the newest checkpoint."""
        known = self.checkpoints()
        if step is not None:
            if step not in known:
                there = ", ".join(map(str, known)) or "none"
                raise RunFolderError(
                    f"'{self.root}' has no checkpoint of step {step}. Steps with one: {there} (`record.checkpoint_every`)."
                )
            return known[step]
        if self.final_model.is_dir():
            return self.final_model
        if known:
            return list(known.values())[-1]
        raise RunFolderError(f"'{self.root}' has no model yet: the run has not ended, and `record.checkpoint_every` is not set.")

    def export(self, out: Path, step: int | None = None) -> Path:
        """Copy a model out of the run, whole or not at all; returns where it came from."""
        source = self.model(step)
        if out.exists():
            raise RunFolderError(f"'{out}' exists already, and nothing is overwritten. Choose another folder.")
        with aside(out) as draft:
            shutil.copytree(source, draft)
        return source

    def save_plugins(self, sources: Mapping[str, str]) -> None:
        """Keep the sources of plugin files (path as the config names it → text), each under a name that holds its hash."""
        index = {}
        for path, source in sources.items():
            digest = hashlib.sha256(source.encode()).hexdigest()
            copy = self.plugins / f"{Path(path).stem}-{digest[:12]}.py"
            write_text(copy, source)
            index[path] = {"file": copy.name, "sha256": digest}
        if index:
            write_json(self.plugins / "index.json", index)

    @classmethod
    def _fresh(cls, name: str) -> RunFolder:
        stem = re.sub(r"[^\w.-]+", "-", name) + time.strftime("-%Y%m%d-%H%M%S")
        for attempt in itertools.count(1):
            root = Path("runs") / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                root.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise RunFolderError(_cannot_make(root, error)) from error
            return cls._claim(root)
        raise AssertionError("itertools.count ended")

    @classmethod
    def _claim(cls, path: Path) -> RunFolder:
        folder = cls(path.expanduser().absolute())
        try:
            folder.root.mkdir(parents=True, exist_ok=True)
            is_ours = folder._is_empty() and folder._take()
        except FileExistsError:
            is_ours = False  # a file has that name
        except OSError as error:
            raise RunFolderError(_cannot_make(path, error)) from error
        if is_ours:
            return folder
        held = "already holds a run" if folder.store.exists() or folder.config_file.exists() else folder._what_is_there()
        raise RunFolderError(
            f"run_dir: '{path}' {held}, and nothing is overwritten. Choose a new or empty folder with `run_dir=PATH`, "
            f"leave `run_dir` out to get `runs/<name>-<time>`, or move the old one away."
        )

    def _is_empty(self) -> bool:
        return next(self.root.iterdir(), None) is None

    def _take(self) -> bool:
        """Atomic: of two runs that start at once in one folder, one gets it."""
        try:
            self.store.mkdir()
        except FileExistsError:
            return False
        return True

    def _what_is_there(self) -> str:
        if not self.root.exists():
            return "does not exist"
        if not self.root.is_dir():
            return "is a file"
        names = sorted(entry.name for entry in self.root.iterdir())
        return f"contains {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}" if names else "is empty"

    def _nearby(self) -> str:
        runs = sorted(self.root.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
        return f" The newest run in it is '{runs[-1].parent.name}'." if runs else ""


def _cannot_make(path: Path, error: OSError) -> str:
    return f"run_dir: '{path}' cannot be made: {error.strerror}. Choose another folder with `run_dir=PATH`."
