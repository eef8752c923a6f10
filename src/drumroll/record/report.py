"""What a run says at its end: summary.json, and the report in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drumroll.record.files import write_json
from drumroll.record.folder import RunFolder
from drumroll.record.show import printable, reward_text
from drumroll.record.store import Bounds, Filter, Reader, SampleRow
from drumroll.types import Trajectory

Scores = Mapping[str, float]
"""Figures of one model by name, for example `{"sampled": 0.41, "greedy": 0.58}`, and of its domains, as `sampled/math`."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Each field is a key of summary.json, `details` are further ones."""

    name: str
    steps: int
    seconds: Mapping[str, float]
    """`total`, and seconds by phase."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    before: Scores = field(default_factory=dict)
    """On the held-out tasks, before training."""
    after: Scores = field(default_factory=dict)
    comparison: Scores = field(default_factory=dict)
    """On the held-out tasks, when RL's compute is spent on more SFT instead."""
    evaluation: Scores = field(default_factory=dict)
    """On the held-out tasks, where nothing was trained."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Tasks that always failed, and why."""
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        names = ("name", "steps", "before", "after", "comparison", "evaluation", "quarantined", "seconds", "tokens")
        seldom = ("comparison", "evaluation", "quarantined", *(("steps", "before", "after") if self.evaluation else ()))
        return {**{name: getattr(self, name) for name in names if name not in seldom or getattr(self, name)}, **self.details}


@dataclass(frozen=True, slots=True)
class Transcript:
    """Two attempts at one held-out task, sampled the same way."""

    before: Trajectory
    after: Trajectory


def write_summary(folder: RunFolder, summary: Summary) -> None:
    """Write summary.json; its keys nest, so that `before.sampled` is `{"before": {"sampled": ...}}`."""
    assert "total" in summary.seconds, "Summary.seconds lacks 'total'"
    write_json(folder.summary_file, summary.as_json())


def read_summary(folder: RunFolder) -> dict[str, Any]:
    """summary.json as it was written."""
    summary: dict[str, Any] = json.loads(folder.summary_file.read_text(encoding="utf-8"))
    return summary


def pick_transcripts(reader: Reader, before: int, after: int, count: int = 3) -> list[Transcript]:
    """The first held-out tasks, by id, that were attempted in the evaluations of both steps. Not the best ones: the first."""
    old, new = (_first_attempts(reader, step) for step in (before, after))
    shared = sorted(old.keys() & new.keys())[:count]
    return [Transcript(reader.load(old[task].sample_id), reader.load(new[task].sample_id)) for task in shared]


def print_report(console: Console, folder: RunFolder, summary: Summary, transcripts: Sequence[Transcript] = ()) -> None:
    """The before/after table, sample transcripts, and where everything lies."""
    console.print()
    if summary.before or summary.after or summary.evaluation:
        console.print(Text("On held-out tasks", style="bold"))
        console.print(score_table(summary))
        if any("/" in name for name in summary.after or summary.evaluation):
            console.print(domain_table(summary))
    if transcripts:
        console.print(Text("The same held-out tasks before and after", style="bold"))
        console.print(transcript_table(transcripts))
    if summary.quarantined:
        console.print(Text("Quarantined: tasks that always failed", style="bold"))
        for task, reason in sorted(summary.quarantined.items()):
            console.print(Text(f"  {task}: {reason.partition(chr(10))[0]}"))
    console.print(_cost_line(summary))
    console.print(Text.assemble(("run folder ", "bold"), str(folder.root)), soft_wrap=True)
    if folder.curve_file.exists():
        console.print(Text.assemble(("curve      ", "bold"), str(folder.curve_file)), soft_wrap=True)


def score_table(summary: Summary) -> Table:
    """Before, after, and what the same compute gave as more SFT, where that was tried; or the one evaluation that there was."""
    names = [name for name in summary.after or summary.before or summary.evaluation if "/" not in name]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    if summary.evaluation:
        table.add_row("score", *(_score(summary.evaluation, name) for name in names), style="bold")
        return table
    table.add_row("before", *(_score(summary.before, name) for name in names))
    table.add_row("after", *(_score(summary.after, name, summary.before) for name in names), style="bold")
    if summary.comparison:
        table.add_row("same compute as more SFT", *(_score(summary.comparison, name, summary.before) for name in names))
    return table


def domain_table(summary: Summary) -> Table:
    """The same for each domain."""
    trained = {"before": summary.before, "after": summary.after, "same compute as more SFT": summary.comparison}
    columns = {"score": summary.evaluation} if summary.evaluation else trained
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for title, scores in columns.items():
        if scores:
            table.add_column(title, justify="right")
    for name in (name for name in summary.after or summary.evaluation if "/" in name):
        mode, _, domain = name.partition("/")
        base = {"after": summary.before, "same compute as more SFT": summary.before}
        table.add_row(f"{domain}, {mode}", *(_score(scores, name, base.get(title)) for title, scores in columns.items() if scores))
    return table


def _score(scores: Scores, name: str, base: Scores | None = None) -> Text:
    if name not in scores:
        return Text("-", style="dim")
    text = Text(f"{scores[name]:.3f}")
    if base is not None and name in base:
        change = scores[name] - base[name]
        gain = -change if name.endswith("loss") else change
        text.append(f" ({change:+.3f})", style="green" if gain > 0 else "red" if gain < 0 else "dim")
    return text


def transcript_table(transcripts: Sequence[Transcript]) -> Table:
    """Task, reply before, reply after, each with its reward."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for transcript in transcripts:
        table.add_row("task", Text(printable(_opening(transcript.after)), style="cyan"))
        table.add_row("before", Text(printable(_rest(transcript.before))), Text.assemble("reward ", reward_text(transcript.before.reward)))
        table.add_row("after", Text(printable(_rest(transcript.after))), Text.assemble("reward ", reward_text(transcript.after.reward)))
        table.add_section()
    return table


def _opening(trajectory: Trajectory) -> str:
    """What the policy was given before its first reply."""
    return trajectory.turns[0].text if trajectory.turns and trajectory.turns[0].author == "environment" else trajectory.task.prompt or ""


def _rest(trajectory: Trajectory) -> str:
    """The reply, or all turns after the opening when there are several."""
    replies = [turn for turn in trajectory.turns if turn.author == "policy"]
    if len(replies) <= 1:
        return trajectory.last_reply
    rest = trajectory.turns[1:] if trajectory.turns[0].author == "environment" else trajectory.turns
    return "\n".join(f"{'>' if turn.author == 'policy' else ' '} {turn.text}" for turn in rest)


def _cost_line(summary: Summary) -> Text:
    steps = [f"{summary.steps} steps"] if summary.steps else []
    tokens = [f"{number:,} {name} tokens" for name, number in summary.tokens.items()]
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items() if name != "total")
    return Text(", ".join([*steps, *tokens, f"{summary.seconds['total']:.1f} s"]) + (f" ({phases})" if phases else ""))


def _first_attempts(reader: Reader, step: int) -> dict[str, SampleRow]:
    """By task: the first attempt at the training temperature, or the first of all where only greedy ones were made."""
    first: dict[str, SampleRow] = {}
    rows = reader.query(Filter(phase="eval", step=Bounds.at(step), state="consumed"))
    for row in sorted(rows, key=lambda row: (row.temperature == 0.0, row.sample_id)):
        first.setdefault(row.task_id, row)
    return first
