"""The trajectory store: upserts, filters, torn records, one writer, and readers that never disturb it."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from record_samples import make_trajectory as make

from drumroll.errors import RunFolderError, UserError
from drumroll.record import files
from drumroll.record.store import Bounds, Filter, Reader, Writer
from drumroll.types import RankInfo, Task
from drumroll.workers.recorder import RecorderWorker

WRITE_UNTIL_KILLED = """
import sys, itertools
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from record_samples import make_trajectory
from drumroll.record.store import Writer
writer = Writer(Path(sys.argv[1]), segment_bytes=4096)
for step in itertools.count():
    writer.add([make_trajectory(f"train/{step}/t{i}/0", reply=f"{step}-{i}") for i in range(8)], "train", step)
    print(step, flush=True)
"""


def ids(reader: Reader, where: Filter) -> list[str]:
    return [row.sample_id for row in reader.query(where)]


def test_rows_and_payloads(tmp_path: Path) -> None:
    trajectory = make(reward=np.float32(0.5), reward_parts={"a": math.inf}, error="bad \ud800 text")
    with Writer(tmp_path) as writer:
        writer.add(
            [trajectory, make("train/1/t0/1", reward=None, success=None, stop_reason="failed", loss_mask=np.zeros(5, bool))], "train", 7
        )
        with Reader(tmp_path) as reader:
            row, other = reader.query()
            assert (row.phase, row.step, row.reward, row.success, row.stop_reason) == ("train", 7, 0.5, True, "stop")
            assert (row.num_prompt_tokens, row.num_new_tokens, row.oldest_version, row.seed) == (3, 2, 0, 2**62 + 1)
            assert row.reward_parts == {"a": math.inf}
            assert (row.reply, row.error) == ("1234", "bad ? text")
            assert (other.reward, other.success, other.oldest_version) == (None, None, -1)
            loaded = reader.load(row.sample_id)
            assert loaded.task == trajectory.task
            assert loaded.error == trajectory.error
            assert loaded.logp.dtype == np.float32
            np.testing.assert_array_equal(loaded.token_ids, trajectory.token_ids)


def test_the_same_sample_again_replaces_its_row_and_payload(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
        writer.add([make("a"), make("b")], "train", 1)
        writer.add([make("a", reply="9", reward=0.25), make("a", reply="10", reward=0.75)], "train", 2)
        assert reader.count() == 2
        assert reader.row("a").reward == 0.75
        assert reader.load("a").last_reply == "10"
        assert reader.load("b").last_reply == "1234"


def test_filters_orders_and_limits(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        for step in range(4):
            batch = [make(f"{step}/{i}", reward=i / 4, success=i > 2, task=Task(id=f"t{i}", domain="ab"[i % 2])) for i in range(4)]
            writer.add(batch, "train", step)
        writer.add([make("e", reward=None, stop_reason="deadline", success=None, loss_mask=np.ones(5, bool))], "eval", 4)
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
        writer.add([make("first"), make("last")], "train", 1)
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
            writer.add([make(f"a{step}")], "train", step)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.seg")}
    assert len(before) > 2
    with Writer(tmp_path) as writer:
        writer.add([make("b")], "train", 9)
    assert all(path.read_bytes() == content for path, content in before.items())
    with Reader(tmp_path) as reader:
        assert [reader.load(row.sample_id).sample_id for row in reader.query()] == [*(f"a{step}" for step in range(6)), "b"]


def test_a_batch_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
        writer.add([make("a")], "train", 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", disk_full)
            with pytest.raises(OSError, match="No space"):
                writer.add([make("b")], "train", 2)
        with pytest.raises(OverflowError):
            writer.add([make("c"), make("d", seed=2**64)], "train", 2)
        writer.add([make("e")], "train", 3)
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
        writer.add([make("train/1/t0/0")], "train", 1)
        with pytest.raises(RunFolderError, match=r"no sample 't0'.*train/1/t0/0"):
            reader.load("t0")


def test_a_finished_store_can_be_read_from_a_read_only_folder(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add([make("a")], "train", 1)
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
        again.add([make("after")], "train", 0)
        assert reader.count() == total + 1


def test_an_open_read_does_not_hold_the_writer_up(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add([make(str(i)) for i in range(20)], "train", 0)
        reading = sqlite3.connect(f"{(tmp_path / 'index.sqlite').as_uri()}?mode=ro", uri=True)
        cursor = reading.execute("SELECT sample_id FROM samples")
        cursor.fetchone()  # a read transaction is open from here on
        start = time.monotonic()
        for step in range(5):
            writer.add([replace(make("x"), sample_id=f"x{step}")], "train", step)
        assert time.monotonic() - start < 5.0
        assert len(cursor.fetchall()) == 19
        reading.close()


class TestGoingBack:
    def test_what_came_after_the_mark_is_hidden_until_it_is_written_again(self, tmp_path: Path) -> None:
        with Writer(tmp_path, segment_bytes=1000) as writer:
            writer.add([make("a", reply="1"), make("b")], "train", 1)
            mark = writer.mark()
            for step in range(2, 6):  # over several segments
                writer.add([make(f"c{step}"), make(f"d{step}")], "train", step)
        with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
            assert writer.supersede(mark) == 8
            assert writer.supersede(mark) == 0
            assert ids(reader, Filter()) == ["a", "b"]
            assert reader.count() == 2
            assert reader.count(Filter(superseded=None)) == 10
            assert reader.count(Filter(superseded=True, step=Bounds.at(3))) == 2
            assert reader.load("c3").sample_id == "c3"
            writer.add([make("c2", reply="again")], "train", 2)
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
                writer.add([make(f"a{step}")], "train", step)
            mark = writer.mark()
            writer.add([make("b")], "train", 9)
            assert writer.supersede(mark) == 1
            assert ids(reader, Filter()) == [f"a{step}" for step in range(num_before)]

    def test_a_store_of_the_first_schema_is_read_and_written(self, tmp_path: Path) -> None:
        with Writer(tmp_path) as writer:
            writer.add([make("a"), make("b", reward=0.25)], "train", 1)
        db = sqlite3.connect(tmp_path / "index.sqlite")
        db.executescript("ALTER TABLE samples DROP COLUMN superseded; PRAGMA user_version = 1;")
        db.close()
        with Reader(tmp_path) as reader:
            assert [row.sample_id for row in reader.query(order="newest")] == ["b", "a"]
            assert reader.count(Filter(reward=Bounds.at(0.25))) == 1
            assert reader.count(Filter(superseded=True)) == 0
            assert reader.row("a").superseded is False
            assert reader.load("b").reward == 0.25
        with Writer(tmp_path) as writer, Reader(tmp_path) as reader:
            mark = writer.mark()
            writer.add([make("c")], "train", 2)
            assert writer.supersede(mark) == 1
            assert ids(reader, Filter()) == ["a", "b"]

    @pytest.mark.parametrize("moment", ["payloads", "index", "commit"])
    def test_a_writer_that_is_killed_in_the_middle(self, moment: str, tmp_path: Path) -> None:
        def die(*values: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            writer = Writer(tmp_path)
            writer.add([make("a"), make("b")], "train", 1)
            os.write(tell, str(writer.mark()).encode())
            writer.add([make("c")], "train", 2)
            if moment == "payloads":
                os.fsync = die
            else:
                start = "INSERT" if moment == "index" else "COMMIT"
                writer._db.set_trace_callback(lambda sql: die() if sql.startswith(start) else None)
            writer.add([make("d"), make("e")], "train", 3)
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
            writer.add([make("c", reply="again"), make("d")], "train", 2)
            assert ids(reader, Filter()) == ["a", "b", "c", "d"]
            assert [reader.load(name).last_reply for name in "abcd"] == ["1234", "1234", "again", "1234"]

    def test_the_recorder_marks_and_supersedes(self, tmp_path: Path) -> None:
        worker = RecorderWorker(RankInfo("recorder", 0, 1, "cpu"), folder=str(tmp_path))
        worker.add(None, "train", 1, [make("a")])
        mark = worker.mark(None)
        worker.add(None, "train", 2, [make("b")], [make("c")])
        assert worker.supersede(mark) == 2
        worker.close()
        with Reader(tmp_path) as reader:
            assert ids(reader, Filter()) == ["a"]
