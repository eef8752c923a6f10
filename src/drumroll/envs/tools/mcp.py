"""The tools of an MCP server, through the official client.

    episodes ── call ──▶ Server ──▶ link ──▶ server process or URL
                           │         └ a task of its own holds the client open
                           └ a link that fails or hangs is given up, and the next call makes another

All episodes of a process share one server, so what its tools remember, they remember across episodes. A server that cannot be reached, dies
or does not answer in time is a failure of the infrastructure; an error that a tool returns is told to the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat, model_validator

from drumroll.envs.tools.shared import once_per_loop
from drumroll.envs.tools.tool import Tool, ToolBox, ToolConfig, ToolError
from drumroll.errors import RolloutError
from drumroll.registry import register, require

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

require("mcp", extra="tools")

MAX_PAGES = 100
"""Of a server's list of tools."""


@register.tool("mcp")
class Mcp(ToolBox):
    """All tools of an MCP server, which is started as a command or reached by a URL (streamable HTTP).

    Example: `{kind: mcp, command: [python, my_server.py]}` or `{kind: mcp, url: "http://localhost:8000/mcp"}`
    """

    class Config(ToolConfig):
        """Where the server is, and how long it may take."""

        command: tuple[str, ...] = ()
        """Program and arguments that start a server which speaks over stdin and stdout; one for each environment worker."""
        env: dict[str, str] = {}
        """Environment variables for the command, beyond a few such as PATH and HOME."""
        url: str | None = None
        """In place of a command: where a server answers."""
        start_s: PositiveFloat = 60.0
        """Connecting may take this long, the server's own start included."""
        deadline_s: PositiveFloat = 60.0
        """One call may take this long."""

        @model_validator(mode="after")
        def one_server(self) -> Mcp.Config:
            if bool(self.command) == (self.url is not None):
                raise ValueError("give either `command` (a program and its arguments) or `url`, and not both")
            return self

    config: Config

    async def tools(self) -> Sequence[Tool]:
        return await server(self.config.kind, self.config.model_dump_json()).tools()


@once_per_loop
def server(kind: str, options: str) -> Server:
    """The server that all boxes of equal options share."""
    return Server(Mcp.Config.model_validate_json(options))


@dataclass(slots=True)
class _Link:
    """One connection."""

    client: Client
    tools: list[Tool]
    num_calls: int = 0
    given_up: bool = False
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is given up and its last call has ended."""

    def settle(self) -> None:
        if self.given_up and self.num_calls == 0:
            self.unused.set()


class Server:
    """An MCP server that many episodes use at the same time."""

    def __init__(self, config: Mcp.Config) -> None:
        self._config = config
        self._name = f"the MCP server '{config.url or ' '.join(config.command)}'"
        self._linking: asyncio.Task[_Link] | None = None
        self._holders: set[asyncio.Task[None]] = set()

    async def tools(self) -> list[Tool]:
        """What the server offers, as it said when it was connected; a `RolloutError` where it cannot be reached."""
        return (await self._link()).tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result as text. A `ToolError` is the tool's own complaint, a `RolloutError` a failure of the server."""
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        link = await self._link()
        link.num_calls += 1
        try:
            async with asyncio.timeout(self._config.deadline_s):
                result = await link.client.call_tool(name, dict(arguments))
        except TimeoutError:
            self._give_up(link)
            raise RolloutError(f"{self._name} did not answer a call of '{name}' within {self._config.deadline_s:g} s.") from None
        except Exception as error:  # the client's own errors, and whatever its transport lets through
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ToolError(error.message) from error
            self._give_up(link)
            raise RolloutError(f"{self._name} failed in a call of '{name}': {told(error)}. The next call connects anew.") from error
        finally:
            link.num_calls -= 1
            link.settle()
        text = result_text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _link(self) -> _Link:
        """The connection that stands, or a new one; whoever asks while it is made gets the same, or the same error."""
        linking = self._linking
        if linking is None or (linking.done() and (linking.cancelled() or linking.exception() is not None)):
            linking = self._linking = asyncio.create_task(self._connect())
        return await asyncio.shield(linking)

    def _give_up(self, link: _Link) -> None:
        link.given_up = True
        if self._linking is not None and self._linking.done() and self._linking.result() is link:
            self._linking = None

    async def _connect(self) -> _Link:
        ready: asyncio.Future[_Link] = asyncio.get_running_loop().create_future()
        holder = asyncio.create_task(self._hold(ready))
        self._holders.add(holder)
        holder.add_done_callback(self._let_go)
        ends: set[asyncio.Future[Any]] = {ready, holder}
        await asyncio.wait(ends, timeout=self._config.start_s, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        late = not holder.done()
        holder.cancel()
        error = None if late or holder.cancelled() else holder.exception()
        reason = f"it did not answer within {self._config.start_s:g} s" if late else told(error) if error else "it hung up"
        raise RolloutError(f"{self._name} cannot be used: {reason}. What a command prints to stderr is in the worker's log.") from error

    def _let_go(self, holder: asyncio.Task[None]) -> None:
        self._holders.discard(holder)
        if not holder.cancelled():
            holder.exception()  # those who called through it have been told

    async def _hold(self, ready: asyncio.Future[_Link]) -> None:
        """Opens the client, and closes it when nobody uses it any more: both must happen in one task."""
        from mcp import Client, StdioServerParameters, stdio_client

        config = self._config
        if config.url is not None:
            client = Client(config.url)
        else:
            program, *args = config.command
            parameters = StdioServerParameters(command=program, args=args, env=config.env)
            client = Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr))
        async with client:
            link = _Link(client, await self._list(client))
            ready.set_result(link)
            await link.unused.wait()

    async def _list(self, client: Client) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += [Tool(tool.name, tool.description or "", tool.input_schema, partial(self.call, tool.name)) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        for tool in tools:
            tool.check_schema()
        return tools


def result_text(result: CallToolResult) -> str:
    """The texts of a result; its data as JSON where there are none. What is neither is named only, as in `[image]`."""
    texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def told(error: BaseException) -> str:
    """What went wrong: the first error inside those that task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
