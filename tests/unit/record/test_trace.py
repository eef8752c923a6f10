"""The timeline of a run: every interval once, nothing on top of anything else, names for all rows, and little memory."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import LIFE, consumed, leave, make_trajectory

from drumroll import cli
from drumroll.errors import RunFolderError
from drumroll.life import Span, Stamp, pack_life, unpack_life
from drumroll.record.folder import RunFolder
from drumroll.record.store import Writer
from drumroll.record.trace import write_trace

PLACED = {"generating": "engine {}", "environment": "environment worker {}", "reward": "rewards of worker {}"}
TIMES = st.integers(0, 40).map(lambda tick: 1.7e9 + tick * 0.125)


@st.composite
def lives(draw: st.DrawFn) -> bytes:
    """Any states in any order of time: what a trace shows does not depend on which of them may follow which."""
    times = sorted(draw(st.lists(TIMES, min_size=1, max_size=7)))
    states = st.sampled_from(["admitted", "leased", "waiting", "generating", "environment", "reward", "done"])
    stamps = [Stamp(draw(states), time, draw(st.integers(-1, 3)), draw(st.integers(0, 2)), draw(st.integers(-1, 1))) for time in times]
    return pack_life([*stamps, Stamp("consumed", times[-1] + 0.5)])


SPANS = st.builds(lambda role, start, length: Span(role, "update", 1, start, start + length), st.sampled_from("ab"), TIMES, st.floats(0, 2))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "x", {})


def read(path: Path) -> tuple[list[dict[str, Any]], dict[tuple[str, int], str]]:
    """The events, and the names of processes and threads by kind and number."""
    everything = json.loads(path.read_text())["traceEvents"]
    events = [event for event in everything if event["ph"] == "X"]
    names = {
        (kind, event[number]): event["args"]["name"]
        for event in everything
        for kind, number in (("process", "pid"), ("thread", "tid"))
        if event["name"] == f"{kind}_name"
    }
    return events, names


@settings(max_examples=60, deadline=None)
@given(st.lists(lives(), max_size=12), st.lists(SPANS, min_size=1, max_size=6))
def test_every_interval_is_there_once_and_none_lies_on_another(found: list[bytes], spans: list[Span]) -> None:
    with TemporaryDirectory() as place:
        folder = RunFolder.create(Path(place) / "run", "x", {})
        with Writer(folder.store) as writer:
            writer.add("train", 1, [leave(f"s{number}", life=life) for number, life in enumerate(found)])
            writer.add_spans(spans)
        number = write_trace(folder, Path(place) / "trace.json")
        events, names = read(Path(place) / "trace.json")

    first = min([span.start for span in spans] + [unpack_life(life)[0].time for life in found])
    expected: Counter[tuple[object, ...]] = Counter()
    for span in spans:
        expected["controller", span.role, "update", None, round(span.start * 1e6) - round(first * 1e6)] += 1
    for sample, life in enumerate(found):
        for stamp, _ in pairwise(unpack_life(life)):
            process = PLACED.get(stamp.state, "scheduler").format(stamp.place)
            row = f"slot {stamp.slot}" if stamp.state == "generating" and stamp.slot >= 0 else stamp.state
            expected[process, row, stamp.state, f"s{sample}", round(stamp.time * 1e6) - round(first * 1e6)] += 1
    shown = Counter(
        (
            names["process", event["pid"]],
            names["thread", event["tid"]].partition(" (")[0],
            event["name"],
            event["args"].get("sample"),
            event["ts"],
        )
        for event in events
    )
    assert shown == expected
    assert number == len(events)

    rows = defaultdict(list)
    for event in events:
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len({tid for _, tid in rows}) == len(rows)
    for intervals in rows.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(intervals)))

    by_track = defaultdict(list)
    for (pid, tid), intervals in rows.items():
        by_track[pid, names["thread", tid].partition(" (")[0]].append(intervals)
    for lanes in by_track.values():  # as few as are needed: at some moment all of them are taken
        flat = [interval for lane in lanes for interval in lane if interval[0] < interval[1]]
        most = max((sum(start <= moment < end for start, end in flat) for moment, _ in flat), default=0)
        assert len(lanes) <= max(1, most) + any(start == end for lane in lanes for start, end in lane)


def test_what_an_event_says(folder: RunFolder, tmp_path: Path) -> None:
    taken_back = pack_life([Stamp("admitted", 90.0), Stamp("leased", 91.0, 4, 0), Stamp("admitted", 95.0)])
    with Writer(folder.store) as writer:
        writer.add("train", 1, *consumed(make_trajectory('train/1/"t0"/0', reward=float("inf"))))
        writer.add("train", 1, [leave("again", "filtered", attempt=1, life=taken_back + LIFE[19:], task_id="t1")])
        writer.add_spans([Span("trainer", "update", 7, 104.0, 105.5)])
    assert write_trace(folder, tmp_path / "new" / "trace.json") == 6 + 8 + 1
    events, names = read(tmp_path / "new" / "trace.json")
    assert {name for (kind, _), name in names.items() if kind == "process"} == {
        "controller", "scheduler", "engine 3", "rewards of worker 2",
    }  # fmt: skip
    (generating,) = (event for event in events if event["name"] == "generating" and event["args"]["sample"] == 'train/1/"t0"/0')
    assert generating["args"] == {
        "sample": 'train/1/"t0"/0', "task": "t0", "ended": "consumed", "reward": "Infinity", "attempt": 0, "version": 5,
    }  # fmt: skip
    assert (generating["ts"], generating["dur"]) == (11_000_000, 1_500_000)  # after the first stamp of all, at 90
    assert names["thread", generating["tid"]] == "slot 7"
    again = [event["args"] for event in events if event["args"].get("sample") == "again"]
    assert {(args["ended"], args["task"], args["reward"]) for args in again} == {("filtered", "t1", None)}
    assert sorted(args["attempt"] for args in again) == [0, 0, 0, 1, 1, 1, 1, 1]
    (update,) = (event for event in events if event["name"] == "update")
    assert (names["process", update["pid"]], names["thread", update["tid"]], update["args"]) == ("controller", "trainer", {"step": 7})
    assert (update["ts"], update["dur"]) == (14_000_000, 1_500_000)


def test_two_samples_that_claim_one_slot_get_a_row_each(folder: RunFolder, tmp_path: Path) -> None:
    with Writer(folder.store) as writer:
        writer.add("train", 1, [leave("a"), leave("b")])
    write_trace(folder, tmp_path / "trace.json")
    events, names = read(tmp_path / "trace.json")
    assert sorted(names["thread", event["tid"]] for event in events if event["name"] == "generating") == ["slot 7", "slot 7 (2)"]


def test_nothing_ends_before_it_begins(folder: RunFolder, tmp_path: Path) -> None:
    """Also where clocks differ."""
    with Writer(folder.store) as writer:
        writer.add("train", 1, [leave("a", life=pack_life([Stamp("leased", 5.0), Stamp("environment", 6.0, 0, 0), Stamp("done", 5.5)]))])
        writer.add_spans([Span("trainer", "update", 1, 7.0, 6.5)])
    write_trace(folder, tmp_path / "trace.json")
    assert [(event["name"], event["ts"], event["dur"]) for event in read(tmp_path / "trace.json")[0]] == [
        ("update", 2_000_000, 0),
        ("leased", 0, 1_000_000),
        ("environment", 1_000_000, 0),
    ]


def test_nothing_is_overwritten_and_nothing_is_no_trace(folder: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    Writer(folder.store).close()
    with pytest.raises(RunFolderError, match="nothing to draw"):
        write_trace(folder, out)
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(RunFolderError, match="exists already"):
        write_trace(folder, out)
    assert out.read_text() == "mine"


def test_memory_does_not_grow_with_the_run(folder: RunFolder, tmp_path: Path) -> None:
    rng = random.Random(0)
    with Writer(folder.store) as writer:
        for step in range(10):
            shifts = [step * 100.0 + rng.random() * 50 for _ in range(500)]
            moved = [pack_life(stamp._replace(time=stamp.time + shift) for stamp in unpack_life(LIFE)) for shift in shifts]
            writer.add("train", step, [leave(f"{step}/{number}", life=life) for number, life in enumerate(moved)])
    tracemalloc.start()
    try:
        assert write_trace(folder, tmp_path / "trace.json") == 5000 * 6
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (tmp_path / "trace.json").stat().st_size / 4


def test_the_command(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Writer(folder.store) as writer:
        writer.add("train", 1, [leave("a"), leave("b", "aborted")])
        writer.supersede(0)
    monkeypatch.setattr(sys, "argv", ["drumroll", "trace", str(folder.root), str(tmp_path / "trace.json")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "12 events of 2 samples" in said
    assert "https://ui.perfetto.dev" in said
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "exists already" in capsys.readouterr().err
