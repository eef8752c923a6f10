"""Checkpoints: there whole or not at all whenever the writer dies, damage always noticed, the right ones kept."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.errors import CheckpointError, DiskNearlyFull
from drumroll.record import checkpoint as checkpoint_module
from drumroll.record.checkpoint import RESERVE_BYTES, Checkpoint, CheckpointStore

MEMORY = fsspec.filesystem("memory")
WHOLE = 0


def payload(seed: int, size: int = 300) -> bytes:
    return random.Random(seed).randbytes(size)


def fill_with(seed: int) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "rank-0.bin").write_bytes(payload(seed))
        (folder / "scheduler.bin").write_bytes(payload(seed + 1, 90))

    return fill


def nothing(folder: Path) -> None:
    """A payload of no files."""


def write(store: CheckpointStore, step: int, **options: Any) -> None:
    store.write(f"step-{step:06d}", fill_with(step), {"step": step}, **options)


def is_whole(checkpoint: Checkpoint) -> bool:
    step = checkpoint.state["step"]
    return (
        checkpoint.name == f"step-{step:06d}"
        and (checkpoint.path / "trainer" / "rank-0.bin").read_bytes() == payload(step)
        and (checkpoint.path / "scheduler.bin").read_bytes() == payload(step + 1, 90)
    )


def newest(root: str | Path) -> tuple[str, list[str]]:
    """Name of the newest checkpoint, which is whole as are all others, and of those that were skipped."""
    with CheckpointStore(root) as store:
        found = store.newest_good()
        assert found is not None
        checkpoint, skipped = found
        assert is_whole(checkpoint)
        for name in store.names() if not skipped else ():
            store.verify(name)
        return checkpoint.name, [each.name for each in skipped]


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def in_child(action: Callable[[], None]) -> int:
    """Do it in a forked process. Returns 0 when it came to its end, and the signal when it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = WHOLE
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == WHOLE, "the child failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else WHOLE


@pytest.fixture
def memory() -> Iterator[str]:
    path = f"/{uuid4().hex}"
    yield f"memory:/{path}"
    if MEMORY.exists(path):
        MEMORY.rm(path, recursive=True)


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> str:
    return str(tmp_path / "new" / "checkpoints") if request.param == "local" else memory


class TestRoundTrip:
    def test_what_was_written_is_read(self, root: str) -> None:
        state = {"loss": math.nan, "best": -math.inf, "lr": 0.1 + 0.2, "zero": -0.0, "seed": 2**80, "order": (1, "b"), "none": None, "": {}}
        with CheckpointStore(root) as store:
            saved = store.write("warm", fill_with(7), state, pinned=True)
        assert (saved.name, saved.num_bytes > 390, saved.seconds > 0) == ("warm", True, True)
        with CheckpointStore(root) as store:
            assert store.names() == ["warm"]
            store.verify("warm")
            loaded = store.load("warm")
            assert repr(loaded.state) == repr({**state, "order": [1, "b"]})
            assert (loaded.path / "trainer" / "rank-0.bin").read_bytes() == payload(7)
            found = store.newest_good()
            assert found is not None
            assert (found[0].name, found[0].time, found[1]) == ("warm", loaded.time, [])

    @settings(max_examples=40, deadline=None)
    @given(
        st.dictionaries(
            st.text(),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                max_leaves=12,
            ),
        )
    )
    def test_any_state_of_plain_values_comes_back_exactly(self, state: dict[str, Any]) -> None:
        with CheckpointStore(f"memory://{uuid4().hex}") as store:
            store.write("a", nothing, state)
            assert repr(store.load("a").state) == repr(state)

    @pytest.mark.parametrize(
        ("state", "where"),
        [({"a": [1, {2: 3}]}, r"state\.a\[1\]: the key 2"), ({"a": {"b": {1, 2}}}, r"state\.a\.b: a set"), ({"$float": 1}, "the key")],
    )
    def test_other_states_are_refused_with_their_place(self, state: dict[str, Any], where: str, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path) as store, pytest.raises(CheckpointError, match=where):
            store.write("a", nothing, state)
        assert contents(tmp_path) == {}

    @pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "a~1", "latest.json"])
    def test_names_that_are_none(self, name: str, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path) as store, pytest.raises(CheckpointError, match="no name"):
            store.write(name, nothing, {})

    def test_another_one_of_the_same_name_takes_its_place(self, root: str) -> None:
        with CheckpointStore(root, keep_last=3) as store:
            write(store, 1)
            write(store, 2)
            store.write("step-000001", fill_with(1), {"step": 1, "again": True})
            assert store.names() == ["step-000002", "step-000001"]
            assert store.load("step-000001").state["again"]
        assert newest(root) == ("step-000001", [])

    def test_a_folder_of_somebody_else_stays(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("keep")
        with CheckpointStore(tmp_path, keep_last=1) as store:
            with pytest.raises(CheckpointError, match="'mine' that is no checkpoint"):
                store.write("mine", nothing, {})
            for step in range(3):
                write(store, step)
            assert store.names() == ["step-000002"]
        assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"

    def test_a_newer_format_and_a_name_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with CheckpointStore(tmp_path) as store:
            write(store, 1)
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint_module, "FORMAT", 2)
                write(store, 2)
            with pytest.raises(CheckpointError, match=r"format 2.*upgrade"):
                store.load("step-000002")
            with pytest.raises(CheckpointError, match="There are: step-000001"):
                store.load("step-000009")
        assert newest(tmp_path) == ("step-000001", ["step-000002"])

    @pytest.mark.parametrize("url", ["nothing://bucket/run", "memory2:///x"])
    def test_a_url_that_nothing_opens(self, url: str) -> None:
        with pytest.raises(CheckpointError, match="no place for checkpoints"):
            CheckpointStore(url)

    def test_a_file_url_is_a_folder(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path.as_uri()) as store:
            write(store, 1)
        assert (tmp_path / "step-000001" / "manifest.json").exists()


