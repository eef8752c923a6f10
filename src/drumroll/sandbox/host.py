"""The sandbox as its users see it: asyncio around the zygote, and the verdicts.

    run:      drumroll ── program, stdin ──▶ script ── stdout, stderr ──▶ drumroll
    examine:  drumroll ── program ──▶ candidate ◀── calls, values ──▶ examiner ── reports with a nonce ──▶ drumroll
                                                                          ▲
              drumroll ── tests, nonce ───────────────────────────────────┘

Drumroll itself never decodes what a program returns: it reads bytes of a script's output, and lines that the examiner wrote.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

from drumroll.errors import SandboxError
from drumroll.sandbox import selftest
from drumroll.sandbox.guests import GONE
from drumroll.sandbox.outcome import Ending, Examination, Limits, ScriptRun
from drumroll.sandbox.pipes import Allowance, Pipe, Tap, close_handed_over, feeding
from drumroll.sandbox.process import START_S, End, Zygote
from drumroll.sandbox.walls import NOBODY

REPORT_BYTES_PER_TEST = 1 << 14
DEFAULT_LIMITS = Limits()


class Sandbox:
    """Runs Python that nobody trusts. One for each process; several runs may be under way on one event loop.

    Example: `async with Sandbox() as sandbox: run = await sandbox.run("print(input())", stdin="3")`.

    A program can compute, import the standard library, start threads, and write to a small /tmp that goes with it. It sees no file of the
    host apart from Python's own, no network and no other process, and can start none; nor can it make sockets, which `asyncio` needs.
    Where the kernel cannot give that, `start` raises SandboxError, and nothing is run.
    """

    walls: tuple[str, ...] = ("user", "mount", "net", "ipc", "uts", "cgroup", "pid", "root", "limits", "privileges", "calls")
    """What is put up around a guest. `start` finds out whether all of it stands."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None
        self._launching = asyncio.Lock()

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def start(self) -> None:
        """Makes the sandbox and tries its walls; does nothing where that is done. SandboxError says what is missing."""
        await self._ready()

    async def close(self) -> None:
        """Ends everything that runs in the sandbox. A later call makes a new one."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.end()

    async def run(self, program: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> ScriptRun:
        """Runs a program as a script and returns what it printed and how it ended."""
        return await run_script(await self._ready(), program, stdin, limits)

    async def examine(self, program: str, tests: Sequence[str], *, limits: Limits = DEFAULT_LIMITS) -> Examination:
        """Runs tests on a program. A test is Python source that asserts; names that it does not define are the program's.

        A test passes when it runs to its end without an error. What a test uses and does not define or import may be the program's own
        invention; only built-in names and standard modules are always Python's. The limits are for all tests together; the program
        and the tests, which run apart, have them each.

        Example: `await sandbox.examine("def double(x): return 2 * x", ["assert double(2) == 4"])`.
        """
        if not tests:
            return Examination((), (), "there are no tests", 0.0)
        return await run_tests(await self._ready(), program, list(tests), limits)

    async def _ready(self) -> Zygote:
        """The zygote: the one that runs, or a new one whose walls have been tried."""
        async with self._launching:
            if self._zygote is None or self._zygote.has_ended():
                await self.close()
                self._zygote = await launch(self.walls)
            return self._zygote


async def launch(walls: Sequence[str]) -> Zygote:
    """A zygote whose first guest has found itself walled in."""
    if sys.platform != "linux":
        raise SandboxError(selftest.refusal(f"the system is {sys.platform}, and the walls are Linux's", None))
    guest = selftest.guest_user()
    zygote = Zygote()
    try:
        await zygote.greet({"walls": list(walls), "guest": guest, "parent": os.getpid()})
        await try_walls(zygote, guest)
    except BaseException:
        zygote.end()
        raise
    return zygote


async def try_walls(zygote: Zygote, guest: int) -> None:
    """SandboxError unless a guest is walled in, as seen by itself and by the kernel."""
    facts = {"files": [__file__, sys.executable], "parent": os.getpid(), "nobody": NOBODY}
    faults = selftest.shared_namespaces(zygote.process.pid)
    limits = dataclasses.replace(DEFAULT_LIMITS, wall_s=START_S)
    probe = await run_script(
        zygote, selftest.PROBE, json.dumps(facts), limits, look=lambda pid: faults.extend(selftest.outside_view(pid, guest))
    )
    if probe.stdout.strip() != selftest.HELD:
        faults += probe.stdout.splitlines() or [f"the guest that tries them {probe.ending}: {probe.stderr[-1000:]}"]
    if faults:
        raise SandboxError(selftest.refusal("a wall does not hold: " + "; ".join(faults), None))


async def run_script(zygote: Zygote, program: str, stdin: str, limits: Limits, look: Callable[[int], None] = lambda pid: None) -> ScriptRun:
    """Runs a program as a script. `look` is called with the guest's process id while the guest waits for the program."""
    allowance = Allowance(limits.output_bytes)
    with Pipe() as content, Pipe() as keys, Pipe() as out, Pipe() as err:
        async with zygote.guest("script", limits, [content.read, keys.read, out.write, err.write]) as guest:
            close_handed_over(read=(content, keys), write=(out, err))
            look(guest.pid)
            with Tap(out, allowance, guest.stop) as printed, Tap(err, allowance, guest.stop) as complained:
                async with feeding((content, payload(program=program)), (keys, stdin.encode(errors="replace"))):
                    end = await guest.end(limits)
    ending: Ending = "output" if allowance.exceeded else end.ending
    return ScriptRun(printed.text, complained.text, ending, end.code if ending == "exited" else None, end.seconds)


