"""Run folders: nothing is ever overwritten, and nothing is ever half written."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from drumroll.errors import RunFolderError
from drumroll.record.files import JsonLines, aside, read_lines, write_json, write_text
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


def test_checkpoints_and_plugins(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x", {})
    for step in (100, 20):
        with aside(folder.checkpoint(step)) as draft:
            draft.mkdir()
            (draft / "config.json").write_text("{}")
    with suppress(RuntimeError), aside(folder.checkpoint(30)) as draft:
        draft.mkdir()
        raise RuntimeError("killed while it was written")
    assert list(folder.checkpoints()) == [20, 100]
    assert sorted(path.name for path in folder.checkpoint(20).parent.iterdir()) == ["step-000020", "step-000100"]
    with pytest.raises(OSError), aside(folder.checkpoint(20)) as draft:
        draft.mkdir()
    assert (folder.checkpoint(20) / "config.json").exists()

    folder.save_plugins({"./a/mine.py": "x = 1\n", "./b/mine.py": "x = 2\n"})
    index = json.loads((folder.plugins / "index.json").read_text())
    assert [(folder.plugins / entry["file"]).read_text() for entry in index.values()] == ["x = 1\n", "x = 2\n"]


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
