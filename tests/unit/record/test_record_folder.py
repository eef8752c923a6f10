"""Run folders: nothing is ever overwritten, nothing is ever half written, and one process works on a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.errors import CheckpointError, RunFolderError
from drumroll.record import files
from drumroll.record.checkpoint import CheckpointStore
from drumroll.record.files import JsonLines, aside, read_lines, truncate_to, write_json, write_text
from drumroll.record.folder import RunFolder

CONFIG = {"name": "quick start", "trainer": {"lr": 3e-6}, "betas": (0.9, 0.95), "prompt": "größer"}


def test_create_and_open(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "new" / "run", "x", CONFIG)
    assert RunFolder.open(tmp_path / "new" / "run") == folder
    assert folder.config() == {**CONFIG, "betas": [0.9, 0.95]}


def test_an_empty_folder_is_taken_and_a_full_one_never(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    RunFolder.create(tmp_path / "run", "x", {"seed": 1})
    with pytest.raises(RunFolderError, match=r"already holds a run.*run_dir=PATH"):
        RunFolder.create(tmp_path / "run", "x", {"seed": 2})
    assert RunFolder.open(tmp_path / "run").config() == {"seed": 1}


def test_a_folder_with_other_things_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"contains notes\.txt"):
        RunFolder.create(tmp_path, "x", {})
    with pytest.raises(RunFolderError, match=r"notes\.txt' is a file"):
        RunFolder.create(tmp_path / "notes.txt", "x", {})
    with pytest.raises(RunFolderError, match="cannot be made"):
        RunFolder.create(tmp_path / "notes.txt" / "run", "x", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_default_names_are_unique_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [RunFolder.create(None, "a/b c", {"n": n}) for n in range(4)]
    assert len({folder.root for folder in folders}) == 4
    assert all(folder.root.is_absolute() and folder.root.parent == tmp_path / "runs" for folder in folders)
    assert all(folder.root.name.startswith("a-b-c-20") for folder in folders)
    assert [folder.config()["n"] for folder in folders] == [0, 1, 2, 3]


def test_open_says_what_is_wrong_and_what_is_near(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    RunFolder.create(tmp_path / "runs" / "first", "x", {})
    with pytest.raises(RunFolderError, match="newest run in it is 'first'"):
        RunFolder.open(tmp_path / "runs")


def test_plugins(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x", {})
    folder.save_plugins({"./a/mine.py": "x = 1\n", "./b/mine.py": "x = 2\n"})
    index = json.loads((folder.plugins / "index.json").read_text())
    assert [(folder.plugins / entry["file"]).read_text() for entry in index.values()] == ["x = 1\n", "x = 2\n"]


class TestLock:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        return RunFolder.create(tmp_path / "run", "x", {})

    def test_a_second_process_is_refused(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "LOCK_WAIT_S", 0.0)
        with (
            folder.lock(),
            pytest.raises(RunFolderError, match=rf"another process \(pid {os.getpid()}\) is working on this run"),
            folder.lock(),
        ):
            pytest.fail("two at once")
        with folder.lock():
            assert folder.lock_file.read_text() == f"{os.getpid()}\n"

    def test_a_holder_that_goes_is_waited_for(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        holder = ExitStack()
        holder.enter_context(folder.lock())
        monkeypatch.setattr(time, "sleep", lambda seconds: holder.close())
        with folder.lock():
            pass

    def test_neither_a_killed_holder_nor_a_program_that_it_started_keeps_it(
        self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "LOCK_WAIT_S", 0.0)
        child = os.fork()
        if child == 0:
            folder.lock().__enter__()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert folder.lock_file.read_text() == f"{child}\n"
        with folder.lock():
            program = "print(flush=True); input()"
            other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
            assert other.stdout is not None
            assert other.stdout.readline() == b"\n"
        with folder.lock():
            assert other.poll() is None
        other.communicate(b"\n")


def test_incarnations_are_counted(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x", {})
    assert [folder.begin_incarnation(name) for name in ("", "warm", "step-000010")] == [0, 1, 2]
    with folder.incarnations_file.open("a") as file:
        file.write('{"number": 3, "ti')  # killed on the way: it never began
    assert folder.begin_incarnation("step-000010") == 3
    lines = read_lines(folder.incarnations_file)
    assert [(line["number"], line["resumed_from"]) for line in lines] == [(0, ""), (1, "warm"), (2, "step-000010"), (3, "step-000010")]
    assert all(line["time"] > 0 for line in lines)


def test_incidents_are_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x", {})
    folder.incident("update_skipped", step=3, loss=float("nan"))
    folder.incident("checkpoint_failed", name="step-000004")
    lines = [{key: value for key, value in line.items() if key != "time"} for line in read_lines(folder.incidents_file)]
    assert lines == [{"kind": "update_skipped", "step": 3, "loss": "NaN"}, {"kind": "checkpoint_failed", "name": "step-000004"}]


class TestExport:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
        """A run with checkpoints, whose models are joined by noting down which parts they have."""

        def export_folder(checkpoint_folder: Path, model_folder: Path, out: Path) -> None:
            out.mkdir()
            (out / "parts.txt").write_text(f"{(checkpoint_folder / 'rank-0').read_text()} of {model_folder}")

        shards = ModuleType("shards")
        shards.export_folder = export_folder  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "drumroll.backends.train.shards", shards)
        return RunFolder.create(tmp_path / "run", "x", {"model": {"path": str(tmp_path / "base")}, "seed": 0})

    @staticmethod
    def save(folder: RunFolder, *names: str) -> None:
        def fill(draft: Path) -> None:
            (draft / "trainer").mkdir()
            (draft / "trainer" / "rank-0").write_text(name)

        with CheckpointStore(folder.checkpoint_root, keep_last=9) as store:
            for name in names:
                store.write(name, fill, {})

    def test_the_final_model_is_copied(self, folder: RunFolder, tmp_path: Path) -> None:
        folder.final_model.mkdir(parents=True)
        (folder.final_model / "config.json").write_text("{}")
        self.save(folder, "step-000010")
        assert folder.export(tmp_path / "out") == str(folder.final_model)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
        with pytest.raises(RunFolderError, match=r"out' exists already"):
            folder.export(tmp_path / "out", step=10)

    def test_a_step_and_the_newest(self, folder: RunFolder, tmp_path: Path) -> None:
        folder.initial_model.mkdir(parents=True)
        self.save(folder, "warm", "warmup-000020", "step-000010", "step-000020")
        assert folder.export(tmp_path / "ten", step=10) == f"{folder.root}/checkpoints/step-000010"
        assert (tmp_path / "ten" / "parts.txt").read_text() == f"step-000010 of {folder.initial_model}"
        folder.export(tmp_path / "newest")
        assert (tmp_path / "newest" / "parts.txt").read_text().startswith("step-000020 ")
        with pytest.raises(RunFolderError, match=r"no checkpoint of step 30\. Steps with one: 10, 20 "):
            folder.export(tmp_path / "out", step=30)

    def test_a_damaged_one_is_never_exported(self, folder: RunFolder, tmp_path: Path) -> None:
        folder.initial_model.mkdir(parents=True)
        self.save(folder, "sft-000100", "sft-000200")
        (folder.root / "checkpoints" / "sft-000200" / "trainer" / "rank-0").write_text("sft-000201")
        with pytest.raises(CheckpointError, match="sft-000200"):
            folder.export(tmp_path / "out", step=200)
        with pytest.warns(UserWarning, match="sft-000200 was skipped"):
            folder.export(tmp_path / "out")
        assert (tmp_path / "out" / "parts.txt").read_text().startswith("sft-000100 ")

    def test_the_model_and_the_checkpoints_may_be_elsewhere(self, folder: RunFolder, tmp_path: Path) -> None:
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        (base / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (base / "tokenizer.json").write_text("{}")
        folder.save_config({**folder.config(), "checkpoint": {"root": f"memory://{tmp_path.name}"}})
        self.save(folder, "step-000010")
        assert folder.export(tmp_path / "out", step=10) == f"memory://{tmp_path.name}/step-000010"
        assert (tmp_path / "out" / "parts.txt").read_text() == f"step-000010 of {base}"

    def test_no_model_yet(self, folder: RunFolder, tmp_path: Path) -> None:
        with pytest.raises(RunFolderError, match="no model yet"):
            folder.export(tmp_path / "out")
        with pytest.raises(RunFolderError, match=r"Steps with one: none"):
            folder.export(tmp_path / "out", step=1)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def fail_after_half() -> None:
        with aside(path) as draft:
            draft.write_text('{"a": ')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_half()
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_lines_after_a_torn_one_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert read_lines(path) == [{"step": 1}]
    with JsonLines(path) as lines:
        lines.append({"step": 3})
        assert read_lines(path) == [{"step": 1}, {"step": 3}]
    with JsonLines(path) as lines:
        lines.append({"step": 4})
    assert read_lines(path) == [{"step": 1}, {"step": 3}, {"step": 4}]


class TestTruncate:
    @given(st.lists(st.binary(max_size=5).map(lambda text: text.replace(b"\n", b"") + b"\n"), max_size=6), st.data())
    def test_nothing_is_lost_and_done_twice_is_done_once(
        self, tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
    ) -> None:
        folder = tmp_path_factory.mktemp("lines")
        path, superseded = folder / "metrics.jsonl", folder / "metrics.superseded.jsonl"
        path.write_bytes(b"".join(lines))
        count = data.draw(st.integers(0, len(lines)))
        size = len(b"".join(lines[:count]))
        for _ in range(2):
            truncate_to(path, size, superseded)
            assert path.read_bytes() == b"".join(lines[:count])
            assert (superseded.read_bytes() if superseded.exists() else b"") == b"".join(lines[count:])

    def test_a_torn_line_is_cut_off_with_the_others(self, tmp_path: Path) -> None:
        path, superseded = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
        path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
        truncate_to(path, 12, superseded)
        path.write_bytes(path.read_bytes() + b'{"step": 2}\n')
        truncate_to(path, 12, superseded)
        assert superseded.read_bytes() == b'{"step": 2}\n{"st\n{"step": 2}\n'

    @pytest.mark.parametrize("size", [5, 13, 100])
    def test_another_file_than_the_checkpoint_saw_is_refused(self, size: int, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
        with pytest.raises(CheckpointError, match=rf"24 bytes, and no line ends at byte {size}"):
            truncate_to(path, size, tmp_path / "b.jsonl")
        assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
