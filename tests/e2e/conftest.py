"""Whole runs live in a project folder of their own, where relative paths of configs hold."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny import run_tiny

from drumroll.record.folder import RunFolder


@pytest.fixture(autouse=True, scope="session")
def _in_the_project_root() -> None:
    root = Path(__file__).parents[2]
    assert Path.cwd() == root, f"run pytest in {root}"


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The tiny run on this machine, finished. Nobody writes into it."""
    return run_tiny(tmp_path_factory.mktemp("first"))
