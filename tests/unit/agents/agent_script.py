"""Agents, written with the official client, in a process of their own: one function each, named on the command line.

Called as `python agent_script.py '{"<function>": "<key>", …}'` with OPENAI_BASE_URL set; prints what each has seen, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}},
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **options)


def post_reward(client: openai.OpenAI, **body: Any) -> Any:
    return client.post("/reward", cast_to=object, body=body)


def single(client: openai.OpenAI) -> Any:
    reply = ask(client, [user("hello")], temperature=0.1, seed=5)
    post_reward(client, reward=1.0, success=True, metrics={"moves": 3})
    return [reply.choices[0].message.content, reply.choices[0].finish_reason, reply.usage.prompt_tokens, reply.usage.completion_tokens]


def turns(client: openai.OpenAI) -> Any:
    messages: list[Any] = [{"role": "developer", "content": "be brief"}, user("one")]
    for text in ("two", "three", None):
        messages.append(ask(client, messages).choices[0].message)
        if text is not None:
            messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
    post_reward(client, reward=0.25, done=False)
    post_reward(client, reward=0.5)
    return [message.content for message in messages if not isinstance(message, dict)]


def tools(client: openai.OpenAI) -> Any:
    messages: list[Any] = [user("tool please")]
    message = ask(client, messages, tools=[ADD], tool_choice="auto").choices[0].message
    seen = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
    last = ask(client, messages, tools=[ADD], tool_choice="none").choices[0]
    post_reward(client, reward=1)
    return [message.content, seen, last.message.content, last.finish_reason]


def stream(client: openai.OpenAI) -> Any:
    """Plain text, then a tool call without the text beside it, each put together from its pieces."""
    messages: list[Any] = [user("a long story")]
    content, usage = "", None
    for event in ask(client, messages, stream=True, stream_options={"include_usage": True}, tools=[ADD]):
        content += (event.choices[0].delta.content or "") if event.choices else ""
        usage = event.usage or usage
    messages += [{"role": "assistant", "content": content}, user("tool please")]
    calls: dict[int, Any] = {}
    finish = None
    for event in ask(client, messages, stream=True, tools=[ADD]):
        finish = event.choices[0].finish_reason or finish
        for delta in event.choices[0].delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"id": delta.id, "type": "function", "function": {"name": "", "arguments": ""}})
            call["function"]["name"] += delta.function.name or ""
            call["function"]["arguments"] += delta.function.arguments or ""
    messages.append({"role": "assistant", "tool_calls": list(calls.values())})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls.values()]
    last = ask(client, messages, tools=[ADD]).choices[0].message.content
    post_reward(client, reward=1)
    return [content, usage.completion_tokens, finish, [json.loads(call["function"]["arguments"]) for call in calls.values()], last]


def branches(client: openai.OpenAI) -> Any:
    """A plan, two ways to go on from it, and a sub-agent that knows nothing of it, all three at a time."""
    plan = [user("plan"), ask(client, [user("plan")]).choices[0].message]
    talks = [[*plan, user("left")], [*plan, user("right, and further")], [user("you are a sub-agent")]]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda messages: ask(client, messages).choices[0].message.content, talks))
    post_reward(client, reward=1)
    return replies


def rewrite(client: openai.OpenAI) -> Any:
    first = ask(client, [user("first")]).choices[0].message
    ask(client, [user("first"), first, user("second")])
    reply = ask(client, [user("first"), {"role": "assistant", "content": "never said"}, user("second")])
    post_reward(client, reward=1)
    return reply.choices[0].message.content


def leaves(client: openai.OpenAI) -> Any:
    """Goes away in the middle of a stream, and does not come back."""
    ask(client, [user("fine")])
    with ask(client, [user("hang")], stream=True) as events:
        return next(iter(events)).choices[0].delta.role


def failures(client: openai.OpenAI) -> Any:
    """Everything that is refused: a name for it → status and code."""
    url = client.base_url
    other = openai.OpenAI(base_url=url, api_key=client.api_key[:-1] + ("a" if client.api_key[-1] != "a" else "b"))
    attempts: dict[str, Callable[[], Any]] = {
        "another key": lambda: ask(other, [user("x")]),
        "another key, reward": lambda: post_reward(other, reward=1),
        "unknown path": lambda: client.post("/embeddings", cast_to=object, body={}),
        "two choices": lambda: ask(client, [user("x")], n=2),
        "a forced tool": lambda: ask(client, [user("x")], tools=[ADD], tool_choice="required"),
        "no messages": lambda: ask(client, []),
        "an image": lambda: ask(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
        "no token for it": lambda: ask(client, [user("\u00e9")]),
        "too long for the context": lambda: ask(client, [user("x" * 5000)]),
        "100 MB": lambda: ask(client, [user("x" * 100_000_000)]),
        "100 MB, another key": lambda: ask(other, [user("x" * 100_000_000)]),
        "garbage": lambda: client.post("/chat/completions", cast_to=object, content=b"\xff{garbage"),
        "no number": lambda: post_reward(client, reward="good"),
    }
    seen = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except openai.APIStatusError as error:
            seen[name] = [error.status_code, error.body.get("code") if isinstance(error.body, dict) else None]
    return [seen, [model.id for model in client.models.list()]]


def main() -> None:
    seen = {}
    for name, key in json.loads(sys.argv[1]).items():
        client = openai.OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=key, max_retries=0, timeout=60)
        seen[name] = globals()[name](client)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
