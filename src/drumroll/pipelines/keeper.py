"""Keeps a run's state safe: knows when its parts fit together, writes checkpoints of them, goes back to them.

    <checkpoint>/state.json     every part's `state()`, the resolved config, the incarnation
                 store.json     how far the trajectory store had grown
                 trainer/       the trainers' shards (see `backends.train.shards`)
                 critic/        the critic's, where there is one

Parts change only inside `turn()`. At its end they fit together, and that is what a checkpoint holds, whenever it is written:

        step 1          step 2          step 3
    ───[ turn ]────────[ turn ]────────[ turn ]───
               ▲ rollout, scoring, evaluation: nothing changes, so a run may be interrupted anywhere here
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from drumroll.config.models import RunConfig
from drumroll.errors import CheckpointError, DivergedError, DrumrollError, NodeLost, RoleLost, StateLost, WorkerError, WorkerLost
from drumroll.pipelines.fleet import Fleet, Phase, launch
from drumroll.pipelines.job import Job
from drumroll.record.checkpoint import Checkpoint, CheckpointStore
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import Recorder
from drumroll.types import Version

GRACE_S = 10.0
"""How long a signal waits for the end of an update before the run ends without its checkpoint."""
LAST_CHECKPOINT_S = 15.0
"""How long the checkpoint of a run that is told to end may wait for the trainers."""
MAX_ROLLBACKS = 3
"""Times that a run goes back to one checkpoint, because of its numbers, before it gives up."""
MAX_RETURNS = 5
"""Likewise because of workers that were lost."""
BEGINNING = "the beginning"
"""Where a run goes back to that has no checkpoint."""


class Stateful(Protocol):
    """A part of the controller that a checkpoint holds: plain values that JSON can hold, and back."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class Progress:
    """How far a run has come."""

    phase: Phase
    begun: bool = False
    """Whether the trainers have been made ready for this phase."""
    step: int = 0
    """Steps or updates of this phase that are done."""
    evaluated: int = -1
    """The last RL step whose evaluation is on record."""
    planned: int = 0
    """Updates of the comparison, once they are known."""
    rollbacks: int = 0
    """Times that the run went back because of its numbers; samples drawn after that have other seeds."""
    carried: dict[str, float] = field(default_factory=dict)
    """What the algorithm keeps from step to step (see `algo.algorithm`)."""

    def enter(self, phase: Phase, planned: int = 0) -> None:
        self.phase, self.begun, self.step, self.planned = phase, False, 0, planned

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def name(self) -> str:
        """Of a checkpoint of this moment."""
        return f"{'step' if self.phase == 'rl' else self.phase}-{self.step:06d}"


@dataclass(frozen=True)
class Incarnation:
    """One process's share of a run's life: where it starts from, and where its checkpoints go."""

    number: int
    """0 for the process that began the run; resuming and rolling back raise it."""
    checkpoints: CheckpointStore
    origin: Checkpoint | None = None
    """What it goes on from; None at the beginning of the run."""