class TestCrash:
    """The writer dies before each step that changes the disk, one after the other."""

    @staticmethod
    def die_at(change: int) -> None:
        count = itertools.count(1)

        def hook(event: str, values: tuple[Any, ...]) -> None:
            changes = event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove")
            if (changes or (event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR))) and next(count) == change:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    @pytest.mark.parametrize("again", [False, True], ids=["a new name", "the name of an older one"])
    def test_the_one_before_or_the_new_one_is_whole(self, again: bool, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path / "start", keep_last=2) as store:
            for step in (1, 3, 2) if again else (1, 2):
                write(store, step)
        steps = []
        for change in itertools.count(1):
            root = tmp_path / str(change)
            shutil.copytree(tmp_path / "start", root)

            def write_and_die(root: Path = root, change: int = change) -> None:
                store = CheckpointStore(root, keep_last=2)
                self.die_at(change)
                write(store, 3)

            ended = in_child(write_and_die)
            name, skipped = newest(root)
            assert skipped == []
            steps.append(name)
            with CheckpointStore(root, keep_last=2) as store:
                write(store, 3)
                assert store.names() == ["step-000002", "step-000003"]
            assert len(list(root.iterdir())) == 1 + 2
            if ended == WHOLE:
                break
        assert len(steps) > 10
        assert steps == sorted(steps)
        assert set(steps) == {"step-000002", "step-000003"}

    def test_uploads(self, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        class Killed(BaseException):
            pass

        def kill_at(change: int, patch: pytest.MonkeyPatch) -> None:
            count = itertools.count(1)
            for method in ("put_file", "pipe_file", "rm_file", "rm", "makedirs"):
                original = getattr(type(MEMORY), method)

                def dying(*arguments: Any, original: Any = original, **options: Any) -> Any:
                    if next(count) >= change:  # a dead process does nothing more
                        raise Killed
                    return original(*arguments, **options)

                patch.setattr(type(MEMORY), method, dying)

        outcomes = []
        for change in itertools.count(1):
            root = f"{memory}/{change}"
            with CheckpointStore(root, keep_last=2) as store:
                write(store, 1)
                write(store, 2)
            is_over = True
            with monkeypatch.context() as patch, CheckpointStore(root, keep_last=2) as store:
                kill_at(change, patch)
                try:
                    write(store, 3)
                except Killed:
                    is_over = False
            name, skipped = newest(root)
            assert skipped == []
            outcomes.append(name)
            with CheckpointStore(root, keep_last=2) as store:
                write(store, 3)
                assert store.names() == ["step-000002", "step-000003"]
            assert len(MEMORY.find(root)) == 1 + 2 * 4
            if is_over:
                break
        assert len(outcomes) > 5
        assert outcomes == sorted(outcomes)
        assert set(outcomes) == {"step-000002", "step-000003"}

    def test_an_error_of_the_payload_leaves_everything_as_it_was(self, root: str) -> None:
        def fail(folder: Path) -> None:
            (folder / "half").write_bytes(b"1")
            raise KeyError("rank 1 is gone")

        with CheckpointStore(root) as store:
            write(store, 1)
            with pytest.raises(KeyError, match="rank 1"):
                store.write("step-000002", fail, {})
            assert store.names() == ["step-000001"]
        assert newest(root) == ("step-000001", [])

    def test_an_upload_that_fails(self, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("503 Slow Down")

        with CheckpointStore(memory) as store:
            write(store, 1)
            with monkeypatch.context() as patch:
                patch.setattr(type(MEMORY), "put_file", fail)
                with pytest.raises(CheckpointError, match=r"step-000002.*uploaded.*503"):
                    write(store, 2)
            write(store, 2)
        assert newest(memory) == ("step-000002", [])


class TestDamage:
    @pytest.fixture
    def two(self, tmp_path: Path) -> Path:
        with CheckpointStore(tmp_path) as store:
            write(store, 1)
            write(store, 2)
        return tmp_path

    @staticmethod
    def files_of_the_newest(root: Path) -> list[Path]:
        files = [root / "latest.json", *sorted(path for path in (root / "step-000002").rglob("*") if path.is_file())]
        assert [path.name for path in files] == ["latest.json", "manifest.json", "scheduler.bin", "state.json", "rank-0.bin"]
        return files

    @staticmethod
    def expected(path: Path) -> tuple[str, list[str]]:
        return ("step-000002", ["latest.json"]) if path.name == "latest.json" else ("step-000001", ["step-000002"])

    @pytest.mark.parametrize("kind", ["truncated", "one bit flipped"])
    def test_damage_anywhere_is_noticed(self, kind: str, two: Path) -> None:
        draw = random.Random(kind)
        for path, _ in itertools.product(self.files_of_the_newest(two), range(10)):
            offset = draw.randrange(path.stat().st_size)
            whole = path.read_bytes()
            flipped = whole[:offset] + bytes([whole[offset] ^ 1 << draw.randrange(8)]) + whole[offset + 1 :]
            path.write_bytes(whole[:offset] if kind == "truncated" else flipped)
            assert newest(two) == self.expected(path), f"{path.name} at {offset}"
            path.write_bytes(whole)
        assert newest(two) == ("step-000002", [])

    def test_a_file_that_is_gone_is_noticed(self, two: Path) -> None:
        for path in self.files_of_the_newest(two)[1:]:
            whole = path.read_bytes()
            path.unlink()
            assert newest(two) == ("step-000001", ["step-000002"])
            path.write_bytes(whole)
        (two / "latest.json").unlink()
        assert newest(two) == ("step-000002", [])
        shutil.rmtree(two / "step-000002")
        assert newest(two) == ("step-000001", [])

    def test_every_wrong_file_is_named(self, two: Path) -> None:
        (two / "step-000002" / "scheduler.bin").unlink()
        (two / "step-000002" / "state.json").write_bytes(b"{}")
        (two / "step-000002" / "trainer" / "rank-0.bin").write_bytes(payload(9))
        with CheckpointStore(two) as store:
            for look in (store.verify, store.load):
                with pytest.raises(CheckpointError) as caught:
                    look("step-000002")
                for part in ("step-000002", "scheduler.bin is missing", "state.json has 2 bytes", "rank-0.bin has the right size"):
                    assert part in str(caught.value)
            store.verify("step-000001")

    def test_elsewhere(self, memory: str) -> None:
        with CheckpointStore(memory) as store:
            write(store, 1)
            write(store, 2)
        path = f"{memory}/step-000002/trainer/rank-0.bin"
        MEMORY.pipe_file(path, payload(2)[:-1])
        assert newest(memory) == ("step-000001", ["step-000002"])
        with CheckpointStore(memory) as store, pytest.raises(CheckpointError, match=r"rank-0\.bin has 299 bytes"):
            store.verify("step-000002")
        MEMORY.pipe_file(path, payload(2))
        MEMORY.pipe_file(f"{memory}/latest.json", b"{}")
        assert newest(memory) == ("step-000002", ["latest.json"])

    def test_a_damaged_one_does_not_count_and_can_be_written_again(self, two: Path) -> None:
        (two / "step-000002" / "state.json").write_bytes(b"{}")
        with CheckpointStore(two, keep_last=1) as store:
            assert store.newest_good() is not None
            write(store, 3)
            assert store.names() == ["step-000002", "step-000003"]
            write(store, 2)
            assert store.names() == ["step-000002"]
        assert newest(two) == ("step-000002", [])

    def test_none_that_can_be_used_is_an_error_that_names_each(self, two: Path) -> None:
        (two / "step-000001" / "state.json").unlink()
        (two / "step-000002" / "manifest.json").write_bytes(b"")
        with CheckpointStore(two) as store, pytest.raises(CheckpointError) as caught:
            store.newest_good()
        for part in (str(two), "step-000001", "state.json is missing", "step-000002", "manifest.json is not as it was written"):
            assert part in str(caught.value)

    def test_all_gone_but_the_pointer(self, two: Path) -> None:
        for step in (1, 2):
            shutil.rmtree(two / f"step-00000{step}")
        with CheckpointStore(two) as store, pytest.raises(CheckpointError, match="step-000002: is gone"):
            store.newest_good()

    def test_none_ever(self, root: str) -> None:
        with CheckpointStore(root) as store:
            assert store.newest_good() is None
            assert store.names() == []


def write_to_a_full_disk(folder: Path) -> None:
    (folder / "half").write_bytes(b"1")
    Path("/dev/full").write_bytes(b"1")


def fail_in_another_process(folder: Path) -> None:
    raise RuntimeError(f"actor_train rank 1: OSError: {os.strerror(errno.ENOSPC)}")


class TestFullDisk:
    @pytest.mark.parametrize("fill", [write_to_a_full_disk, fail_in_another_process])
    def test_no_space_left_halfway(self, fill: Callable[[Path], None], root: str) -> None:
        with CheckpointStore(root) as store:
            write(store, 1)
            with pytest.raises(DiskNearlyFull, match=r"step-000002.*for want of space.*intact"):
                store.write("step-000002", fill, {"step": 2})
            assert newest(root) == ("step-000001", [])
            write(store, 2)
        assert newest(root) == ("step-000002", [])

    @pytest.mark.parametrize(
        ("limit", "state"),
        [(200, {"step": 2}), (2000, {"step": 2, "x": "x" * 3000}), (320, {"step": 2})],
        ids=["payload", "state", "manifest"],
    )
    def test_a_file_that_cannot_grow(self, limit: int, state: dict[str, Any], tmp_path: Path) -> None:
        with CheckpointStore(tmp_path) as store:
            write(store, 1)
        before = contents(tmp_path)

        def try_it() -> None:
            with CheckpointStore(tmp_path) as store:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                with pytest.raises(DiskNearlyFull, match="want of space"):
                    store.write("step-000002", fill_with(2), state)

        assert in_child(try_it) == WHOLE
        assert contents(tmp_path) == before
        assert newest(tmp_path) == ("step-000001", [])

    def test_no_space_for_the_pointer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        replace = os.replace

        def replace_unless_full(source: Path, target: Path) -> None:
            if target.name == "latest.json":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, target)

        with CheckpointStore(tmp_path) as store:
            write(store, 1)
            before = contents(tmp_path)
            monkeypatch.setattr(os, "replace", replace_unless_full)
            with pytest.raises(DiskNearlyFull):
                write(store, 2)
        assert contents(tmp_path) == before

    def test_a_disk_that_is_nearly_full_is_left_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def free(num_bytes: int) -> None:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, num_bytes))  # type: ignore[attr-defined]

        def refuse(folder: Path) -> None:
            pytest.fail("nothing may be written")

        free(RESERVE_BYTES - 1)
        with CheckpointStore(tmp_path) as store, pytest.raises(DiskNearlyFull, match="not begun"):
            store.write("step-000001", refuse, {})
        assert contents(tmp_path) == {}
        free(RESERVE_BYTES + 1000)
        with CheckpointStore(tmp_path) as store:
            size = store.write("step-000001", fill_with(1), {"step": 1}).num_bytes
            before = contents(tmp_path)
            free(RESERVE_BYTES + size)
            with pytest.raises(DiskNearlyFull, match="not begun"):
                store.write_async("step-000002", refuse, {})
            assert store.wait() is None
        with CheckpointStore(tmp_path) as store, pytest.raises(DiskNearlyFull, match="not begun"):  # the size is known from the disk
            store.write("step-000002", refuse, {})
        assert contents(tmp_path) == before

    def test_another_error_of_the_disk_is_no_want_of_space(self, tmp_path: Path) -> None:
        tmp_path.joinpath("file").write_text("")
        with CheckpointStore(tmp_path / "file" / "checkpoints") as store, pytest.raises(CheckpointError, match="Not a directory") as caught:
            write(store, 1)
        assert not isinstance(caught.value, DiskNearlyFull)


