"""What agents send and get, in OpenAI's format: requests are read into few plain types, replies and errors are written from them.

Nothing here knows tokens or sessions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drumroll.rewards.reward import LARGEST
from drumroll.text.tool_calls import read_tool_calls
from drumroll.types import Message

PIECE_CHARS = 16
"""A streamed text comes in pieces of this length."""

FinishWord = Literal["stop", "length", "tool_calls"]


class Refusal(Exception):
    """A request that gets an error instead of a reply."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(status, code, message, param)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error"}
        return {
            "error": {"message": self.message, "type": kind.get(self.status, "server_error"), "param": self.param, "code": self.code},
        }


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call of an agent. What it asks of sampling is a wish; None is no wish."""

    messages: tuple[Message, ...]
    """Each has `role` and `content` (a string), and `name`, `tool_call_id`, `tool_calls` where they say something. The arguments of
    tool calls are objects, as chat templates want them, and not JSON in a string."""
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_calls: bool = False
    """Whether tool calls in the reply are read: there are tools, and `tool_choice` is not `none`."""
    stream: bool = False
    include_usage: bool = False
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardPost:
    """A reward that an agent posts for its session."""

    reward: float
    success: bool | None
    metrics: Mapping[str, float]
    done: bool


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool call of a reply."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        """As chat templates want it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @property
    def wire(self) -> dict[str, Any]:
        """As agents get it."""
        return {**self.message, "function": {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}}


@dataclass(frozen=True, slots=True)
class Reply:
    """What an agent gets for a call."""

    text: str
    calls: tuple[CalledTool, ...]
    finish: FinishWord

    @property
    def message(self) -> Message:
        """The message that an agent sends back when it goes on from this reply."""
        plain: dict[str, Any] = {"role": "assistant", "content": self.text}
        return {**plain, "tool_calls": [call.message for call in self.calls]} if self.calls else plain


class _Body(BaseModel):
    """Base of everything that agents send. Keys that nobody here reads are ignored, as OpenAI's own clients send many."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Text(_Body):
    type: Literal["text"]
    text: str


class _Function(_Body):
    name: str
    arguments: str


class _Call(_Body):
    id: str
    function: _Function


class _Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None


class _Tool(_Body):
    type: Literal["function"]
    function: dict[str, Any]


class _StreamOptions(_Body):
    include_usage: bool | None = None


class _Format(_Body):
    type: Literal["text"]


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    response_format: _Format | None = None


class _Reward(_Body):
    reward: Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
    success: bool | None = None
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    done: bool = True


def read_chat(body: bytes) -> ChatRequest:
    """The body of `POST /v1/chat/completions`; a `Refusal` (400) that names the field for anything that cannot be served."""
    chat = _read(_Chat, body)
    budgets = [tokens for tokens in (chat.max_tokens, chat.max_completion_tokens) if tokens is not None]
    return ChatRequest(
        messages=tuple(_message(message) for message in chat.messages),
        tools=tuple(tool.model_dump() for tool in chat.tools or ()),
        reads_calls=bool(chat.tools) and chat.tool_choice != "none",
        stream=bool(chat.stream),
        include_usage=chat.stream_options is not None and bool(chat.stream_options.include_usage),
        max_new_tokens=min(budgets, default=None),
        temperature=chat.temperature,
        top_p=chat.top_p,
        stop=(chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ()),
    )


def read_reward(body: bytes) -> RewardPost:
    """The body of `POST /v1/reward`, for example `{"reward": 1, "success": true, "metrics": {"moves": 3}}`."""
    posted = _read(_Reward, body)
    return RewardPost(posted.reward, posted.success, posted.metrics, posted.done)


B = TypeVar("B", bound=_Body)


def _read(kind: type[B], body: bytes) -> B:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        code = "invalid_json" if first["type"] == "json_invalid" else "invalid_value"
        raise Refusal(400, code, f"{param or 'the body'}: {first['msg']}", param) from None


def _message(message: _Message) -> Message:
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": "".join(part.text for part in message.content) if isinstance(message.content, list) else message.content or "",
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    """The object that the text spells; what is no JSON stays as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def make_reply(text: str, *, reads_calls: bool, cut: bool, name: str) -> Reply:
    """A reply from the policy's text. `cut`: it ended at a budget. The ids of its tool calls begin with six characters of `name`,
    the call's own name in hexadecimal digits.

    Where no tool call can be read, the text stays whole: the agent sees what the policy wrote."""
    reading = read_tool_calls(text) if reads_calls else None
    if reading is None or not reading.calls:
        return Reply(text, (), "length" if cut else "stop")
    # Some chat templates insist on ids of nine letters or digits.
    calls = tuple(CalledTool(f"{name[:6]}{number:03d}", call.name, call.arguments) for number, call in enumerate(reading.calls))
    return Reply(reading.text, calls, "length" if cut else "tool_calls")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a completion says besides its reply."""

    id: str
    model: str
    num_prompt_tokens: int
    num_new_tokens: int

    def completion(self, reply: Reply) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        message: dict[str, Any] = {"role": "assistant", "content": _content(reply), "refusal": None}
        if reply.calls:
            message["tool_calls"] = [call.wire for call in reply.calls]
        choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def opening(self) -> dict[str, Any]:
        """The first event of a stream: a reply has begun."""
        return self._event({"role": "assistant", "content": ""})

    def events(self, reply: Reply, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The events of a stream behind its opening."""
        for start in range(0, len(reply.text), PIECE_CHARS):
            yield self._event({"content": reply.text[start : start + PIECE_CHARS]})
        for index, call in enumerate(reply.calls):
            arguments = call.wire["function"]["arguments"]
            head = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            yield self._event({"tool_calls": [head]})
            for start in range(0, len(arguments), PIECE_CHARS):
                piece = {"index": index, "function": {"arguments": arguments[start : start + PIECE_CHARS]}}
                yield self._event({"tool_calls": [piece]})
        yield self._event({}, reply.finish)
        if include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _event(self, delta: Mapping[str, Any], finish: FinishWord | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_new_tokens,
        }


def _content(reply: Reply) -> str | None:
    return None if reply.calls and not reply.text else reply.text


def model_list(model: str) -> dict[str, Any]:
    """The answer to `GET /v1/models`."""
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "drumroll"}]}
