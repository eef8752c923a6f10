"""The trajectory store: upserts, filters, torn records, one writer, and readers that never disturb it."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import LIFE, consumed, leave
from record_samples import make_trajectory as make

from drumroll.errors import RunFolderError, UserError
from drumroll.life import Span
from drumroll.record import files
from drumroll.record.encoding import encode_trajectory
from drumroll.record.store import Bounds, Filter, Reader, Writer
from drumroll.types import RankInfo, Task
from drumroll.workers.recorder import RecorderWorker

WRITE_UNTIL_KILLED = """
import sys, itertools
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from record_samples import consumed, make_trajectory
from drumroll.record.store import Writer
writer = Writer(Path(sys.argv[1]), segment_bytes=4096)
for step in itertools.count():
    writer.add("train", step, *consumed(*[make_trajectory(f"train/{step}/t{i}/0", reply=f"{step}-{i}") for i in range(8)]))
    print(step, flush=True)
"""


EARLIER_TABLE = """
CREATE TABLE samples (
    sample_id TEXT PRIMARY KEY, phase TEXT NOT NULL, step INTEGER NOT NULL, group_id TEXT NOT NULL, task_id TEXT NOT NULL,
    domain TEXT NOT NULL, reward REAL, success INTEGER, stop_reason TEXT NOT NULL, num_prompt_tokens INTEGER NOT NULL,
    num_new_tokens INTEGER NOT NULL, oldest_version INTEGER NOT NULL, temperature REAL NOT NULL, seed INTEGER NOT NULL,
    reward_parts TEXT NOT NULL, metrics TEXT NOT NULL, timings TEXT NOT NULL, error TEXT NOT NULL, reply TEXT NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, time REAL NOT NULL
);
CREATE INDEX samples_by_step ON samples (phase, step);
"""


def write_earlier_store(folder: Path, schema: int) -> None:
    """Samples `a` and `b`, the latter superseded in schema 2."""
    db = sqlite3.connect(folder / "index.sqlite")
    db.executescript(EARLIER_TABLE)
    segment = b""
    for name, reward in (("a", 1.0), ("b", 0.25)):
        payload = encode_trajectory(make(name, reply=name, reward=reward))
        figures = (reward, 1, "stop", 3, 2, 0, 1.0, 5, '{"a": 1.0}', "{}", '{"leased": 1.5}', "", name, 0, len(segment), len(payload), 9.5)
        db.execute(f"INSERT INTO samples VALUES ({', '.join('?' * 23)})", (name, "train", 1, "g", "t0", "default", *figures))
        segment += struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    (folder / "segment-000000.seg").write_bytes(segment)
    if schema == 2:
        db.execute("ALTER TABLE samples ADD COLUMN superseded INTEGER NOT NULL DEFAULT 0")
        db.execute("UPDATE samples SET superseded = 1 WHERE sample_id = 'b'")
    db.execute(f"PRAGMA user_version = {schema}")
    db.commit()
    db.close()


def ids(reader: Reader, where: Filter) -> list[str]:
    return [row.sample_id for row in reader.query(where)]


def test_rows_and_payloads(tmp_path: Path) -> None:
    trajectory = make(reward=np.float32(0.5), reward_parts={"a": math.inf}, error="bad \ud800 text")
    with Writer(tmp_path) as writer:
        writer.add(
            "train",
            7,
            *consumed(trajectory, make("train/1/t0/1", reward=None, success=None, stop_reason="failed", loss_mask=np.zeros(5, bool))),
        )
        with Reader(tmp_path) as reader:
            row, other = reader.query()
            assert (row.phase, row.step, row.reward, row.success, row.stop_reason) == ("train", 7, 0.5, True, "stop")
            assert (row.num_prompt_tokens, row.num_new_tokens, row.oldest_version, row.seed) == (3, 2, 0, 2**62 + 1)
            assert row.reward_parts == {"a": math.inf}
            assert (row.reply, row.error) == ("1234", "bad ? text")
            assert (row.state, row.reason, row.attempt, row.life, row.has_payload) == ("consumed", "", 0, LIFE, True)
            assert (other.reward, other.success, other.oldest_version) == (None, None, -1)
            loaded = reader.load(row.sample_id)
            assert loaded.task == trajectory.task
            assert loaded.error == trajectory.error
            assert loaded.life == LIFE
            assert loaded.logp.dtype == np.float32
            np.testing.assert_array_equal(loaded.token_ids, trajectory.token_ids)


def test_a_row_for_every_departure_and_for_nothing_else(tmp_path: Path) -> None:
    """A trajectory counts where the attempt that left is its own."""
    departures = [
        leave("filtered", "filtered", reason="all right"),
        leave("again", attempt=1),
        leave("lost", "failed", attempt=2, reason="worker 3 is gone"),
        leave("unwanted \ud800", "aborted", attempt=-1, life=LIFE[:19], reason="enough"),
    ]
    blocks = [make("filtered"), make("again", reply="old"), make("again", reply="new", attempt=1), make("lost", attempt=1), make("running")]
    with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
        writer.add("train", 3, departures, iter(blocks))
        writer.add("train", 4, [], blocks)
        rows = {row.sample_id: row for row in reader.query()}
        assert list(rows) == ["filtered", "again", "lost", "unwanted ?"]
        assert {name: (row.state, row.reason, row.attempt, row.has_payload) for name, row in rows.items()} == {
            "filtered": ("filtered", "all right", 0, True),
            "again": ("consumed", "", 1, True),
            "lost": ("failed", "worker 3 is gone", 2, False),
            "unwanted ?": ("aborted", "enough", -1, False),
        }
        assert reader.load("again").last_reply == "new"
        assert reader.load("filtered").last_reply == "1234"
        lost, unwanted = rows["lost"], rows["unwanted ?"]
        assert (lost.stop_reason, lost.reward, lost.success, lost.temperature, lost.seed) == ("failed", None, None, None, None)
        assert (lost.num_prompt_tokens, lost.num_new_tokens, lost.oldest_version, lost.reward_parts, lost.metrics) == (0, 0, -1, {}, {})
        assert (lost.life, unwanted.life, unwanted.stop_reason) == (LIFE, LIFE[:19], "aborted")
        with pytest.raises(RunFolderError, match=r"failed \(worker 3 is gone\), and nothing came back of attempt 2"):
            reader.load("lost")
        with pytest.raises(RunFolderError, match=r"aborted \(enough\) before any worker had it"):
            reader.load("unwanted \ud800")
        assert ids(reader, Filter(state="failed")) == ["lost"]
        assert ids(reader, Filter(state="consumed")) == ["again"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=4), max_size=6), st.data())
def test_a_mark_divides_what_was_before_from_what_came_after(batches: list[list[bool]], data: st.DataObject) -> None:
    """Whether samples have payloads (True) or not, and wherever segments end."""
    marked = data.draw(st.integers(0, len(batches)))
    with TemporaryDirectory() as folder, Writer(Path(folder), data.draw(st.sampled_from([1, 600, 10**6]))) as writer:
        marks = [writer.mark()]
        for step, batch in enumerate(batches):
            names = [f"{step}/{i}" for i in range(len(batch))]
            writer.add("train", step, list(map(leave, names)), [make(name) for name, full in zip(names, batch, strict=True) if full])
            marks.append(writer.mark())
        assert writer.supersede(marks[marked]) == sum(map(len, batches[marked:]))
        with Reader(Path(folder)) as reader:
            assert {row.step for row in reader.query()} == {step for step, batch in enumerate(batches[:marked]) if batch}


def test_spans_stay_when_the_run_goes_back(tmp_path: Path) -> None:
    spans = [Span("trainer", "update", 2, 12.5, 13.0), Span("controller", "rollout", 1, 10.25, 12.5)]
    with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
        mark = writer.mark()
        assert reader.spans() == []
        writer.add_spans(spans)
        writer.supersede(mark)
        assert reader.spans() == spans[::-1]


def test_the_same_sample_again_replaces_its_row_and_payload(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
        writer.add("train", 1, *consumed(make("a"), make("b")))
        writer.add("train", 2, *consumed(make("a", reply="9", reward=0.25), make("a", reply="10", reward=0.75, attempt=1)))
        assert reader.count() == 2
        assert reader.row("a").reward == 0.75
        assert reader.load("a").last_reply == "10"
        assert reader.load("b").last_reply == "1234"


def test_filters_orders_and_limits(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        for step in range(4):
            batch = [make(f"{step}/{i}", reward=i / 4, success=i > 2, task=Task(id=f"t{i}", domain="ab"[i % 2])) for i in range(4)]
            writer.add("train", step, *consumed(*batch))
        writer.add("eval", 4, *consumed(make("e", reward=None, stop_reason="deadline", success=None, loss_mask=np.ones(5, bool))))
    with Reader(tmp_path) as reader:
        assert reader.count() == 17
        assert ids(reader, Filter(phase="eval")) == ["e"]
        assert ids(reader, Filter(step=Bounds.at(2))) == ["2/0", "2/1", "2/2", "2/3"]
        assert ids(reader, Filter(step=Bounds.parse("1..2"), reward=Bounds.parse(">=0.75"))) == ["1/3", "2/3"]
        assert ids(reader, Filter(step=Bounds.at(0), reward=Bounds.parse("<0.25"))) == ["0/0"]
        assert ids(reader, Filter(step=Bounds.at(0), domain="b")) == ["0/1", "0/3"]
        assert ids(reader, Filter(stop_reason="deadline")) == ["e"]
        assert ids(reader, Filter(success=True, task_id="t3")) == ["0/3", "1/3", "2/3", "3/3"]
        assert reader.count(Filter(success=False)) == 12
        assert [row.reward for row in reader.query(order="best", limit=5)] == [0.75] * 4 + [0.5]
        assert [row.sample_id for row in reader.query(order="worst", limit=1)] == ["0/0"]
        assert [row.sample_id for row in reader.query(order="newest", limit=2)] == ["e", "3/3"]
        assert [row.sample_id for row in reader.query(order="longest", limit=1)] == ["e"]
        assert ids(reader, Filter(domain="'; DROP TABLE samples; --")) == []


@pytest.mark.parametrize("text", ["", "high", ">", "1..", ">=0.5..1", "0.5 0.6", "nan"])
def test_a_range_that_is_none_is_explained(text: str) -> None:
    with pytest.raises(UserError, match="no range of numbers"):
        Bounds.parse(text)


def test_ranges() -> None:
    assert Bounds.parse(" > -1e-3 ") == Bounds(low=-0.001, low_is_open=True)
    assert Bounds.parse("<=.5") == Bounds(high=0.5)
    assert Bounds.parse("3") == Bounds(3, 3)
    assert Bounds.parse("-1..1") == Bounds(-1, 1)


def test_a_torn_or_damaged_record_is_recognised(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add("train", 1, *consumed(make("first"), make("last")))
    segment = tmp_path / "segment-000000.seg"
    whole = segment.read_bytes()
    with Reader(tmp_path) as reader:
        start, length = reader.row("last").offset, reader.row("last").length
        for size in (start, start + 3, start + 8, len(whole) - 1):
            segment.write_bytes(whole[:size])
            with pytest.raises(RunFolderError, match="torn or damaged"):
                reader.load("last")
            assert reader.load("first").sample_id == "first"
        for place in (start, start + 4, start + 8 + length // 2):
            segment.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(RunFolderError, match="torn or damaged"):
                reader.load("last")
        segment.unlink()
        with pytest.raises(RunFolderError, match="cannot be read"):
            reader.load("last")


def test_segments_roll_and_a_restart_leaves_old_ones_alone(tmp_path: Path) -> None:
    with Writer(tmp_path, segment_bytes=1000) as writer:
        for step in range(6):
            writer.add("train", step, *consumed(make(f"a{step}")))
    before = {path: path.read_bytes() for path in tmp_path.glob("*.seg")}
    assert len(before) > 2
    with Writer(tmp_path) as writer:
        writer.add("train", 9, *consumed(make("b")))
    assert all(path.read_bytes() == content for path, content in before.items())
    with Reader(tmp_path) as reader:
        assert [reader.load(row.sample_id).sample_id for row in reader.query()] == [*(f"a{step}" for step in range(6)), "b"]


def test_a_batch_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
        writer.add("train", 1, *consumed(make("a")))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", disk_full)
            with pytest.raises(OSError, match="No space"):
                writer.add("train", 2, *consumed(make("b")))
        with pytest.raises(OverflowError):
            writer.add("train", 2, *consumed(make("c"), make("d", seed=2**64)))
        writer.add("train", 3, *consumed(make("e")))
        assert ids(reader, Filter()) == ["a", "e"]
        assert reader.load("a").sample_id == "a"
        assert reader.load("e").sample_id == "e"


def test_a_second_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.0)
    with Writer(tmp_path), pytest.raises(RunFolderError, match="one writer"):
        Writer(tmp_path)
    Writer(tmp_path).close()


def test_a_writer_that_goes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Writer(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: first.close())
    Writer(tmp_path).close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    Writer(tmp_path).close()
    db = sqlite3.connect(tmp_path / "index.sqlite")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(RunFolderError, match=r"schema 99.*Upgrade"):
        Reader(tmp_path)
    with pytest.raises(RunFolderError, match=r"schema 99.*Upgrade"):
        Writer(tmp_path)


def test_what_is_no_store_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no trajectories yet"):
        Reader(tmp_path)
    (tmp_path / "index.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(RunFolderError, match="no trajectory index"):
        Reader(tmp_path)
    with Writer(tmp_path / "store") as writer, Reader(tmp_path / "store") as reader:
        writer.add("train", 1, *consumed(make("train/1/t0/0")))
        with pytest.raises(RunFolderError, match=r"no sample 't0'.*train/1/t0/0"):
            reader.load("t0")


def test_a_finished_store_can_be_read_from_a_read_only_folder(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add("train", 1, *consumed(make("a")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.sqlite", "segment-000000.seg"]
    tmp_path.chmod(0o555)
    try:
        with Reader(tmp_path) as reader:
            assert reader.load("a").sample_id == "a"
    finally:
        tmp_path.chmod(0o755)


def test_reading_while_another_process_writes_and_after_it_was_killed(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "0\n"
        seen = 0
        with Reader(tmp_path) as reader:
            deadline = time.monotonic() + 30
            while seen < 200 and time.monotonic() < deadline:
                rows = reader.query(order="newest", limit=8)
                assert len({row.step for row in rows}) == 1  # a batch appears whole
                for row in rows:
                    assert reader.load(row.sample_id).last_reply == row.reply
                assert reader.count() >= seen
                seen = reader.count()
        assert seen >= 200
    finally:
        writer.send_signal(signal.SIGKILL)
        written = writer.stdout.read().split()
        writer.wait()
        writer.stdout.close()
    with Reader(tmp_path) as reader:
        assert reader.count() >= 8 * len(written)
        for row in reader.query(limit=50):
            assert reader.load(row.sample_id).last_reply == row.reply
        total = reader.count()
    with Writer(tmp_path) as again, Reader(tmp_path) as reader:
        again.add("train", 0, *consumed(make("after")))
        assert reader.count() == total + 1


def test_an_open_read_does_not_hold_the_writer_up(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add("train", 0, *consumed(*[make(str(i)) for i in range(20)]))
        reading = sqlite3.connect(f"{(tmp_path / 'index.sqlite').as_uri()}?mode=ro", uri=True)
        cursor = reading.execute("SELECT sample_id FROM samples")
        cursor.fetchone()  # a read transaction is open from here on
        start = time.monotonic()
        for step in range(5):
            writer.add("train", step, *consumed(replace(make("x"), sample_id=f"x{step}")))
        assert time.monotonic() - start < 5.0
        assert len(cursor.fetchall()) == 19
        reading.close()


class TestGoingBack:
    def test_what_came_after_the_mark_is_hidden_until_it_is_written_again(self, tmp_path: Path) -> None:
        with Writer(tmp_path, segment_bytes=1000) as writer:
            writer.add("train", 1, *consumed(make("a", reply="1"), make("b")))
            mark = writer.mark()
            for step in range(2, 6):  # over several segments
                writer.add("train", step, *consumed(make(f"c{step}"), make(f"d{step}")))
        with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
            assert writer.supersede(mark) == 8
            assert writer.supersede(mark) == 0
            assert ids(reader, Filter()) == ["a", "b"]
            assert reader.count() == 2
            assert reader.count(Filter(superseded=None)) == 10
            assert reader.count(Filter(superseded=True, step=Bounds.at(3))) == 2
            assert reader.load("c3").sample_id == "c3"
            writer.add("train", 2, *consumed(make("c2", reply="again")))
            assert ids(reader, Filter()) == ["a", "b", "c2"]
            assert reader.load("c2").last_reply == "again"
            assert reader.count(Filter(superseded=None)) == 10
            later = writer.mark()
            assert later > mark
            assert writer.supersede(later) == 0
            assert writer.supersede(mark) == 1
            assert writer.supersede(0) == 2
            assert ids(reader, Filter()) == []

    @pytest.mark.parametrize("num_before", [0, 1, 3])
    def test_a_mark_is_between_the_batches(self, num_before: int, tmp_path: Path) -> None:
        with Writer(tmp_path, segment_bytes=1) as writer, Reader(tmp_path) as reader:  # a segment for every batch
            for step in range(num_before):
                writer.add("train", step, *consumed(make(f"a{step}")))
            mark = writer.mark()
            writer.add("train", 9, *consumed(make("b")))
            assert writer.supersede(mark) == 1
            assert ids(reader, Filter()) == [f"a{step}" for step in range(num_before)]

    @pytest.mark.parametrize("schema", [1, 2])
    def test_a_store_of_an_earlier_schema_is_read_and_written(self, schema: int, tmp_path: Path) -> None:
        write_earlier_store(tmp_path, schema)
        gone = ["b"] if schema == 2 else []
        with Reader(tmp_path) as reader:
            assert [row.sample_id for row in reader.query(Filter(superseded=None), order="newest")] == ["b", "a"]
            assert reader.count(Filter(reward=Bounds.at(0.25), superseded=None)) == 1
            assert ids(reader, Filter(superseded=True)) == gone
            row = reader.row("a")
            assert (row.state, row.reason, row.attempt, row.life, row.superseded) == ("consumed", "", 0, b"", False)
            assert (row.seed, row.temperature, row.reward_parts) == (5, 1.0, {"a": 1.0})
            assert reader.load("b").last_reply == "b"
            assert [life.life for life in reader.lives()] == [b"", b""]
            assert reader.spans() == []
        with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
            assert reader.row("a") == row
            mark = writer.mark()
            writer.add("train", 2, *consumed(make("c")))
            writer.add_spans([Span("trainer", "update", 2, 1.0, 2.0)])
            assert writer.supersede(mark) == 1
            assert ids(reader, Filter(superseded=True)) == [*gone, "c"]
            assert reader.load("b").last_reply == "b"
            assert len(reader.spans()) == 1

    @pytest.mark.parametrize("moment", ["payloads", "index", "commit"])
    def test_a_writer_that_is_killed_in_the_middle(self, moment: str, tmp_path: Path) -> None:
        def die(*values: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            writer = Writer(tmp_path)
            writer.add("train", 1, *consumed(make("a"), make("b")))
            os.write(tell, str(writer.mark()).encode())
            writer.add("train", 2, *consumed(make("c")))
            if moment == "payloads":
                os.fsync = die
            else:
                start = "INSERT" if moment == "index" else "COMMIT"
                writer._db.set_trace_callback(lambda sql: die() if sql.startswith(start) else None)
            writer.add("train", 3, *consumed(make("d"), make("e")))
            os._exit(1)
        os.close(tell)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        mark = int(os.read(told, 100))
        os.close(told)
        with (tmp_path / "segment-000000.seg").open("ab") as segment:
            segment.write(b"\x07half a record")
        with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
            assert ids(reader, Filter()) == ["a", "b", "c"]
            assert writer.supersede(mark) == 1
            writer.add("train", 2, *consumed(make("c", reply="again"), make("d")))
            assert ids(reader, Filter()) == ["a", "b", "c", "d"]
            assert [reader.load(name).last_reply for name in "abcd"] == ["1234", "1234", "again", "1234"]

    def test_the_recorder_marks_and_supersedes(self, tmp_path: Path) -> None:
        worker = RecorderWorker(RankInfo("recorder", 0, 1, "cpu"), folder=str(tmp_path))
        assert worker.add(None, "train", 1, [leave("a")], [make("a")]) == 1
        mark = worker.mark(None)
        assert worker.add(None, "train", 2, [leave("b"), leave("c"), leave("d", "aborted")], [make("b")], [make("c"), make("e")]) == 3
        assert worker.add_spans(None, [Span("trainer", "update", 2, 1.0, 2.0)]) == 1
        assert worker.supersede(None, mark) == 3
        worker.close()
        with Reader(tmp_path) as reader:
            assert ids(reader, Filter()) == ["a"]
            assert [row.has_payload for row in reader.query(Filter(superseded=True))] == [True, True, False]
            assert reader.spans() == [Span("trainer", "update", 2, 1.0, 2.0)]