class TestRetention:
    def test_by_count(self, root: str) -> None:
        with CheckpointStore(root, keep_last=2) as store:
            for step in range(1, 6):
                write(store, step)
            assert store.names() == ["step-000004", "step-000005"]

    @pytest.mark.parametrize(("higher_is_better", "kept"), [(True, [2, 5, 7, 8]), (False, [1, 6, 7, 8])])
    def test_by_score(self, higher_is_better: bool, kept: list[int], tmp_path: Path) -> None:
        scores = [0.1, 0.9, 0.5, math.nan, 0.8, 0.2, None, 0.4]
        with CheckpointStore(tmp_path, keep_last=2, keep_best=2, higher_is_better=higher_is_better) as store:
            for step, score in enumerate(scores, 1):
                write(store, step, score=score)
            assert store.names() == [f"step-{step:06d}" for step in kept]

    def test_pinned_ones_stay_and_take_no_place(self, root: str) -> None:
        with CheckpointStore(root, keep_last=1) as store:
            write(store, 1)
            write(store, 2, pinned=True)
            assert store.names() == ["step-000001", "step-000002"]
            write(store, 3)
            write(store, 4)
            assert store.names() == ["step-000002", "step-000004"]

    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(st.tuples(st.none() | st.integers(0, 3), st.booleans()), max_size=8),
        st.integers(1, 3),
        st.integers(0, 2),
        st.booleans(),
    )
    def test_what_stays_depends_on_what_was_written_alone(
        self, written: list[tuple[int | None, bool]], keep_last: int, keep_best: int, higher_is_better: bool
    ) -> None:
        root = f"memory://{uuid4().hex}"
        for step, (score, pinned) in enumerate(written):  # every one by a new process
            with CheckpointStore(root, keep_last=keep_last, keep_best=keep_best, higher_is_better=higher_is_better) as store:
                store.write(f"step-{step:06d}", nothing, {}, score, pinned=pinned)
        free = [step for step, (_, pinned) in enumerate(written) if not pinned]
        sign = 1 if higher_is_better else -1
        rated = [step for step in free if written[step][0] is not None]
        best = sorted(rated, key=lambda step: (sign * (written[step][0] or 0), step))[max(0, len(rated) - keep_best) :]
        kept = {step for step, (_, pinned) in enumerate(written) if pinned} | set(free[-keep_last:]) | set(best)
        with CheckpointStore(root) as store:
            assert store.names() == [f"step-{step:06d}" for step in sorted(kept)]

    def test_a_folder_that_cannot_be_removed_is_only_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(path: Path) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        with CheckpointStore(tmp_path, keep_last=1) as store:
            write(store, 1)
            monkeypatch.setattr(shutil, "rmtree", fail)
            with pytest.warns(UserWarning, match="'step-000001' could not be removed"):
                write(store, 2)
            assert store.names() == ["step-000002"]