async def run_tests(zygote: Zygote, program: str, tests: list[str], limits: Limits) -> Examination:
    """Runs tests in one guest on a program in another."""
    nonce = secrets.token_hex(16)
    allowance = Allowance(REPORT_BYTES_PER_TEST * (len(tests) + 1))
    with Pipe() as source, Pipe() as questions, Pipe() as calls, Pipe() as answers, Pipe() as report:
        async with zygote.guest("candidate", limits, [source.read, calls.read, answers.write]) as candidate:
            close_handed_over(read=(source, calls), write=(answers,))
            async with feeding((source, payload(program=program))):
                async with zygote.guest("examiner", limits, [questions.read, answers.read, calls.write, report.write]) as examiner:
                    close_handed_over(read=(questions, answers), write=(calls, report))
                    with Tap(report, allowance, examiner.stop) as said:
                        async with feeding((questions, payload(tests=tests, nonce=nonce))):
                            end = await examiner.end(limits)
                candidate.stop()
                candidate_end = await candidate.end(limits)
    return judge(bytes(said.content), nonce, len(tests), end, candidate_end)


def payload(**content: object) -> bytes:
    return json.dumps(content).encode()


def judge(report: bytes, nonce: str, num_tests: int, examiner: End, candidate: End) -> Examination:
    """The verdict from what the examiner wrote. A test has passed only if a line with the nonce says so."""
    problems: dict[int, str] = {}
    for line in report.split(b"\n"):
        message = parse(line)
        if message.get("nonce") != nonce:
            continue
        if "broken" in message:
            broken = str(message["broken"])
            return Examination((False,) * num_tests, (broken,) * num_tests, broken, examiner.seconds)
        problem = str(message["problem"])
        problems[int(str(message["test"]))] = f"{GONE}: {candidate}" if problem == GONE else problem
    missing = f"the tests did not end: {examiner}"
    texts = tuple(problems.get(number, missing) for number in range(num_tests))
    return Examination(tuple(not text for text in texts), texts, "", examiner.seconds)


def parse(line: bytes) -> dict[str, object]:
    """One line of a report; empty for what is none, such as a line that was cut off."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
