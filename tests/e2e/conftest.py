"""Whole runs live in a project folder of their own, where relative paths of configs hold."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _in_the_project_root() -> None:
    root = Path(__file__).parents[2]
    assert Path.cwd() == root, f"run pytest in {root}"