class Keeper:
    """A context manager around the work of a run.

        with Keeper(job.cfg, folder, life, fleet, rec, Progress("rl"), {"source": source}) as keeper:
            keeper.see_through(work)           # from where the run stands, as often as it takes

        def work():
            with keeper.turn():                # the parts change, together
                fleet.train(batch)
                keeper.progress.step += 1
            keeper.save_if_due()

    SIGTERM and Ctrl-C end the block as soon as the parts fit together, with a checkpoint; a second one ends the process at once.
    """

    def __init__(
        self,
        cfg: RunConfig,
        folder: RunFolder,
        life: Incarnation,
        fleet: Fleet,
        rec: Recorder,
        progress: Progress,
        others: Mapping[str, Stateful],
    ) -> None:
        self.progress = progress
        self._cfg = cfg
        self._folder = folder
        self._life = life
        self._incarnation = life.number
        self._checkpoints = life.checkpoints
        self._fleet = fleet
        self._rec = rec
        self._others = others
        """Parts besides progress and recorder: they stay where they are when the run goes back because of its numbers."""
        self._parts: dict[str, Stateful] = {"progress": progress, "recorder": rec, **others}
        self._fitting: dict[str, Any] | None = None
        """State of every part when they last fitted together; None while they change."""
        self._beginning = self._states()
        """Their state before anything was done."""
        self._saved: dict[str, Any] | None = None
        """What the last checkpoint holds."""
        self._saved_at = time.monotonic()
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._rolled_back_to: list[str] = []
        self._returned_to: list[str] = []

    def version(self, step: int) -> Version:
        return Version(self._incarnation, step)

    def __enter__(self) -> Self:
        if self._life.origin is not None:
            self._go_to(self._life.origin)
            self._saved = self._fitting = self._states()
        else:
            self._fleet.supersede(0)  # of an earlier process that ended before its first checkpoint
            self._fitting = self._states()
        self._watch_signals()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._settle()
            elif not isinstance(error, WorkerError):  # a fleet with a hole in it has no state to save
                self._save_last_state()
        finally:
            if self._signal is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    # Changing.

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The parts, trainers included, change together; a signal waits for the end of the block."""
        self._fitting = None
        yield
        self._fitting = self._states()
        self._obey()

    def _states(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self._parts.items()}

    # Saving.

    def save_if_due(self) -> None:
        """Write a checkpoint if enough steps or time have passed since the last one, or if these weights may be the best so far; but
        none while updates are skipped for their numbers, because a run goes back to the newest one."""
        if self._fitting is self._saved or self._rec.num_nonfinite:
            return
        options, step = self._cfg.checkpoint, self.progress.step
        by_count = bool(options.every) and self.progress.phase in ("rl", "sft", "preference") and step > 0 and step % options.every == 0
        by_score = bool(options.keep_best) and self._score is not None
        by_time = time.monotonic() - self._saved_at >= options.every_s and not self._checkpoints.is_writing
        if by_count or by_score or by_time:
            self.save()

    def save(self, name: str | None = None, *, pinned: bool = False) -> None:
        """Begin a checkpoint of the parts as they are; it is written while training goes on.

        One that cannot be written does not stop the run: it is reported, and those before it are intact. One that is `pinned` is part of
        the run's own doing, and is written even where checkpoints are off."""
        if not self._cfg.checkpoint.to_disk and not pinned:
            self._saved = self._fitting
            return
        self._settle()
        with self._rec.phase("checkpoint"), self._reported():
            self._checkpoints.write_async(*self._content(name), pinned=pinned)
            self._saved = self._fitting
        self._saved_at = time.monotonic()

    def _content(
        self, name: str | None = None, deadline_s: float | None = None
    ) -> tuple[str, Callable[[Path], None], dict[str, Any], float | None]:
        """Copies the trainers' state to memory; returns what a checkpoint is made of."""
        assert self._fitting is not None, "a checkpoint in the middle of a turn"
        state = {"parts": self._fitting, "config": self._cfg.model_dump(mode="json"), "incarnation": self._incarnation}
        mark = self._fleet.mark()
        self._fleet.snapshot(deadline_s)
        self._rec.sync()

        def fill(draft: Path) -> None:
            self._fleet.save(draft, deadline_s)
            try:
                grown_to = 0 if mark is None else mark.fetch(deadline_s)
            except WorkerError as error:
                raise CheckpointError(f"how far the trajectory store had grown is not known: {error}") from error
            (draft / "store.json").write_text(json.dumps({"mark": grown_to}))

        return name or self.progress.name, fill, state, self._score

    @property
    def _score(self) -> float | None:
        """Of the weights as they are, if they have been evaluated."""
        is_rated = self.progress.phase == "rl" and self.progress.evaluated == self.progress.step
        return self._rec.last_score if is_rated else None

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        with self._rec.phase("checkpoint"), self._reported():
            self._checkpoints.wait()

    @contextmanager
    def _reported(self, kind: type[DrumrollError] = CheckpointError) -> Iterator[None]:
        """What goes wrong with a checkpoint is told and kept, and does not stop the run."""
        try:
            yield
        except kind as error:
            self._saved = None
            self._folder.incident("checkpoint", reason=str(error))
            self._rec.warn(f"no checkpoint: {error}")

    def _save_last_state(self) -> None:
        """The run ends early: whatever can still be saved is saved, within seconds, and the reason of its end stays the reason."""
        with self._reported(DrumrollError):
            self._settle()
            if self._fitting is None:
                self._rec.warn("the run ended in the middle of an update, which is lost.")
            elif self._fitting is not self._saved and self._cfg.checkpoint.to_disk:
                self._checkpoints.write(*self._content(deadline_s=LAST_CHECKPOINT_S))
        if names := self._checkpoints.names():
            self._rec.warn(f"the run can go on from its checkpoint '{names[-1]}': drumroll resume {self._folder.root}")

    # Going back.

    def load_trainers(self, name: str) -> None:
        """Take the trainers, and nothing else, back to a checkpoint."""
        self._settle()
        self._fleet.load_trainers(self._checkpoints.load(name).path)

    def roll_back(self, why: str) -> None:
        """Go back to the newest checkpoint, and on from there with other samples: the same ones would lead to the same numbers."""
        self._settle()
        found = self._checkpoints.newest_good()
        if found is None:
            raise DivergedError(f"{why}, and there is no checkpoint to go back to.")
        checkpoint, _ = found
        self._rolled_back_to.append(checkpoint.name)
        if self._rolled_back_to.count(checkpoint.name) > MAX_ROLLBACKS:
            raise DivergedError(
                f"{why}, again after going back to '{checkpoint.name}' {MAX_ROLLBACKS} times. Lower `trainer.lr` or "
                f"`trainer.max_grad_norm`, or look at the loss; {self._folder.root}/incidents.jsonl names the batches."
            )
        with self.turn():
            rollbacks = self.progress.rollbacks + 1
            here = {name: part.state() for name, part in self._others.items()}
            self._rec.rewind(checkpoint.state["parts"]["recorder"])
            self._go_to(checkpoint)
            for name, state in here.items():
                self._others[name].load_state(state)
            self.progress.rollbacks = rollbacks
            self._incarnation = self._folder.begin_incarnation(checkpoint.name)
        self._saved = None
        self._folder.incident("rollback", to=checkpoint.name, reason=why)
        self._rec.warn(f"{why}: gone back to '{checkpoint.name}'.")

    def see_through(self, work: Callable[[], None]) -> None:
        """Do the run's work from where it stands. Those who are lost may take along what it was made of: then it goes on from the newest
        checkpoint, as a run that is resumed does."""
        loss: WorkerLost | None = None
        while True:
            try:
                if loss is not None:
                    cause, loss = loss, None
                    self._go_back(cause)
                return work()
            except (RoleLost, NodeLost):
                raise
            except WorkerLost as error:
                loss = error

    def _go_back(self, loss: WorkerLost) -> None:
        """To the newest checkpoint, or where there is none to the run's beginning; on from there with the same samples."""
        self._fleet.close_training(self.progress.step)
        self._settle()
        found = self._checkpoints.newest_good()
        name = found[0].name if found is not None else BEGINNING
        self._returned_to.append(name)
        if self._returned_to.count(name) > MAX_RETURNS:
            raise StateLost(f"{loss}\nThe run has gone back to '{name}' {MAX_RETURNS} times for such a reason.") from loss
        with self.turn():
            if found is not None:
                self._rec.rewind(found[0].state["parts"]["recorder"])
                self._go_to(found[0])
            else:
                self._begin_again(loss)
            self._incarnation = self._folder.begin_incarnation(name)
        self._saved = None
        self._folder.incident("went back", to=name, reason=str(loss))
        self._rec.warn(f"gone back to '{name}', because of those who are lost.")

    def _go_to(self, checkpoint: Checkpoint) -> None:
        for name, part in self._parts.items():
            part.load_state(checkpoint.state["parts"][name])
        self._fleet.load(checkpoint.path)
        self._fleet.reschedule(self.progress.phase, self.progress.planned)
        self._fleet.supersede(int(json.loads((checkpoint.path / "store.json").read_text())["mark"]))

    def _begin_again(self, loss: WorkerLost) -> None:
        self._rec.rewind(self._beginning["recorder"])
        for name, part in self._parts.items():
            part.load_state(self._beginning[name])
        self._fleet.begin_again(loss)
        self._fleet.supersede(0)

    # Signals.

    def _watch_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                if signal.getsignal(number) != signal.SIG_IGN:  # as Ctrl-C is for a run in the background
                    self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:  # the turn has had its time
            self._end()
        if self._signal is not None:
            os._exit(128 + number)
        self._signal = number
        if self._fitting is None:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        else:
            self._end()

    def _obey(self) -> None:
        if self._signal is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._end()

    def _end(self) -> None:
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(143)


@contextmanager
def at_work(
    job: Job, folder: RunFolder, life: Incarnation, progress: Progress, **others: Stateful
) -> Iterator[tuple[Fleet, Recorder, Keeper]]:
    """What every loop works with, from where the run stands: its clusters, its records, and the keeper of its state.

    `others` are parts of that state besides the progress and the records."""
    with (
        Recorder(job.cfg, folder) as rec,
        launch(job, folder, rec) as fleet,
        Keeper(job.cfg, folder, life, fleet, rec, progress, others) as keeper,
    ):
        yield fleet, rec, keeper
