"""Whole runs live in a project folder of their own, where relative paths of configs hold."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from local_cluster import local_cluster
from tiny import run_tiny

from drumroll.record.folder import RunFolder


@pytest.fixture(autouse=True, scope="session")
def _in_the_project_root() -> None:
    root = Path(__file__).parents[2]
    assert Path.cwd() == root, f"run pytest in {root}"


@pytest.fixture
def workers_in_this_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs of a test have their workers in this process, unless the test is marked `real_ray`."""
    if "real_ray" in request.keywords:
        yield
        return
    with local_cluster():
        yield


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The tiny run on this machine, finished. Nobody writes into it."""
    return run_tiny(tmp_path_factory.mktemp("first"))
