"""A sandbox for tests without an event loop of their own."""

import asyncio
from typing import Any

from drumroll.sandbox import Examination, Limits, Sandbox, ScriptRun


class Walled:
    """Example: `walled.run("print(1)", wall_s=2.0).stdout`."""

    def __init__(self, runner: asyncio.Runner, sandbox: Sandbox) -> None:
        self.runner = runner
        self.sandbox = sandbox

    def run(self, program: str, *, stdin: str = "", **limits: Any) -> ScriptRun:
        return self.runner.run(self.sandbox.run(program, stdin=stdin, limits=Limits(**limits)))

    def examine(self, program: str, *tests: str, **limits: Any) -> Examination:
        return self.runner.run(self.sandbox.examine(program, tests, limits=Limits(**limits)))
