"""Functions in C: compiled once, kept, and done without where they cannot be compiled."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumroll.backends import compiled

SQUARE = "double square(double x) { return x * x; }\n"

has_compiler = pytest.mark.skipif(compiled.find_compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.load.cache_clear()
    yield
    compiled.load.cache_clear()


def source(folder: Path, text: str = SQUARE) -> Path:
    path = folder / "square.c"
    path.write_text(text)
    return path


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "drumroll" / "compiled").glob("*"))


@has_compiler
def test_it_is_compiled_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = source(tmp_path)
    assert compiled.load(path) is not None
    (first,) = kept(tmp_path)
    made = first.stat().st_mtime_ns
    compiled.load.cache_clear()
    assert compiled.load(path) is not None
    assert kept(tmp_path) == [first]
    assert first.stat().st_mtime_ns == made
    path.write_text(SQUARE.replace("square", "other"))
    compiled.load.cache_clear()
    functions = compiled.load(path)
    assert functions is not None
    assert hasattr(functions, "other")
    assert len(kept(tmp_path)) == 2


@has_compiler
def test_several_processes_may_compile_it_at_once(tmp_path: Path) -> None:
    path = source(tmp_path)
    program = f"from pathlib import Path; from drumroll.backends.compiled import load; assert load(Path({str(path)!r})) is not None"
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(kept(tmp_path)) == 1


def test_without_a_compiler_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiled.load(source(tmp_path)) is None


@has_compiler
def test_what_does_not_compile_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert compiled.load(source(tmp_path, "this is not C\n")) is None
    assert "square.c is not used" in caplog.text
    assert "error" in caplog.text
    assert kept(tmp_path) == []


@has_compiler
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file, where a folder is wanted")
    with caplog.at_level(logging.WARNING):
        assert compiled.load(source(tmp_path)) is None
    assert "square.c is not used" in caplog.text


@has_compiler
def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    path = source(tmp_path)
    assert compiled.load(path) is not None
    (library,) = kept(tmp_path)
    library.unlink()
    library.write_bytes(b"\x7fELF, but no more")
    compiled.load.cache_clear()
    assert compiled.load(path) is not None


def test_the_variable_cc_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "true")
    assert compiled.find_compiler() == shutil.which("true")
