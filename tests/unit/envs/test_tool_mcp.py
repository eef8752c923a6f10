"""The tools of real MCP servers: over stdin and stdout and over HTTP, and servers that die, hang, complain or talk nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumroll.envs.base import Step
from drumroll.envs.tools import ToolError, Tools
from drumroll.envs.tools.mcp import Mcp, Server, server
from drumroll.errors import RolloutError
from drumroll.types import Task

SCRIPT = '''
import os, sys, time
from mcp.server.mcpserver import Image, MCPServer

with open(os.environ["STARTS"], "a") as starts:
    starts.write(f"{os.getpid()}\\n")

server = MCPServer("tests")
seen = []

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool(structured_output=False)
def remember(word: str) -> str:
    """Notes a word, and says how many there are."""
    seen.append(word)
    return f"{len(seen)} words"

@server.tool()
def complain(about: str) -> str:
    """Raises."""
    raise ValueError(f"I do not like {about}")

@server.tool(structured_output=False)
def draw():
    """Draws."""
    return [Image(data=b"x", format="png"), "a dot"]

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)

@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(600)
    return ""

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tool_server.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def starts(tmp_path: Path) -> Path:
    """A line with the process id for every start of the server."""
    return tmp_path / "starts"


@pytest.fixture
def options(script: Path, starts: Path) -> dict[str, Any]:
    return {"kind": "mcp", "command": [sys.executable, str(script)], "env": {"STARTS": str(starts)}}


def pids(starts: Path) -> list[int]:
    return [int(line) for line in starts.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def asked(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def with_server(options: dict[str, Any], use: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(120):
            await use(Server(Mcp.Config.model_validate(options)))

    asyncio.run(main())


def test_episodes_share_a_server_and_its_tools_are_listed_and_called(options: dict[str, Any], starts: Path) -> None:
    config = Tools.Config.model_validate({"kind": "tools", "tools": ["calculator", options]})
    assert config == Tools.Config.model_validate(json.loads(config.model_dump_json()))

    async def episode(word: str) -> list[Step]:
        env = Tools(config)
        steps = [await env.start(Task("t", prompt="?"))]
        for reply in (
            asked("add", a=1, b=2),
            asked("add", a="one", b=2),
            asked("complain", about="mice"),
            asked("draw") + asked("calculator", expression="2*3"),
            asked("remember", word=word),
        ):
            steps.append(await env.step(reply))
        await env.close()
        return steps

    async def main() -> list[list[Step]]:
        return await asyncio.gather(*(episode(f"w{number}") for number in range(3)))

    episodes = asyncio.run(main())
    first, added, misfit, complaint, drawn, _ = episodes[0]
    assert first.tools is not None
    schemas = {tool["function"]["name"]: tool["function"] for tool in first.tools}
    assert set(schemas) == {"calculator", "add", "remember", "complain", "draw", "die", "hang"}
    assert schemas["add"]["description"] == "Adds two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]
    shown = [[message["content"] for message in step.messages or ()] for step in (added, misfit, complaint, drawn)]
    assert shown[0] == ["3"]
    assert shown[1][0].startswith("error: the arguments of 'add' do not fit: a: ")
    assert shown[2][0].startswith("error: ")
    assert "I do not like mice" in shown[2][0]
    assert shown[3] == ["[image]\na dot", "6"]
    assert drawn.metrics == {"calls": 5.0, "invalid_calls": 2.0}
    assert sorted((steps[-1].messages or ())[0]["content"] for steps in episodes) == ["1 words", "2 words", "3 words"]
    (pid,) = pids(starts)
    assert eventually(lambda: not is_alive(pid))  # it ends with its users


def test_boxes_of_equal_options_have_one_server(options: dict[str, Any]) -> None:
    async def main() -> None:
        one, same, other = (
            server("mcp", Mcp.Config.model_validate(each).model_dump_json()) for each in (options, options, {**options, "start_s": 3})
        )
        assert one is same
        assert one is not other

    asyncio.run(main())


def test_a_server_that_dies_is_a_failure_and_is_started_again(options: dict[str, Any], starts: Path) -> None:
    async def use(served: Server) -> None:
        assert await served.call("add", {"a": 1, "b": 1}) == "2"
        with pytest.raises(RolloutError, match="failed in a call of 'die'"):
            await served.call("die", {})
        assert await served.call("add", {"a": 2, "b": 2}) == "4"
        os.kill(pids(starts)[1], 9)  # and while nobody calls it
        with pytest.raises(RolloutError, match="connects anew"):
            await served.call("add", {"a": 1, "b": 1})
        assert {tool.name for tool in await served.tools()} >= {"add", "die"}
        assert len(pids(starts)) == 3

    with_server(options, use)


def test_a_server_that_hangs_is_a_failure_and_is_replaced(options: dict[str, Any], starts: Path) -> None:
    async def use(served: Server) -> None:
        with pytest.raises(RolloutError, match=r"did not answer a call of 'hang' within 0\.2 s"):
            await served.call("hang", {})
        await served.tools()
        old, new = pids(starts)
        assert await asyncio.to_thread(eventually, lambda: not is_alive(old))
        assert is_alive(new)

    with_server({**options, "deadline_s": 0.2}, use)


def test_a_link_that_is_given_up_stays_until_its_last_call_has_ended(options: dict[str, Any], starts: Path) -> None:
    async def use(served: Server) -> None:
        link = await served._link()
        link.num_calls = 1
        served._give_up(link)
        link.settle()
        assert await served.call("remember", {"word": "a"}) == "1 words"
        assert [is_alive(pid) for pid in pids(starts)] == [True, True]
        link.num_calls = 0
        link.settle()
        old, new = pids(starts)
        assert await asyncio.to_thread(eventually, lambda: not is_alive(old))
        assert is_alive(new)

    with_server(options, use)


def test_what_the_server_does_not_accept_is_told(options: dict[str, Any], starts: Path) -> None:
    async def use(served: Server) -> None:
        with pytest.raises(ToolError, match="nothing"):
            await served.call("nothing", {})
        with pytest.raises(ToolError, match="error"):
            await served.call("add", {"a": "x"})
        await served.tools()
        assert len(pids(starts)) == 1

    with_server(options, use)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/nowhere/server"], "cannot be used: FileNotFoundError"),
        ([sys.executable, "-c", "pass"], "cannot be used"),
        ([sys.executable, "-c", "print('Hello!\\n' * 1000)"], "cannot be used"),
    ],
)
def test_a_command_that_is_no_server_is_a_failure_for_all_who_wait(command: list[str], reason: str) -> None:
    async def use(served: Server) -> None:
        answers = await asyncio.gather(*(served.tools() for _ in range(3)), return_exceptions=True)
        assert all(isinstance(answer, RolloutError) and reason in str(answer) for answer in answers)
        assert len(set(map(id, answers))) == 1

    with_server({"kind": "mcp", "command": command}, use)


def test_a_command_that_says_nothing_is_ended(tmp_path: Path) -> None:
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"

    async def use(served: Server) -> None:
        with pytest.raises(RolloutError, match="did not answer within 1 s"):
            await served.tools()
        await asyncio.wait(served._holders)

    with_server({"kind": "mcp", "command": [sys.executable, "-S", "-c", program, str(tmp_path / "pid")], "start_s": 1.0}, use)
    assert eventually(lambda: not is_alive(int((tmp_path / "pid").read_text())))


@pytest.fixture
def url(script: Path, starts: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, str(script), str(port)], env={**os.environ, "STARTS": str(starts)}, stderr=subprocess.DEVNULL
    ) as process:
        assert eventually(lambda: is_open(port))
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_behind_a_url(url: str, starts: Path) -> None:
    async def use(served: Server) -> None:
        assert "add" in {tool.name for tool in await served.tools()}
        assert await served.call("add", {"a": 2, "b": 3}) == "5"
        with pytest.raises(ToolError, match="I do not like rain"):
            await served.call("complain", {"about": "rain"})
        os.kill(pids(starts)[0], 9)
        with pytest.raises(RolloutError, match=r"failed in a call of 'add'|did not answer"):
            await served.call("add", {"a": 2, "b": 3})
        with pytest.raises(RolloutError, match="cannot be used"):
            await served.call("add", {"a": 2, "b": 3})

    with_server({"kind": "mcp", "url": url, "deadline_s": 5.0, "start_s": 20.0}, use)
