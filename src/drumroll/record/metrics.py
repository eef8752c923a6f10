"""Numbers of a run: metrics.jsonl and eval.jsonl always, TensorBoard by default, Weights & Biases and trackio when configured.

The JSON-lines files are the record that everything else in drumroll reads. The other sinks are copies for people's favourite
viewers: one that fails is dropped with a warning and never stops the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self
from uuid import uuid4

from drumroll.config.models import RecordConfig
from drumroll.errors import ConfigError
from drumroll.record.files import JsonLines, read_lines, truncate_to, write_text
from drumroll.record.folder import RunFolder

# Names that the live view and the learning curve look for; eval.jsonl has `sampled` and `greedy`, or `heldout_loss`, and of preferences
# `heldout_accuracy`.
REWARD = "rollout/reward_mean"
SUCCESS = "rollout/success_mean"
TOKENS_PER_S = "rollout/tokens_per_s"
SFT_LOSS = "sft/loss"
HELDOUT_LOSS = "heldout_loss"
PREFERENCE_ACCURACY = "preference/accuracy"
HELDOUT_ACCURACY = "heldout_accuracy"

EvalStage = Literal["before", "during", "after", "comparison", "evaluation"]
"""When an evaluation took place. comparison: of the model that spent the same compute on more SFT. evaluation: without any training."""


class Sink(Protocol):
    """A copy of the metrics in somebody else's format."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(config: RecordConfig) -> None:
    """Refuse a config that names a sink whose package is not installed. Imports nothing."""
    for name in ("wandb", "trackio"):
        if getattr(config, name) is not None and importlib.util.find_spec(name) is None:
            raise ConfigError(f"`record.{name}`: the package '{name}' is not installed. Run `pip install {name}`, or remove the section.")


def rewind(folder: RunFolder, sizes: Mapping[str, int]) -> None:
    """Take metrics.jsonl and eval.jsonl back to what they were when `MetricsLog.sizes` gave these numbers; without any, to nothing.

    For a run that goes on from a checkpoint. Lines that are cut off go to metrics.superseded.jsonl and eval.superseded.jsonl. A
    `MetricsLog` that is open goes on at the new ends of the files; one that is opened afterwards takes the sinks back too."""
    for file in (folder.metrics_file, folder.eval_file):
        truncate_to(file, sizes.get(file.name, 0), _superseded(file))


class MetricsLog:
    """Where a run's numbers go. Every line is in its file when `log` returns."""

    def __init__(self, folder: RunFolder, record: RecordConfig, config: Mapping[str, Any]) -> None:
        """`config` is the resolved one, for sinks that show it."""
        check_sinks(record)
        self._metrics = JsonLines(folder.metrics_file)
        self._evaluations = JsonLines(folder.eval_file)
        self._sinks: dict[str, Sink] = {}
        if record.tensorboard:
            self._attach("tensorboard", lambda: TensorBoard(folder))
        if (wandb := record.wandb) is not None:
            self._attach("wandb", lambda: Wandb(folder, wandb.project, wandb.mode, config))
        if (trackio := record.trackio) is not None:
            self._attach("trackio", lambda: Trackio(folder, trackio.project, config))

    def log(self, step: int, values: Mapping[str, float], *, weights: str = "") -> None:
        """One line of metrics.jsonl: `{"step": 3, "time": 1760000000.0, "rollout/reward_mean": 0.5}`.

        `weights` is a digest of the weights after the step, which goes into that line as text and to no sink."""
        self._metrics.append({"step": step, "time": time.time(), **values, **({"weights": weights} if weights else {})})
        self._copy(step, values)

    def log_evaluation(self, stage: EvalStage, step: int, values: Mapping[str, float]) -> None:
        """One line of eval.jsonl: `{"stage": "before", "step": 0, "time": 1760000000.0, "sampled": 0.4, "greedy": 0.6}`."""
        self._evaluations.append({"stage": stage, "step": step, "time": time.time(), **values})
        self._copy(step, _evaluation_names(stage, values))

    def sizes(self) -> dict[str, int]:
        """Bytes of each JSON-lines file, by file name: what a checkpoint keeps for `rewind`."""
        return {"metrics.jsonl": self._metrics.size(), "eval.jsonl": self._evaluations.size()}

    def sync(self) -> None:
        """Bring both files to disk; a checkpoint that holds their `sizes` relies on it."""
        self._metrics.sync()
        self._evaluations.sync()

    def close(self) -> None:
        for name in list(self._sinks):
            self._guard(name, self._sinks[name].close)
        self._sinks.clear()
        self._metrics.close()
        self._evaluations.close()

    def _attach(self, name: str, build: Callable[[], Sink]) -> None:
        def attach() -> None:
            self._sinks[name] = build()

        self._guard(name, attach)

    def _copy(self, step: int, values: Mapping[str, float]) -> None:
        for name, sink in list(self._sinks.items()):
            self._guard(name, lambda sink=sink: sink.log(step, values))  # type: ignore[misc]

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # somebody else's code and network
            self._sinks.pop(name, None)
            warnings.warn(
                f"record.{name} failed and is off from here on ({type(error).__name__}: {error}). metrics.jsonl has everything.",
                stacklevel=3,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir RUN/tensorboard`. A run that goes on begins a new one there."""

    def __init__(self, folder: RunFolder) -> None:
        purge_step = _first_superseded_step(folder)
        num_files = len(list(folder.tensorboard.glob("events.*")))
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(folder.tensorboard), purge_step=purge_step, filename_suffix=f".{num_files:04d}"
        )
        if purge_step is not None:
            # TensorBoard hides everything from that step on, also of the warm-up, which counts its steps apart from RL.
            for step, seconds, values in _recorded(folder):
                if step >= purge_step:
                    self._add(step, values, seconds)
            self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, values, None)
        self._writer.flush()

    def _add(self, step: int, values: Mapping[str, Any], seconds: float | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step, walltime=seconds)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run whose files lie in the run folder, and which goes on when the run does."""

    def __init__(self, folder: RunFolder, project: str, mode: str, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        if not folder.wandb_id_file.exists():
            write_text(folder.wandb_id_file, uuid4().hex)
        self._run = wandb.init(
            project=project,
            name=folder.root.name,
            id=folder.wandb_id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder.root),
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(silent=True),
        )
        # Warm-up and RL both count from 1, while wandb's own step may only rise.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A trackio run, which goes on when the run does."""

    def __init__(self, folder: RunFolder, project: str, config: Mapping[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(project=project, name=folder.root.name, config=dict(config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


def _evaluation_names(stage: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation as the sinks call them."""
    prefix = "comparison" if stage == "comparison" else "eval"
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _superseded(file: Path) -> Path:
    return file.with_suffix(".superseded.jsonl")


def _first_superseded_step(folder: RunFolder) -> int | None:
    """The lowest step of all lines that were ever cut off."""
    lines = [line for file in (folder.metrics_file, folder.eval_file) for line in read_lines(_superseded(file))]
    return min((int(line["step"]) for line in lines), default=None)


def _recorded(folder: RunFolder) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Step, time and figures of every line of both files, named as for the sinks."""
    for record in read_lines(folder.metrics_file):
        yield record.pop("step"), record.pop("time"), {name: value for name, value in record.items() if name != "weights"}
    for record in read_lines(folder.eval_file):
        yield record.pop("step"), record.pop("time"), _evaluation_names(record.pop("stage"), record)
