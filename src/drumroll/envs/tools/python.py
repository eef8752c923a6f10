"""Python that a model writes, run in the sandbox."""

from __future__ import annotations

import asyncio

from pydantic import PositiveFloat, PositiveInt

from drumroll.envs.tools.shared import once_per_loop
from drumroll.envs.tools.tool import ToolError
from drumroll.registry import register
from drumroll.sandbox import Limits, Sandbox

AT_ONCE = 4
"""Programs of one process that run at the same time: more would spend their time waiting for a core."""
SHOWN_CHARS = 1000
"""Of an error's text: its end, which names the error."""


@register.tool("python")
async def python(
    code: str,
    *,
    wall_s: PositiveFloat = 5.0,
    memory_mib: PositiveInt = 512,
) -> str:
    """Runs a Python program and returns what it prints. Nothing is kept between programs; there are no files and no network.

    Args:
        code: The program. Print what you want to see.

    Options:
        wall_s: Seconds that a program may run.
        memory_mib: Memory of a program, in MiB.
    """
    sandbox, turns = workshop()
    async with turns:
        run = await sandbox.run(code, limits=Limits(wall_s=wall_s, memory_mib=memory_mib))
    match run.ending:
        case "exited" if run.exit_code == 0:
            return run.stdout.rstrip("\n") or "the program printed nothing"
        case "exited":
            raise ToolError(f"the program failed (exit status {run.exit_code})\n{run.stderr.strip()[-SHOWN_CHARS:]}")
        case "timeout":
            raise ToolError(f"the program took longer than {wall_s:g} s and was ended")
        case "output":
            raise ToolError("the program printed too much and was ended")
        case "killed":
            raise ToolError(f"the program was killed: it used more than {memory_mib} MiB, or something that is forbidden")


@once_per_loop
def workshop() -> tuple[Sandbox, asyncio.Semaphore]:
    """The process's sandbox, and the turns at it. It starts with the first program and ends with the process."""
    return Sandbox(), asyncio.Semaphore(AT_ONCE)