class TestInTheBackground:
    def test_at_most_one_is_in_flight(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[str] = []
        begun, released = threading.Event(), threading.Event()
        join = threading.Thread.join

        def fill(folder: Path) -> None:
            order.append(f"begin {threading.current_thread().name}")
            begun.set()
            assert released.wait(30)
            order.append(f"end {threading.current_thread().name}")

        def join_and_release(thread: threading.Thread, timeout: float | None = None) -> None:
            if not released.is_set():
                order.append("wait")
                released.set()
            join(thread, timeout)

        with CheckpointStore(tmp_path) as store:
            state = {"step": 1}
            store.write_async("a", fill, state)
            state["step"] = 2
            assert begun.wait(30)
            assert store.is_writing
            monkeypatch.setattr(threading.Thread, "join", join_and_release)
            store.write_async("b", fill, state)
            saved = store.wait()
            assert saved is not None
            assert (saved.name, store.is_writing, store.wait()) == ("b", False, None)
            assert [store.load(name).state for name in ("a", "b")] == [{"step": 1}, {"step": 2}]
        assert order == ["begin checkpoint a", "wait", "end checkpoint a", "begin checkpoint b", "end checkpoint b"]

    def test_every_payload_is_written_on_the_writers_thread(self, root: str) -> None:
        threads = []
        with CheckpointStore(root) as store:
            store.write("a", lambda folder: threads.append(threading.current_thread()), {})
            store.write_async("b", lambda folder: threads.append(threading.current_thread()), {})
        assert len(threads) == 2
        assert threading.current_thread() not in threads

    def test_what_went_wrong_is_raised_at_the_next_call(self, root: str) -> None:
        def fail(folder: Path) -> None:
            raise KeyError("lost")

        with CheckpointStore(root) as store:
            write(store, 1)
            store.write_async("step-000002", fail, {})
            assert newest(root) == ("step-000001", [])
            with pytest.raises(KeyError, match="lost"):
                store.write_async("step-000003", fill_with(3), {"step": 3})
            assert store.names() == ["step-000001"]
            store.write_async("step-000003", fill_with(3), {"step": 3})
            assert store.names() == ["step-000001", "step-000003"]
            store.write_async("step-000004", fail, {})
            with pytest.raises(KeyError, match="lost"):
                store.close()
        assert newest(root) == ("step-000003", [])
