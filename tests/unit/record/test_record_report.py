"""What a run shows of itself: summary, report, curve, and `drumroll show`."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from record_samples import LIFE, consumed, leave
from record_samples import make_trajectory as make
from rich.console import Console, RenderableType

from drumroll.config.models import RecordConfig
from drumroll.errors import UserError
from drumroll.record.curve import draw_curve
from drumroll.record.folder import RunFolder
from drumroll.record.metrics import MetricsLog
from drumroll.record.report import Summary, pick_transcripts, print_report, read_summary, write_summary
from drumroll.record.show import parse_filter, sample_table, trajectory_view
from drumroll.record.store import Bounds, Filter, Reader, Writer
from drumroll.types import Sampling, Task, Turn

SUMMARY = Summary(
    name="quickstart",
    steps=80,
    seconds={"total": 171.25, "rollout": 80.0},
    tokens={"sampled": 1234567},
    before={"sampled": 0.42, "greedy": 0.61},
    after={"sampled": 0.93, "greedy": 0.97},
    comparison={"sampled": 0.7, "greedy": 0.8},
    details={"quarantined": ["t9"]},
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "x", {"name": "quickstart"})


def printed(*renderables: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, _environ={})
    console.print(*renderables)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def record_evaluations(folder: RunFolder) -> None:
    with Writer(folder.store) as writer:
        for step, reply in ((0, "[b]4321"), (80, "1234")):
            tasks = [Task(id=f"h{i}", prompt=f"sort {i}=") for i in range(5 if step else 4)]
            writer.add(
                "eval", step, *consumed(*[make(f"eval/{step}/{t.id}/g", "greedy", t, sampling=Sampling(temperature=0.0)) for t in tasks])
            )
            writer.add("eval", step, *consumed(*[make(f"eval/{step}/{t.id}/0", reply, t, reward=float(step > 0)) for t in tasks]))


def test_summary_has_the_promised_keys(folder: RunFolder) -> None:
    write_summary(folder, SUMMARY)
    found = json.loads(folder.summary_file.read_text())
    assert found == read_summary(folder)
    for key in (
        "before.sampled",
        "before.greedy",
        "after.sampled",
        "after.greedy",
        "comparison.sampled",
        "seconds.total",
        "seconds.rollout",
    ):
        outer, inner = key.split(".")
        assert isinstance(found[outer][inner], float), key
    assert (found["steps"], found["tokens"], found["quarantined"]) == (80, {"sampled": 1234567}, ["t9"])


def test_transcripts_are_the_first_tasks_that_both_evaluations_hold(folder: RunFolder) -> None:
    record_evaluations(folder)
    with Reader(folder.store) as reader:
        transcripts = pick_transcripts(reader, 0, 80)
        assert len(pick_transcripts(reader, 0, 80, count=9)) == 4
        assert pick_transcripts(reader, 0, 81) == []
    assert [t.before.task.id for t in transcripts] == [t.after.task.id for t in transcripts] == ["h0", "h1", "h2"]
    assert {(t.before.last_reply, t.after.last_reply) for t in transcripts} == {("[b]4321", "1234")}  # sampled, not greedy


def test_transcripts_are_of_samples_that_counted(folder: RunFolder) -> None:
    with Writer(folder.store) as writer:
        for step in (0, 80):
            writer.add(
                "eval", step, [leave(f"eval/{step}/h0/0", "aborted", task_id="h0"), leave(f"eval/{step}/h0/1", "failed", task_id="h0")]
            )
            writer.add("eval", step, *consumed(make(f"eval/{step}/h0/2", task=Task(id="h0"))))
    with Reader(folder.store) as reader:
        (transcript,) = pick_transcripts(reader, 0, 80)
    assert (transcript.before.sample_id, transcript.after.sample_id) == ("eval/0/h0/2", "eval/80/h0/2")


def test_report(folder: RunFolder) -> None:
    record_evaluations(folder)
    folder.curve_file.touch()
    console = Console(file=io.StringIO(), width=100, _environ={})
    with Reader(folder.store) as reader:
        print_report(console, folder, SUMMARY, pick_transcripts(reader, 0, 80))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "before",
        "0.420",
        "0.930 (+0.510)",
        "same compute as more SFT",
        "0.700",
        "[b]4321",
        "reward 1",
        "1,234,567",
        "171.2 s",
    ):
        assert part in text, part
    assert str(folder.root) in text
    assert str(folder.curve_file) in text
    assert "more SFT" not in printed_report(folder, Summary("x", 1, {"total": 1.0}, before={"sampled": 0.5}, after={"sampled": 0.5}))
    sft = printed_report(folder, Summary("x", 0, {"total": 1.0}, before={"heldout_loss": 2.0}, after={"heldout_loss": 0.5}))
    assert "heldout_loss" in sft
    assert "0.500 (-1.500)" in sft
    assert "0 steps" not in sft
    assert "1 steps, 1.0 s" in printed_report(folder, Summary("x", 1, {"total": 1.0}))


def printed_report(folder: RunFolder, summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=100, _environ={})
    print_report(console, folder, summary)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_curve(folder: RunFolder) -> None:
    with MetricsLog(folder, RecordConfig(tensorboard=False), {}) as log:
        log.log(1, {"warmup/loss": 2.0})
        log.log_evaluation("before", 0, {"sampled": 0.4, "greedy": 0.6})
        for step in range(1, 31):
            log.log(
                step,
                {"rollout/reward_mean": math.nan if step == 7 else step / 20 - 0.5, "rollout/success_mean": step / 30},
                weights=f"{step:x}",
            )
        log.log_evaluation("after", 30, {"sampled": 0.9, "greedy": 0.95})
        log.log_evaluation("comparison", 30, {"sampled": 0.7, "greedy": 0.8})
    assert draw_curve(folder) == folder.curve_file
    assert folder.curve_file.read_bytes().startswith(b"\x89PNG")
    assert folder.curve_file.stat().st_size > 10_000


def test_curve_of_supervised_fine_tuning(folder: RunFolder) -> None:
    with MetricsLog(folder, RecordConfig(tensorboard=False), {}) as log:
        for update in range(20):
            log.log(update, {"sft/loss": 2.0 / (update + 1)})
        log.log_evaluation("before", 0, {"heldout_loss": 2.0})
        log.log_evaluation("after", 20, {"heldout_loss": 0.3})
    assert draw_curve(folder).stat().st_size > 10_000


def test_curve_of_a_run_without_any_figures(folder: RunFolder) -> None:
    assert draw_curve(folder).exists()


def test_filter_from_the_command_line() -> None:
    assert parse_filter(step="3", reward=">=0.5", domain="math") == Filter(step=Bounds.at(3), reward=Bounds(low=0.5), domain="math")
    assert parse_filter(superseded=True) == Filter(superseded=True)
    assert parse_filter(state="filtered") == Filter(state="filtered")
    with pytest.raises(UserError, match=r"--state: no sample ends as 'filterd'. Did you mean 'filtered'\? Known: aborted, consumed"):
        parse_filter(state="filterd")
    with pytest.raises(UserError, match="--reward: 'high' is no range"):
        parse_filter(reward="high")


def test_show(folder: RunFolder) -> None:
    hostile = "\x1b[2Jclean [bold]not markup[/bold]\u202e \ud800"
    turns = (
        Turn("environment", 0, 3, "sort"),
        Turn("policy", 3, 4, hostile),
        Turn("environment", 4, 4, "again"),
        Turn("policy", 4, 5, "1234"),
    )
    with Writer(folder.store) as writer:
        writer.add("train", 3, *consumed(make("a[b]/0", reply=hostile), make("multi", turns=turns, reward=-0.5, success=False)))
        writer.add("train", 4, *consumed(make("lost", reward=None, success=None, error="sandbox\nis gone", loss_mask=np.zeros(5, bool))))
    with Reader(folder.store) as reader:
        table = printed(sample_table(reader.query(), reader.count()), width=160)
        assert "a[b]/0" in table
        assert "\\x1b[2Jclean [bold]not markup[/bold]\\u202e" in table
        assert "sandbox is gone" in table
        assert "3 samples" in table
        assert "1 of 3 samples" in printed(sample_table(reader.query(limit=1), 3))
        assert "No sample matches" in printed(sample_table([], 0))
        view = printed(trajectory_view(reader.row("multi"), reader.load("multi")))
        assert "\x1b" not in table + view
        for part in (
            "train, step 3",
            "-0.5",
            "exact_match 1",
            "step 0 to 1",
            "answer: '1234'",
            "again",
        ):
            assert part in view, part
        assert ["generating", "+1.000", "s", "1.500", "s", "engine", "3,", "slot", "7", "5"] in [
            line.split()[-10:] for line in view.splitlines()
        ]
        assert ["consumed", "+4.000", "s", "6"] in [line.split() for line in view.splitlines()]
        assert view.index("sort") < view.index("clean") < view.index("again") < view.rindex("1234")
        assert "no verdict" in printed(trajectory_view(reader.row("lost"), reader.load("lost")))


def test_what_was_superseded_is_shown_only_when_asked_for(folder: RunFolder) -> None:
    with Writer(folder.store) as writer:
        writer.add("train", 1, *consumed(make("kept")))
        mark = writer.mark()
        writer.add("train", 2, *consumed(make("gone")))
        assert writer.supersede(mark) == 1
    with Reader(folder.store) as reader:
        assert [row.sample_id for row in reader.query(parse_filter())] == ["kept"]
        assert [row.sample_id for row in reader.query(parse_filter(superseded=True))] == ["gone"]
        assert "train, step 2, superseded" in printed(trajectory_view(reader.row("gone"), reader.load("gone")))
        assert "superseded" not in printed(trajectory_view(reader.row("kept"), reader.load("kept")))


def test_show_of_samples_that_were_not_consumed(folder: RunFolder) -> None:
    with Writer(folder.store) as writer:
        writer.add("train", 1, *consumed(make("kept")))
        with Reader(folder.store) as reader:
            assert "consumed" not in printed(sample_table(reader.query(), 1), width=160)
        rejected = leave("rejected", "filtered", reason="all wrong")
        lost = leave("lost", "failed", attempt=2, life=LIFE[:38], reason="worker 2 is\x1b gone")
        writer.add("train", 1, [rejected, lost, leave("unwanted", "aborted", attempt=-1, life=b"")], [make("rejected", reply="4321")])
    with Reader(folder.store) as reader:
        lines = {line.split()[0]: line for line in printed(sample_table(reader.query(), 4), width=160).splitlines() if line.split()}
        assert "consumed" in lines["kept"]
        assert "filtered" in lines["rejected"]
        assert "4321" in lines["rejected"]
        assert "worker 2 is\\x1b gone" in lines["lost"]
        assert "aborted" in lines["unwanted"]
        assert [row.sample_id for row in reader.query(parse_filter(state="filtered"))] == ["rejected"]
        views = {
            row.sample_id: printed(trajectory_view(row, reader.load(row.sample_id) if row.has_payload else None)) for row in reader.query()
        }
    assert "all wrong" in views["rejected"]
    assert "4321" in views["rejected"]
    assert "leased" in views["lost"]
    assert "nothing came back of attempt 2" in views["lost"]
    assert "\x1b" not in views["lost"]
    assert "before any worker had it" in views["unwanted"]
    assert "life" not in views["unwanted"]
