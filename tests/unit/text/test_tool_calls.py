"""Calls are read from whatever a model writes, in their order; nothing that it writes is an exception."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.text.tool_calls import MAX_DEPTH, Reading, ToolCall, read_plain_call, read_tool_calls

NAMES = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(st.text(), VALUES, max_size=3))


def spelled(call: ToolCall) -> str:
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)}, ensure_ascii=False)}\n</tool_call>"


@given(st.lists(CALLS, max_size=4), st.booleans())
def test_what_is_written_is_read(calls: list[ToolCall], ends_in_stop_string: bool) -> None:
    reply = "Let me see. " + "\n".join(map(spelled, calls))
    if ends_in_stop_string and calls:
        reply = reply.removesuffix("</tool_call>")
    reading = read_tool_calls(reply)
    assert reading.calls == tuple(calls)
    assert reading.problems == ()
    assert reading.text == "Let me see."


def test_an_argument_may_spell_the_tags() -> None:
    call = ToolCall("search", {"query": "what is </tool_call> and <tool_call>?"})
    assert read_tool_calls(spelled(call) + spelled(call)) == Reading((call, call), "")


def test_arguments_may_be_left_out() -> None:
    assert read_tool_calls('<tool_call>{"name": "now"}</tool_call>').calls == (ToolCall("now", {}),)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {"a": 1}', "not valid JSON"),
        ('{"name": "f"} and more', "behind the object"),
        ("{'name': 'f'}", "not valid JSON"),
        ("[1]", "no tool is named"),
        ("7", "no tool is named"),
        ('{"name": 3}', "no tool is named"),
        ('{"name": ""}', "no tool is named"),
        ('{"name": "f", "arguments": [1]}', "no JSON object"),
        ('{"name": "f", "arguments": "{}"}', "no JSON object"),
        ('{"name": "f", "arguments": {"a": NaN}}', "no finite number"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "no finite number"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "no finite number"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "\\ud800", "arguments": {}}', "surrogate"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}", "not valid JSON"),
        ('{"name": "f", "arguments": {"a": ' + "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2) + "}}", "nested"),
    ],
)
def test_what_is_malformed_is_a_problem_in_its_place(content: str, problem: str) -> None:
    good = ToolCall("now", {})
    reading = read_tool_calls(f"a{spelled(good)}b<tool_call>{content}</tool_call>c{spelled(good)}d")
    first, broken, last = reading.parts
    assert (first, last) == (good, good)
    assert isinstance(broken, str)
    assert problem in broken
    assert len(broken) < 300
    assert reading.text == "abcd"


def test_a_call_without_its_closing_tag_ends_where_the_next_begins() -> None:
    reading = read_tool_calls('<tool_call>{"name": <tool_call>{"name": "now"}')
    assert len(reading.problems) == 1
    assert reading.calls == (ToolCall("now", {}),)


def test_thoughts_hold_no_calls() -> None:
    call = spelled(ToolCall("now", {}))
    assert read_tool_calls(f"<think>I could {call}</think>No.").parts == ()
    assert read_tool_calls(f"hm, {call}</think>No.").parts == ()
    assert read_tool_calls(f"<think>I could {call}").parts == ()
    assert len(read_tool_calls(f"<think>So.</think>{call}").calls) == 1
    assert read_tool_calls("<think>So.</think>Yes.").text == "<think>So.</think>Yes."


PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"f"', "}", "[", "\\ud800", " ", "9"])


@given(st.lists(PIECES, max_size=20).map("".join))
def test_any_text_can_be_read(reply: str) -> None:
    reading = read_tool_calls(reply)
    assert len(reading.parts) == len(reading.calls) + len(reading.problems)
    assert len(reading.text) <= len(reply)


TOOLS = {"calculator": "expression", "search": "query"}


@pytest.mark.parametrize("reply", ["[12+34", "so [12+34=", "[ calculator : 12+34 ", "[calculator:12+34="])
def test_a_plain_call_of_the_only_tool(reply: str) -> None:
    reading = read_plain_call(reply, {"calculator": "expression"})
    assert reading.calls == (ToolCall("calculator", {"expression": "12+34"}),)
    assert reading.text in ("", "so")


def test_a_plain_call_names_one_of_several_tools() -> None:
    assert read_plain_call("[search: a: b", TOOLS).calls == (ToolCall("search", {"query": "a: b"}),)
    (problem,) = read_plain_call("[12+34", TOOLS).problems
    assert "calculator, search" in problem


def test_a_plain_reply_without_a_call() -> None:
    assert read_plain_call(" 46=", TOOLS) == Reading((), "46=")


def test_a_result_that_the_model_invents_is_a_problem() -> None:
    (problem,) = read_plain_call("[12+34=47]47", {"calculator": "expression"}).problems
    assert "stop strings" in problem


def test_the_marks_of_a_plain_call_can_be_chosen() -> None:
    assert read_plain_call("a[0]=1 ask 12+34 go", {"f": "x"}, opening="ask", asking="go").calls == (ToolCall("f", {"x": "12+34"}),)
