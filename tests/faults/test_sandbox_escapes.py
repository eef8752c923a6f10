"""Replies that try to break out of the sandbox, or to get a reward without solving the task: none does, and the host is unharmed.

On a machine without isolation these tests fail; they are never skipped on Linux. The replies are in `escapes.py`.
"""

import asyncio
import os
import re
import secrets
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from escapes import ESCAPES, HONEST, TASKS

import drumroll.sandbox
from drumroll.rewards.code import Code
from drumroll.rewards.place import Place
from drumroll.sandbox import Sandbox
from drumroll.types import Sampling, Task, Trajectory, Turn

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is made of Linux's namespaces")

CONTROL = "def solve(n):\n    return 2 * n\n"


class Watched(Sandbox):
    """Keeps what the sandbox said last."""

    said = ""

    async def run(self, program, **options):
        outcome = await super().run(program, **options)
        self.said = f"{outcome.ending} {outcome.stderr[-500:]}"
        return outcome

    async def examine(self, program, tests, **options):
        outcome = await super().examine(program, tests, **options)
        self.said = " ".join([*outcome.problems, outcome.broken])
        return outcome


def trajectory(reply, tests):
    return Trajectory(
        sample_id="train/1/t/0",
        group_id="train/1/t",
        task=Task("t", prompt="", data={"tests": tests}),
        turns=(Turn("policy", 0, 1, reply),),
        token_ids=np.array([1], np.int32),
        loss_mask=np.array([True]),
        logp=np.zeros(1, np.float32),
        token_version=np.zeros(1, np.int32),
        sampling=Sampling(),
        seed=0,
        reward=None,
        stop_reason="stop",
    )


@dataclass
class Host:
    """What is to stay as it is: a file, three sockets that nobody may contact, and the processes below this one."""

    folder: Path
    token: str = field(default_factory=lambda: f"TOKEN-{secrets.token_hex(16)}")
    marker: str = field(default_factory=lambda: f"marker-{secrets.token_hex(8)}")

    def __post_init__(self):
        self.canary = self.folder / "canary"
        self.canary.write_text(self.token)
        self.canary.chmod(0o666)
        self.listeners = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self.datagrams = socket.socket(type=socket.SOCK_DGRAM)
        for listener, address in zip(self.listeners, (("127.0.0.1", 0), str(self.folder / "socket"), f"\0{self.marker}"), strict=True):
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
        self.port = self.listeners[0].getsockname()[1]
        self.datagrams.bind(("127.0.0.1", self.port))
        self.datagrams.setblocking(False)

    def close(self):
        for each in (*self.listeners, self.datagrams):
            each.close()

    def fill_in(self, text):
        """The text with the host's facts in it."""
        facts = {
            "TOKEN": self.token,
            "MARKER": self.marker,
            "CANARY": self.canary,
            "SOCKET": self.folder / "socket",
            "PORT": self.port,
            "PARENT": os.getpid(),
            "GROUP": os.getpgrp(),
            "SOURCE": drumroll.sandbox.__file__,
        }
        for name, fact in facts.items():
            text = text.replace(f"@{name}@", str(fact))
        return text

    def check(self):
        """Nothing was changed, nobody was contacted, nothing with the marker runs."""
        assert self.canary.read_text() == self.token
        assert sorted(path.name for path in self.folder.iterdir()) == ["canary", "socket"]
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()
        with pytest.raises(BlockingIOError):
            self.datagrams.recv(1)
        assert [pid for pid in processes() if self.marker.encode() in read(f"/proc/{pid}/cmdline")] == []
        assert not Path(f"/{self.marker}").exists()


def read(path):
    try:
        return Path(path).read_bytes()
    except OSError:  # the process has ended
        return b""


def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def below(pid):
    """Every process that descends from this one."""
    children: dict[int, list[int]] = {}
    for each in processes():
        fields = read(f"/proc/{each}/stat").rpartition(b")")[2].split()
        if fields:
            children.setdefault(int(fields[1]), []).append(each)
    found, waiting = set(), [pid]
    while waiting:
        more = children.get(waiting.pop(), [])
        found.update(more)
        waiting += more
    return found


@dataclass
class Judge:
    """The code reward in a sandbox, on one event loop for all tests of this file."""

    runner: asyncio.Runner
    host: Host
    sandbox: Watched

    def ask(self, code, task="double", wall_s=10.0):
        reward = Code(Code.Config(kind="code", wall_s=wall_s, memory_mib=256), self.sandbox)
        tests = [self.host.fill_in(test) if isinstance(test, str) else test for test in TASKS[task]]
        subject = trajectory(f"```python\n{self.host.fill_in(code)}\n```", tests)
        reward.check_task(subject.task)

        async def limited():
            async with asyncio.timeout(wall_s * len(tests) + 20):
                return await reward(subject)

        return self.runner.run(limited())

    def wait_until_only(self, baseline):
        """Waits until no more processes are below this one than before."""

        async def poll():
            async with asyncio.timeout(10):
                while len(below(os.getpid())) > baseline:
                    await asyncio.sleep(0.01)

        self.runner.run(poll())


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"))
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("DRUMROLL_ESCAPE", host.token)
        judge = Judge(runner, host, Watched())
        runner.run(Code(Code.Config(kind="code"), judge.sandbox).start(Place()))
        yield judge
        runner.run(judge.sandbox.close())
        assert judge.sandbox.said
    host.close()


@pytest.fixture(scope="module")
def baseline(judge):
    """How many processes are below this one when nothing is judged."""
    assert judge.ask(CONTROL) == 1.0
    return len(below(os.getpid()))


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name.replace(" ", "_"))
def test_escapes_are_contained(judge, baseline, escape):
    assert judge.ask(escape.code, escape.task, wall_s=1.0 if escape.hangs else 10.0) == 0.0
    said = judge.sandbox.said
    judge.host.check()
    judge.wait_until_only(baseline)
    assert judge.ask(CONTROL) == 1.0
    assert re.search(escape.stopped_by, said), said


@pytest.mark.parametrize("code", HONEST.values(), ids=HONEST)
def test_honest_programs_get_their_reward(judge, code):
    assert judge.ask(code) == 1.0, judge.sandbox.said


def test_there_are_enough_escapes():
    assert len({escape.code for escape in ESCAPES}) == len({escape.name for escape in ESCAPES}) == len(ESCAPES) >= 30
    assert len({escape.mechanism for escape in ESCAPES}) >= 12
