"""One sandbox for all tests that only use it."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from walled import Walled

from drumroll.sandbox import Sandbox

SOURCE = Path(__file__).parents[3] / "src" / "drumroll"


@pytest.fixture(scope="session")
def walled() -> Iterator[Walled]:
    with asyncio.Runner() as runner:
        sandbox = Sandbox()
        runner.run(sandbox.start())
        yield Walled(runner, sandbox)
        runner.run(sandbox.close())


@pytest.fixture
def alone(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a program for another process that imports the sandbox and nothing else of drumroll, so that any Python can run it."""

    def write(body: str) -> Path:
        head = f"""
import asyncio, ctypes, os, sys, types
sys.modules["drumroll"] = types.ModuleType("drumroll")
sys.modules["drumroll"].__path__ = [{str(SOURCE)!r}]
from drumroll.errors import SandboxError
from drumroll.sandbox import Limits, Sandbox
from drumroll.sandbox.host import launch, run_script
"""
        path = tmp_path / "alone.py"
        path.write_text(head + body)
        return path

    return write
