"""Tool calls in the text of a reply. What is not well formed becomes a problem to tell the model, never an exception.

Let me see. <tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call>      read_tool_calls
12+34=[calculator:12+34                                                                             read_plain_call
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
EXPECTED = f'write {OPENING}{{"name": …, "arguments": {{…}}}}{CLOSING}'
MAX_DEPTH = 32
"""Lists and objects inside each other in the arguments of a call."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a reply asks for. Example: `ToolCall("calculator", {"expression": "12+34"})`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """A reply, taken apart. Example: `Reading((ToolCall("now", {}),), "Let me see.")`."""

    parts: tuple[ToolCall | str, ...]
    """Calls in their order; where one is not well formed, a text that says why."""
    text: str
    """What stands outside the calls, thinking included."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that are well formed."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the others are not."""
        return tuple(part for part in self.parts if isinstance(part, str))


def read_tool_calls(reply: str) -> Reading:
    """Calls in the form of Hermes and Qwen: `<tool_call>{"name": "now", "arguments": {}}</tool_call>`, any number of them.

    What a reply thinks, up to the last `</think>`, holds no calls. The last call needs no closing tag, so that it may be a stop string.
    """
    position = _end_of_thinking(reply)
    parts: list[ToolCall | str] = []
    outside = [reply[:position]]
    while (at := reply.find(OPENING, position)) >= 0:
        outside.append(reply[position:at])
        part, position = _read_call(reply, at + len(OPENING))
        parts.append(part)
    return Reading(tuple(parts), "".join([*outside, reply[position:]]).strip())


def read_plain_call(reply: str, tools: Mapping[str, str], *, opening: str = "[", asking: str = "=") -> Reading:
    """A call of one argument without JSON, for small models: `[calculator:12+34`, or `[12+34` where there is one tool only.

    `tools` has the name of each tool's argument. The call is the last thing in the reply: `asking` ends it, and as a stop string it is
    not part of the text.
    """
    before, found, content = reply.partition(opening)
    if not found:
        return Reading((), reply.strip())
    content, _, invented = content.partition(asking)
    if invented:
        part: ToolCall | str = f"the reply goes on behind '{asking}', where it should have ended: list '{asking}' among the stop strings"
    else:
        part = _plain_call(content, tools, opening)
    return Reading((part,), before.strip())


def _plain_call(content: str, tools: Mapping[str, str], opening: str) -> ToolCall | str:
    name, colon, value = content.partition(":")
    if colon and name.strip() in tools:
        return ToolCall(name.strip(), {tools[name.strip()]: value.strip()})
    if len(tools) == 1:
        ((name, argument),) = tools.items()
        return ToolCall(name, {argument: content.strip()})
    return f"'{content[:40]}' names no tool; write {opening}name:text with one of {', '.join(tools)}"


def _end_of_thinking(reply: str) -> int:
    closed = reply.rfind("</think>")
    start = closed + len("</think>") if closed >= 0 else 0
    thinks_on, first_call = reply.find("<think>", start), reply.find(OPENING, start)
    return len(reply) if thinks_on >= 0 and (first_call < 0 or thinks_on < first_call) else start


def _read_call(reply: str, begin: int) -> tuple[ToolCall | str, int]:
    """The call whose opening tag ends at `begin`, or what is wrong with it; and where it ends."""
    try:
        content, end = _DECODER.raw_decode(reply, _skip_space(reply, begin))
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at character {error.pos - begin}; {EXPECTED}", _end_of_broken(reply, begin)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {str(error)[:100]}; {EXPECTED}", _end_of_broken(reply, begin)
    end = _skip_space(reply, end)
    if not reply.startswith(CLOSING, end) and end < len(reply):
        return f"not valid JSON: something stands behind the object; {EXPECTED}", _end_of_broken(reply, begin)
    return _as_call(content), min(end + len(CLOSING), len(reply))


def _as_call(content: Any) -> ToolCall | str:
    name = content.get("name") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name:
        return f"no tool is named; {EXPECTED}"
    arguments = content.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"the arguments of '{name[:40]}' are no JSON object; {EXPECTED}"
    if _is_deeper(arguments, MAX_DEPTH):
        return f"the arguments of '{name[:40]}' are nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"the call of '{name[:40].encode(errors='replace').decode()}' holds half of a surrogate pair, which is no character"
    return ToolCall(name, arguments)


def _is_deeper(value: Any, depth: int) -> bool:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return bool(children) and (depth == 0 or any(_is_deeper(child, depth - 1) for child in children))


def _end_of_broken(reply: str, begin: int) -> int:
    """Where a call that cannot be read ends: with its tag, or where the next one begins."""
    closing, opening = reply.find(CLOSING, begin), reply.find(OPENING, begin)
    ends = [at for at in (closing + len(CLOSING) if closing >= 0 else -1, opening) if at >= 0]
    return min(ends, default=len(reply))


_SPACE = re.compile(r"\s*")


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
