"""The one view of a run in the terminal: a live panel where there is a terminal, one plain line per event elsewhere.

The view only shows what it is told and never stops a run: output that nobody can take any more is dropped.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drumroll.record.metrics import REWARD, SUCCESS, TOKENS_PER_S

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 32
SHOWN_STAGES = 6


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """A curve of block characters, oldest value left; more values than `width` are averaged, what is not a number is a space."""
    columns = list(values)
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        columns = [_mean(values[start:end]) for start, end in pairwise(edges)]
    known = [value for value in columns if math.isfinite(value)]
    if not known:
        return " " * len(columns)
    low = min(known) if low is None else low
    high = max(known) if high is None else high
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((min(max(value, low), high) - low) * scale)] if math.isfinite(value) else " " for value in columns)


@dataclass
class Stage:
    """Something that takes a while outside the step loop, or beside it."""

    text: str
    total: int | None
    start: float
    done: int = 0

    def counted(self) -> str:
        return f"{self.text} {self.done}/{self.total}" if self.total else self.text


@dataclass
class _State:
    """What there is to show."""

    step: int = 0
    first_step_at: float | None = None
    phase: str = ""
    stage: Stage | None = None
    finished: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    tokens_per_s: float = math.nan
    seconds: dict[str, float] = field(default_factory=dict)
    evaluation: str = ""


class LiveView:
    """A context manager; outside its block a live terminal shows nothing, and the terminal is always left as it was."""

    def __init__(self, total_steps: int, title: str, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._title = title
        self._console = console or Console()
        self._start = time.monotonic()
        self._state = _State()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4) if _can_redraw(self._console) else None

    def stage(self, text: str, total: int | None = None) -> None:
        """Something else than RL steps begins: `stage("warming up", total=60)`. It ends with the next stage, step or evaluation."""
        self._end_stage()
        self._state.stage = Stage(text, total, time.monotonic())
        self._line(f"{text} ..." if total is None else f"{text} (0/{total}) ...")

    def advance(self, n: int = 1) -> None:
        """The stage has come `n` further."""
        stage = self._state.stage
        if stage is None:
            return
        before, stage.done = stage.done, stage.done + n
        if stage.total and stage.done < stage.total and before * 4 // stage.total < stage.done * 4 // stage.total:
            self._line(stage.counted())

    def phase(self, name: str) -> None:
        """The step loop enters a phase; fits `PhaseTimer(on_change=...)`."""
        self._state.phase = name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step of RL is done."""
        self._end_stage()
        state = self._state
        state.step = step
        state.first_step_at = state.first_step_at or time.monotonic()
        state.rewards.append(metrics.get(REWARD, math.nan))
        state.successes.append(metrics.get(SUCCESS, math.nan))
        state.tokens_per_s = metrics.get(TOKENS_PER_S, math.nan)
        times = ((re.fullmatch("time/(.+)_s", name), value) for name, value in metrics.items())
        seconds = {match[1]: value for match, value in times if match}
        for name, value in seconds.items():
            state.seconds[name] = state.seconds.get(name, 0.0) + value
        spent = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        self._line(
            f"step {step}/{self._total_steps}  reward {_number(state.rewards[-1])}  success {_number(state.successes[-1])}  "
            f"tokens/s {state.tokens_per_s:,.0f}  {sum(seconds.values()):.2f} s" + (f" ({spent})" if spent else "")
        )

    def evaluation(self, step: int, sampled: float | None, greedy: float | None) -> None:
        """An evaluation on the held-out tasks is done."""
        self._end_stage()
        results = {"sampled": sampled, "greedy": greedy}
        figures = ", ".join(f"{name} {_number(value)}" for name, value in results.items() if value is not None)
        self._state.evaluation = f"{figures} at step {step}"
        self._line(f"held-out {self._state.evaluation}")

    def note(self, text: str) -> None:
        """Something that the user should see and that stays on the screen."""
        if self._live is not None:
            self._live.console.print(Text(f"drumroll: {text}", style="yellow"))
        else:
            self._line(f"drumroll: {text}")

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_stage("done in" if error is None else "stopped after")
        if self._live is not None:
            try:
                self._live.stop()
            finally:
                self._console.show_cursor(True)

    def _end_stage(self, how: str = "done in") -> None:
        stage, self._state.stage = self._state.stage, None
        if stage is not None:
            note = f"{stage.text}: {how} {time.monotonic() - stage.start:.1f} s"
            self._state.finished.append(note)
            self._line(note)

    def _line(self, text: str) -> None:
        """One plain line where nothing can be redrawn."""
        if self._live is not None:
            return
        file = self._console.file
        encoding = getattr(file, "encoding", None) or "utf-8"
        try:
            file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            file.flush()
        except (OSError, ValueError):  # nobody reads it any more
            pass

    def _render(self) -> RenderableType:
        state = self._state
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(ratio=1)
        for note in state.finished[-SHOWN_STAGES:] if not state.step else []:
            rows.add_row("", Text(note, style="dim"))
        if state.stage is not None:
            rows.add_row("stage", _bar(state.stage.done, state.stage.total, state.stage.counted()))
        if self._total_steps and (state.step or state.stage is None):
            parts = [f"{state.step}/{self._total_steps}", state.phase, self._remaining()]
            rows.add_row("steps", _bar(state.step, self._total_steps, "  ".join(part for part in parts if part)))
        if state.step:
            rows.add_row("reward", _curve(state.rewards, None, None, "cyan"))
            rows.add_row("success", _curve(state.successes, 0.0, 1.0, "green"))
        if state.evaluation:
            rows.add_row("held-out", Text(state.evaluation, style="bold green"))
        if state.step:
            rows.add_row("tokens/s", f"{state.tokens_per_s:,.0f}")
            rows.add_row("time", self._shares())
        title = Text.assemble((self._title, "bold"), (f"  {_clock(time.monotonic() - self._start)}", "dim"))
        return Panel(Group(rows), title=title, title_align="left", border_style="blue", width=min(self._console.width, 100))

    def _remaining(self) -> str:
        state = self._state
        if state.first_step_at is None or not 2 <= state.step < self._total_steps:
            return ""
        per_step = (time.monotonic() - state.first_step_at) / (state.step - 1)
        return f"{_clock(per_step * (self._total_steps - state.step))} left"

    def _shares(self) -> Text:
        """Time by phase as a share of all; the phase that runs now is bright."""
        seconds = dict(self._state.seconds)
        total = sum(seconds.values()) or 1.0
        text = Text()
        for name, value in seconds.items():
            text.append(f"{name} {100 * value / total:.0f} %  ", style="bold yellow" if name == self._state.phase else "")
        if self._state.phase and self._state.phase not in seconds:
            text.append(self._state.phase, style="bold yellow")
        return text


def _can_redraw(console: Console) -> bool:
    """Whether this is a terminal that knows control codes; a forced-colour pipe and a notebook are not."""
    is_tty = getattr(console.file, "isatty", lambda: False)()
    return is_tty and not console.is_jupyter and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")


def _bar(done: int, total: int | None, text: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=total, completed=done, width=CURVE_WIDTH, pulse=total is None), text)
    return grid


def _curve(values: Sequence[float], low: float | None, high: float | None, style: str) -> Text:
    values = list(values)
    return Text.assemble((sparkline(values, CURVE_WIDTH, low, high).ljust(CURVE_WIDTH + 2), style), (_number(values[-1]), f"bold {style}"))


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
