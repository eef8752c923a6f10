"""A question, tools, and an answer: the environment `tools`.

    question + schemas → reply with calls → results (role `tool`) → reply with calls → … → reply without a call: done

The last reply is the answer, which the reward functions judge.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt, model_validator

from drumroll.config.models import EnvConfig, NonNegativeFloat
from drumroll.envs.base import Env, Step
from drumroll.envs.tools.function import function_tool
from drumroll.envs.tools.tool import Tool, ToolBox, ToolChoice, ToolConfig, ToolError
from drumroll.errors import ConfigError, PluginError
from drumroll.registry import REGISTRY, Options, nearest, register
from drumroll.text.tool_calls import Reading, ToolCall, read_plain_call, read_tool_calls
from drumroll.types import Message, Task


class PlainForm(Options):
    """Calls as plain text, for small models: a prompt `12+34=` may go on as `[12+34=46]46`, of which the model writes `[12+34=` and,
    after the result, `46`.

    `asking` must be a stop string: `rollout.sampling.stop: ["="]`. With several tools, a call begins with a name: `[calculator:12+34=`.
    """

    opening: Annotated[str, Field(min_length=1)] = "["
    """Begins a call."""
    asking: Annotated[str, Field(min_length=1)] = "="
    """Ends a call; the result follows."""
    closing: str = "]"
    """Follows the result."""
    error: str | None = "?"
    """Stands in place of the result when a call fails; null says what is wrong, for which a model from scratch has no characters."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """To one call."""

    name: str
    text: str
    is_error: bool = False


@register.env("tools")
class Tools(Env):
    """Shows the task's prompt or messages, and answers tool calls until a reply has none.

    By default calls are JSON inside `<tool_call>` tags, the tools' schemas are shown by the chat template, and results are messages of the
    role `tool`. With `plain`, prompts, calls and results are plain text. A call that cannot be made, or that its tool refuses, is answered
    by an error and goes on. Metrics: `calls`, and `invalid_calls` for those answered by an error. Give `rollout.max_turns` at least
    `max_calls` + 1.

    Example: `env: {kind: tools, tools: [calculator, {kind: search, folder: docs}, ./my_tools.py:lookup]}`
    """

    class Config(EnvConfig):
        """Which tools there are, and how they are called."""

        kind: str = "tools"
        tools: Annotated[tuple[ToolChoice, ...], Field(min_length=1)]
        """`calculator`, `python`, `search`, `mcp`, or functions of your own as `./file.py:function`; options as `{kind: …, …}`."""
        plain: PlainForm | None = None
        """Calls and results as plain text instead of JSON and chat messages."""
        max_calls: PositiveInt = 8
        """Calls that are answered; a reply that asks for more ends the episode."""
        result_chars: PositiveInt = 2000
        """Characters of a result that are shown."""
        call_cost: NonNegativeFloat = 0.0
        """Taken from the reward for every call."""

        @model_validator(mode="after")
        def tools_fit(self) -> Tools.Config:
            try:
                collect((tool for config in self.tools if (tool := simple_tool(config)) is not None), self.plain)
            except (PluginError, ConfigError) as error:
                raise ValueError(str(error).rstrip(".")) from error
            return self

    config: Config
    needs_prompt: ClassVar[bool] = True

    async def start(self, task: Task) -> Step:
        self._tools = collect(await open_tools(self.config.tools), self.config.plain)
        self._calls = 0
        self._invalid_calls = 0
        self._history: list[str] = []
        if self.config.plain is None:
            messages = task.messages if task.messages is not None else ({"role": "user", "content": task.prompt},)
            return Step(messages=messages, tools=[tool.schema for tool in self._tools.values()])
        if task.prompt is None:
            raise ConfigError(f"`env.plain`: task '{task.id}' has chat messages, and plain calls need a text prompt. Leave `plain` out.")
        return Step(prompt=task.prompt)

    async def step(self, reply: str) -> Step:
        parts = self._read(reply).parts
        if not parts:
            return Step(done=True, metrics=self._metrics())
        if self._calls >= self.config.max_calls:
            return Step(done=True, success=False, metrics=self._metrics())
        answers = [await self._answer(part) for part in parts]
        for part, answer in zip(parts, answers, strict=True):
            self._history.append(json.dumps([part if isinstance(part, str) else [part.name, part.arguments], answer.text], sort_keys=True))
        prompt, messages = self._shown(answers)
        return Step(
            prompt=prompt,
            messages=messages,
            state="\n".join(self._history),
            reward=-self.config.call_cost * len(parts) if self.config.call_cost else None,
            metrics=self._metrics(),
        )

    def _read(self, reply: str) -> Reading:
        form = self.config.plain
        if form is None:
            return read_tool_calls(reply)
        arguments = {name: str(tool.text_argument) for name, tool in self._tools.items()}
        return read_plain_call(reply, arguments, opening=form.opening, asking=form.asking)

    async def _answer(self, part: ToolCall | str) -> _Answer:
        name = part.name if isinstance(part, ToolCall) else ""
        self._calls += 1
        try:
            return _Answer(name, await self._result(part))
        except ToolError as error:
            self._invalid_calls += 1
            return _Answer(name, f"error: {error}", is_error=True)

    async def _result(self, part: ToolCall | str) -> str:
        if isinstance(part, str):
            raise ToolError(part)
        if self._calls > self.config.max_calls:
            raise ToolError("no calls are left; give the answer")
        tool = self._tools.get(part.name)
        if tool is None:
            raise ToolError(
                f"no tool is named '{part.name[:40]}'.{nearest(part.name[:40], self._tools)} There are: {', '.join(self._tools)}"
            )
        problem = tool.problem_with(part.arguments)
        if problem:
            raise ToolError(f"the arguments of '{tool.name}' do not fit: {problem}")
        return await tool.call(part.arguments)

    def _shown(self, answers: Iterable[_Answer]) -> tuple[str | None, list[Message] | None]:
        """Plain text, or messages."""
        form, limit = self.config.plain, self.config.result_chars
        if form is None:
            return None, [
                _tool_message(answer.name, cut(answer.text, limit, f"… (cut; {len(answer.text)} characters)")) for answer in answers
            ]
        texts = (form.error if answer.is_error and form.error is not None else cut(answer.text, limit) for answer in answers)
        return "".join(f"{text}{form.closing}" for text in texts), None

    def _metrics(self) -> dict[str, float]:
        return {"calls": float(self._calls), "invalid_calls": float(self._invalid_calls)}


def simple_tool(config: ToolConfig) -> Tool | None:
    """The tool that a function makes; None for a `ToolBox`, which has to be opened. A `PluginError` for what is neither."""
    entry = REGISTRY.lookup("tool", config.kind)
    if inspect.isclass(entry.target):
        if not issubclass(entry.target, ToolBox):
            raise PluginError(f"tool '{config.kind}' is a class that does not extend drumroll.envs.tools.ToolBox. Extend it.")
        return None
    return function_tool(entry, config)


async def open_tools(configs: Iterable[ToolConfig]) -> list[Tool]:
    """All tools that a config names, in its order."""
    tools: list[Tool] = []
    for config in configs:
        tool = simple_tool(config)
        tools += [tool] if tool is not None else await REGISTRY.lookup("tool", config.kind).target(config).tools()
    return tools


def collect(tools: Iterable[Tool], plain: PlainForm | None) -> dict[str, Tool]:
    """Tools by name; a `ConfigError` for two of one name, and for one that plain calls cannot fill."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise ConfigError(f"two tools are named '{tool.name}'. Leave one out, or rename the function.")
        if plain is not None and tool.text_argument is None:
            raise ConfigError(
                f"the tool '{tool.name}' does not take exactly one text, which is what a plain call gives. Leave `plain` out."
            )
        by_name[tool.name] = tool
    return by_name


def cut(text: str, limit: int, mark: str = "") -> str:
    """At most `limit` characters, with a mark where something is missing; halves of surrogate pairs become question marks."""
    whole = text.encode(errors="replace").decode()
    return whole if len(whole) <= limit else whole[:limit] + mark


def _tool_message(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content} if name else {"role": "tool", "content": content}
