"""The run folder: where everything of a run lies, and the promise that no run is ever overwritten.

    <run>/config.yaml                  resolved config; its presence says that the folder holds a run
          plugins/                     sources of the plugin files that the config names, and index.json with their hashes
          metrics.jsonl, tensorboard/  numbers of every step
          eval.jsonl                   held-out results
          store/                       every trajectory (see `record.store`)
          checkpoints/                 the run's state at several moments (see `record.checkpoint`), unless `checkpoint.root` is set
          model/initial/, model/final/ Hugging Face folders; model/critic/ of the critic at the end, where there is one
          incarnations.jsonl           a line per process that worked on the run: number, time, what it went on from
          incidents.jsonl              what went wrong and did not stop the run: workers that were lost, updates that were skipped, ...
          workers.jsonl                which process does whose work
          metrics.superseded.jsonl,    lines that were cut off when the run was taken back to a checkpoint
          eval.superseded.jsonl
          wandb_id                     the run's name at Weights & Biases
          curve.png, summary.json      what the end prints
          evaluated.json               which model it was, in the folder of an evaluation
          .lock                        held, with its process id, by the process that works on the run

Files are written whole (see `record.files`); any other name that begins with a dot is a draft that a crash left behind.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drumroll.config.models import ModelConfig
from drumroll.errors import RunFolderError
from drumroll.models.prepare import prepare_model
from drumroll.record.checkpoint import Checkpoint, CheckpointStore
from drumroll.record.files import JsonLines, aside, read_lines, take_lock, write_json, write_text, write_yaml

_STEP = re.compile(r"(?:step|sft|preference)-(\d+)")
"""Checkpoints that can be asked for by step: after a step of RL, or after an update of a run of supervised fine-tuning."""


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
        if self.root.exists() and not self.config_file.exists():
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
    def reference_model(self) -> Path:
        """What reference and critic start from after a warm-up."""
        return self.root / "model" / "reference"

    @property
    def critic_model(self) -> Path:
        return self.root / "model" / "critic"

    @property
    def final_model(self) -> Path:
        return self.root / "model" / "final"

    @property
    def curve_file(self) -> Path:
        return self.root / "curve.png"

    @property
    def summary_file(self) -> Path:
        return self.root / "summary.json"

    @property
    def evaluated_file(self) -> Path:
        return self.root / "evaluated.json"

    @property
    def incarnations_file(self) -> Path:
        return self.root / "incarnations.jsonl"

    @property
    def incidents_file(self) -> Path:
        return self.root / "incidents.jsonl"

    @property
    def workers_file(self) -> Path:
        return self.root / "workers.jsonl"

    @property
    def wandb_id_file(self) -> Path:
        return self.root / "wandb_id"

    @property
    def lock_file(self) -> Path:
        return self.root / ".lock"

    @property
    def checkpoint_root(self) -> str:
        """Where the run's checkpoints are: a folder or an fsspec URL."""
        section = self.config().get("checkpoint") or {}
        return str(section.get("root") or self.root / "checkpoints")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one process that works on the run, until the block ends or the process does. Other programs that it starts
        have no part in that."""
        handle = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not take_lock(handle):
                holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "not known"
                raise RunFolderError(
                    f"another process (pid {holder}) is working on this run, '{self.root}'. Wait for it, or stop it first: "
                    f"two at once would spoil each other's files."
                )
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(handle)

    def begin_incarnation(self, resumed_from: str) -> int:
        """Note that a process begins to work on the run, from that checkpoint or (`""`) from nothing. Returns its number: 0, 1, ..."""
        known = read_lines(self.incarnations_file)
        number = int(known[-1]["number"]) + 1 if known else 0
        with JsonLines(self.incarnations_file) as lines:
            lines.append({"number": number, "time": time.time(), "resumed_from": resumed_from})
            lines.sync()
        return number

    def trained_model(self) -> Path:
        """The final model, which a run has that has come to its end."""
        if not self.final_model.is_dir():
            raise RunFolderError(
                f"'{self.root}' has no final model: the run has not come to its end. Write one of its checkpoints as a folder, and give "
                f"that: drumroll export {self.root} FOLDER"
            )
        return self.final_model

    def register_worker(self, role: str, rank: int, node: str, pid: int) -> None:
        """Note which process does whose work; of several lines for one rank the last one holds."""
        with JsonLines(self.workers_file) as lines:
            lines.append({"time": time.time(), "role": role, "rank": rank, "node": node, "pid": pid})

    def incident(self, kind: str, **facts: Any) -> None:
        """Note something that went wrong and did not stop the run: `incident("update_skipped", step=3, reason="loss is nan")`."""
        with JsonLines(self.incidents_file) as lines:
            lines.append({"time": time.time(), "kind": kind, **facts})

    def save_config(self, config: Mapping[str, Any]) -> None:
        write_yaml(self.config_file, config)

    def config(self) -> dict[str, Any]:
        """The resolved config as plain values."""
        config: dict[str, Any] = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
        return config

    def export(self, out: Path, step: int | None = None) -> str:
        """Write a model of the run to a new Hugging Face folder, whole or not at all; returns where it came from.

        That is the checkpoint of `step`; without one the final model, or the newest checkpoint where there is none yet."""
        if out.exists():
            raise RunFolderError(f"'{out}' exists already, and nothing is overwritten. Choose another folder.")
        if step is None and self.final_model.is_dir():
            with aside(out) as draft:
                shutil.copytree(self.final_model, draft)
            return str(self.final_model)
        with CheckpointStore(self.checkpoint_root) as store:
            checkpoint = self._newest(store) if step is None else store.load(self._checkpoint_name(store, step))
            from drumroll.backends.train.shards import export_folder  # torch takes seconds to import

            export_folder(checkpoint.path / "trainer", self.model_folder(), out)
        return f"{self.checkpoint_root}/{checkpoint.name}"

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

    def _newest(self, store: CheckpointStore) -> Checkpoint:
        found = store.newest_good()
        if found is None:
            raise RunFolderError(f"'{self.root}' has no model yet: the run has not ended, and it has not written a checkpoint.")
        checkpoint, skipped = found
        for damaged in skipped:
            warnings.warn(f"{damaged.name} was skipped: {damaged.reason}", stacklevel=3)
        return checkpoint

    def _checkpoint_name(self, store: CheckpointStore, step: int) -> str:
        names = {int(match[1]): name for name in store.names() if (match := _STEP.fullmatch(name))}
        if step not in names:
            there = ", ".join(map(str, sorted(names))) or "none"
            raise RunFolderError(f"'{self.root}' has no checkpoint of step {step}. Steps with one: {there} (`checkpoint.every`).")
        return names[step]

    def model_folder(self) -> Path:
        """The model that the run began with: its config and tokenizer are those of every model that the run makes."""
        if self.initial_model.is_dir():
            return self.initial_model
        config = self.config()
        return prepare_model(ModelConfig.model_validate(config["model"]), self.initial_model, config["seed"])

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
