"""Tool use: calls and results turn by turn, errors told to the model, and the tools themselves, hostile input included."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from drumroll.config.load import load_config
from drumroll.config.models import EnvConfig
from drumroll.envs.base import Step
from drumroll.envs.tools import Tool, ToolBox, ToolConfig, ToolError, Tools
from drumroll.envs.tools.calculator import MAX_BITS, calculator, evaluate, format_number
from drumroll.envs.tools.env import cut
from drumroll.envs.tools.function import function_tool, read_docstring
from drumroll.envs.tools.python import python, workshop
from drumroll.envs.tools.search import search, split_passages, words
from drumroll.envs.tools.shared import once_per_loop
from drumroll.errors import ConfigError, DataError, PluginError
from drumroll.models.scratch import scratch_tokenizer
from drumroll.registry import REGISTRY, Entry, register
from drumroll.rewards.compose import RewardSet
from drumroll.rollout.episode import Limits, Setting, Stage, run_episode
from drumroll.rollout.lease import Lease
from drumroll.text.renderer import Renderer
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, GenRequest, Sampling, Task, Trajectory

HERE = __name__
QUESTION = Task("t", prompt="12+34=")


def lookup(word: str, times: int = 1, *, table: dict[str, str] = {"red": "rot"}) -> str:  # noqa: B006
    """Translates a word.

    It knows few words.

    Args:
        word (str): In English,
            in small letters.
        times: How often.

    Returns:
        The word in German.
    """
    if word not in table:
        raise ToolError(f"no such word: {word}")
    return " ".join([table[word]] * times)


def broken(word: str) -> str:
    raise OSError("the disk is gone")


def bodiless(text: str) -> object:
    return object()


def double(number: int) -> int:
    return 2 * number


async def pair(left: Literal["a", "b"], right: Annotated[list[int], Field(description="Numbers.")] = []) -> dict[str, Any]:  # noqa: B006
    """Puts two things side by side."""
    return {"left": left, "right": right}


@register.tool("tests_counter")
class Counter(ToolBox):
    """Two tools that share a number."""

    class Config(ToolConfig):
        first: int = 0

    async def tools(self) -> Sequence[Tool]:
        self.number = self.config.first
        nothing = {"type": "object", "properties": {}}
        return [Tool("raise_it", "Adds one.", nothing, self.raise_it), Tool("tell", "Tells it.", nothing, self.tell)]

    async def raise_it(self, arguments: Any) -> str:
        self.number += 1
        return "done"

    async def tell(self, arguments: Any) -> str:
        return str(self.number)


def configured(*tools: Any, **options: Any) -> Tools.Config:
    return Tools.Config.model_validate({"kind": "tools", "tools": list(tools), **options})


def asked(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(config: Tools.Config, *replies: str, task: Task = QUESTION) -> list[Step]:
    """The steps of an episode, the first one included."""

    async def episode() -> list[Step]:
        env = Tools(config)
        steps = [await env.start(task)]
        for reply in replies:
            steps.append(await env.step(reply))
        await env.close()
        return steps

    return asyncio.run(episode())


def results(step: Step) -> list[str]:
    assert step.messages is not None
    assert {message["role"] for message in step.messages} == {"tool"}
    return [message["content"] for message in step.messages]


def in_loop(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def refused(coroutine: Any) -> str:
    with pytest.raises(ToolError) as caught:
        asyncio.run(coroutine)
    return str(caught.value)


# The environment.


def test_calls_are_answered_until_a_reply_has_none() -> None:
    first, second, last = played(configured("calculator"), "Let me see. " + asked("calculator", expression="12+34"), "It is 46.")
    assert first.messages == ({"role": "user", "content": "12+34="},)
    assert first.tools is not None
    (schema,) = first.tools
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]
    assert second.messages == [{"role": "tool", "name": "calculator", "content": "46"}]
    assert (second.done, second.reward, second.metrics) == (False, None, {"calls": 1.0, "invalid_calls": 0.0})
    assert (last.done, last.reward, last.success) == (True, None, None)


def test_a_conversation_is_shown_as_it_is() -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})
    (first,) = played(configured("calculator"), task=Task("t", messages=messages))
    assert first.messages == messages
    assert Tools.needs_prompt


def test_several_calls_in_one_reply_are_answered_in_order() -> None:
    reply = asked("raise_it") + asked("tell") + "<tool_call>{oops}</tool_call>" + asked("raise_it") + asked("tell")
    _, step = played(configured({"kind": "tests_counter", "first": 5}), reply)
    one, two, oops, three, four = results(step)
    assert (one, two, three, four) == ("done", "6", "done", "7")
    assert oops.startswith("error: not valid JSON")
    assert step.metrics == {"calls": 5.0, "invalid_calls": 1.0}


def test_boxes_of_two_episodes_are_strangers() -> None:
    config = configured("tests_counter")
    assert results(played(config, asked("raise_it"), asked("tell"))[2]) == ["1"]
    assert results(played(config, asked("tell"))[1]) == ["0"]


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (asked("calculater", expression="1"), "error: no tool is named 'calculater'. Did you mean 'calculator'? There are: calculator"),
        (asked("calculator"), "error: the arguments of 'calculator' do not fit: 'expression' is a required property"),
        (asked("calculator", expression=12), "error: the arguments of 'calculator' do not fit: expression: 12 is not of type 'string'"),
        (asked("calculator", expression="1", base=2), "error: the arguments of 'calculator' do not fit: Additional properties"),
        (asked("calculator", expression="1/0"), "error: division by zero"),
        ("<tool_call>{", "error: not valid JSON"),
    ],
)
def test_a_bad_call_is_told_and_counted(reply: str, told: str) -> None:
    _, step, last = played(configured("calculator"), reply, "I give up")
    (result,) = results(step)
    assert result.startswith(told)
    assert step.metrics == {"calls": 1.0, "invalid_calls": 1.0}
    assert last.done


def test_huge_arguments_give_a_short_error() -> None:
    _, step = played(configured("calculator"), asked("calculator", expression=["x" * 100_000]))
    assert len(results(step)[0]) < 500


@given(st.text(max_size=80) | st.text(max_size=40).map(lambda text: f"<tool_call>{text}</tool_call>"))
def test_no_reply_is_an_exception(reply: str) -> None:
    played(configured("calculator"), reply)
    played(configured("calculator", plain={}), reply)


def test_results_are_cut() -> None:
    _, step = played(configured("calculator", result_chars=5), asked("calculator", expression="10**20"))
    assert results(step) == ["10000… (cut; 21 characters)"]
    assert cut("a\ud800b", 5) == "a?b"


def test_calls_have_a_budget() -> None:
    call = asked("calculator", expression="1")
    steps = played(configured("calculator", max_calls=3), call, call * 4, call)
    assert results(steps[2])[:2] == ["1", "1"]
    assert results(steps[2])[2:] == ["error: no calls are left; give the answer"] * 2
    assert (steps[3].done, steps[3].success) == (True, False)
    assert not played(configured("calculator", max_calls=1), call, "1")[2].success  # None: the reward functions judge the answer


def test_a_call_may_cost() -> None:
    call = asked("calculator", expression="1")
    steps = played(configured("calculator", call_cost=0.25), call * 2, call, "1")
    assert [step.reward for step in steps] == [None, -0.5, -0.25, None]


def test_states_are_equal_where_the_same_was_asked_and_answered() -> None:
    config = configured("calculator")
    one, two = asked("calculator", expression="1"), asked("calculator", expression="2-1")
    assert played(config, one)[1].state == played(config, f"Well: {one}")[1].state
    assert played(config, one)[1].state != played(config, two)[1].state
    assert played(config, one, one)[2].state != played(config, one)[1].state


def test_a_tool_that_raises_is_a_failure_and_not_a_verdict() -> None:
    with pytest.raises(OSError, match="disk is gone"):
        played(configured(f"{HERE}:broken"), asked("broken", word="a"))
    with pytest.raises(TypeError, match="'bodiless' returned a object"):
        played(configured(f"{HERE}:bodiless"), asked("bodiless", text="a"))


# Plain text.


def test_plain_calls_read_on_in_the_text() -> None:
    first, second, last = played(configured("calculator", plain={}), "[12+34", "46")
    assert (first.prompt, first.tools) == ("12+34=", None)
    assert (second.prompt, second.messages) == ("46]", None)
    assert (last.done, last.metrics) == (True, {"calls": 1.0, "invalid_calls": 0.0})


def test_plain_errors_are_one_mark_or_told() -> None:
    steps = played(configured("calculator", plain={}), "[12+", "[1=1]1")
    assert [step.prompt for step in steps[1:]] == ["?]", "?]"]
    assert steps[2].metrics["invalid_calls"] == 2.0
    spoken = played(configured("calculator", plain={"error": None, "closing": ">"}), "[1/0")[1]
    assert spoken.prompt == "error: division by zero>"


def test_plain_calls_of_several_tools_say_which(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Cats sleep.")
    config = configured("calculator", {"kind": "search", "folder": str(tmp_path)}, plain={})
    steps = played(config, "[calculator:2*3", "[search: cats", "[2*3")
    assert [step.prompt for step in steps[1:]] == ["6]", "[a.txt]\nCats sleep.]", "?]"]


def test_plain_calls_need_text() -> None:
    with pytest.raises(ConfigError, match="chat messages"):
        played(configured("calculator", plain={}), task=Task("t", messages=({"role": "user", "content": "a"},)))


class Script:
    """An engine that says its lines in characters, and stops at a stop string or adds the end token."""

    def __init__(self, tokenizer: Tokenizer, *lines: str) -> None:
        self.tokenizer = tokenizer
        self.lines = list(lines)

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
        line = self.lines.pop(0)
        cuts = [at + len(word) for word in request.sampling.stop if (at := line.find(word)) >= 0]
        ids = self.tokenizer.encode(line[: min(cuts)]) if cuts else [*self.tokenizer.encode(line), self.tokenizer.eos_ids[0]]
        return Chunk(request.id, ids, [-0.5] * len(ids), [1] * len(ids), "stop")


def test_a_whole_episode_with_a_stop_string(tmp_path: Path) -> None:
    scratch_tokenizer("0123456789+=[]?").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    config = configured("calculator", plain={})
    rewards = RewardSet([REGISTRY.lookup("reward", "exact_match").schema(_reward_config())(kind="exact_match")], 5.0)
    stage = Stage(
        0, {"*": Setting(lambda: Tools(config), rewards)}, (Script(tokenizer, "[12+34=99", "46"),), Renderer(tokenizer), Limits(4, 64)
    )
    task = replace(QUESTION, data={"answer": "46"})
    lease = Lease("g/000", "g", task, seed=1, sampling=Sampling(stop=("=",)), engine=0, deadline_s=30.0)

    async def run() -> Trajectory:
        return await run_episode(lease, stage, asyncio.get_running_loop().create_future())

    trajectory = asyncio.run(run())
    assert trajectory.error == ""
    assert (trajectory.reward, trajectory.last_reply, trajectory.stop_reason) == (1.0, "46", "done")
    assert tokenizer.decode(trajectory.token_ids.tolist()) == "12+34=[12+34=46]46"
    trained = trajectory.token_ids[trajectory.loss_mask].tolist()
    assert tokenizer.decode(trained) == "[12+34=46"
    assert trained[-1] == tokenizer.eos_ids[0]


def _reward_config() -> Any:
    from drumroll.config.models import RewardConfig

    return RewardConfig


# Configs.


def test_a_config_lists_tools_by_name_by_path_and_with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shouting_tools.py").write_text('def shout(text: str) -> str:\n    """Louder."""\n    return text.upper()\n')
    monkeypatch.chdir(tmp_path)
    entry = REGISTRY.lookup("env", "tools")
    assert entry.target is Tools
    tools = [
        "calculator",
        {"kind": "python", "wall_s": 3},
        "./shouting_tools.py:shout",
        {"kind": f"{HERE}:lookup", "table": {"blue": "blau"}},
    ]
    config = entry.schema(EnvConfig).model_validate({"kind": "tools", "tools": tools})
    assert isinstance(config, Tools.Config)
    assert config == Tools.Config.model_validate(json.loads(config.model_dump_json()))
    first, *steps = played(config, asked("shout", text="hi"), asked("lookup", word="blue", times=2), asked("lookup", word="red"))
    assert first.tools is not None
    assert [tool["function"]["name"] for tool in first.tools] == ["calculator", "python", "shout", "lookup"]
    assert [results(step) for step in steps] == [["HI"], ["blau blau"], ["error: no such word: red"]]


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({}, "tools"),
        ({"tools": []}, "at least 1"),
        ({"tools": ["calculater"]}, "Did you mean 'calculator'"),
        ({"tools": [{"kind": "search"}]}, "folder"),
        ({"tools": [{"kind": "calculator", "digits": 3}]}, "digits"),
        ({"tools": ["calculator", "calculator"]}, "two tools are named 'calculator'"),
        ({"tools": [f"{HERE}:double"], "plain": {}}, "exactly one text"),
        ({"tools": [f"{HERE}:Script"]}, "does not extend"),
        ({"tools": ["calculator"], "plain": {"asking": ""}}, "at least 1"),
        ({"tools": [{"kind": "mcp"}]}, "either `command`"),
        ({"tools": [{"kind": "mcp", "command": ["a"], "url": "http://b"}]}, "either `command`"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(section: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Tools.Config.model_validate({"kind": "tools", **section})


def test_the_command_line_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "pipeline: rl\nname: a\nmodel: {path: m}\ndata: {train: {path: d}}\nenv: {kind: tools, tools: [{kind: calculator, digits: 2}]}\n"
    )
    with pytest.raises(ConfigError, match=r"env\.tools.*digits"):
        load_config([tmp_path / "run.yaml"])


# Functions as tools.


def tool_of(function: Any, **options: Any) -> Tool:
    entry = Entry("tool", f"{HERE}:{function.__name__}", function)
    return function_tool(entry, entry.schema(ToolConfig)(kind=entry.name, **options))


def test_a_signature_and_a_docstring_make_a_schema() -> None:
    tool = tool_of(lookup)
    assert tool.name == "lookup"
    assert tool.description == "Translates a word.\n\nIt knows few words."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "In English, in small letters."},
            "times": {"type": "integer", "description": "How often."},
        },
        "required": ["word"],
        "additionalProperties": False,
    }
    assert tool.text_argument == "word"


def test_types_beyond_text() -> None:
    tool = tool_of(pair)
    assert tool.parameters["properties"]["right"] == {"type": "array", "items": {"type": "integer"}, "description": "Numbers."}
    assert tool.problem_with({"left": "c"})
    assert tool.problem_with({"left": "a", "right": ["1"]}).startswith("right.0: ")
    assert not tool.problem_with({"left": "a"})
    assert json.loads(in_loop(tool.call({"left": "a", "right": [1, 2]}))) == {"left": "a", "right": [1, 2]}


def test_arguments_come_as_the_types_say() -> None:
    def half(number: int, title: Fraction | None = None) -> str:
        return f"{number!r} {title!r}"

    tool = tool_of(half)
    assert "title" in tool.parameters["properties"]
    assert in_loop(tool.call({"number": 3.0})) == "3 None"
    assert "title" in refused(tool.call({"number": 3, "title": "x"}))


def test_a_signature_that_leaves_something_open_is_refused() -> None:
    def untyped(word):  # type: ignore[no-untyped-def]
        return word

    def many(*words: str) -> str:
        return ""

    def odd(thing: Script) -> str:
        return ""

    for function, complaint in ((untyped, "has no type"), (many, "cannot be given by name"), (odd, "cannot be told")):
        with pytest.raises(PluginError, match=complaint):
            tool_of(function)


def test_a_docstring_without_parameters() -> None:
    assert read_docstring("Does it.") == ("Does it.", {})
    assert read_docstring("") == ("", {})
    assert read_docstring("Does it.\n\nOptions:\n    b: z\n\nArgs:\n    a: x") == ("Does it.", {"a": "x"})
    assert read_docstring("Does it.\n\nArgs:\n    a: x: y\n\nRaises:\n    b: z") == ("Does it.", {"a": "x: y"})


def test_schemas_are_checked_without_leaving_the_machine() -> None:
    async def call(arguments: Any) -> str:
        return ""

    with pytest.raises(ValueError, match="no JSON schema"):
        Tool("f", "", {"type": "objekt"}, call).check_schema()
    local = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    assert Tool("f", "", local, call).problem_with({"a": "x"}).startswith("a: ")
    remote = Tool("f", "", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}, call)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        remote.problem_with({"a": 1})


def test_what_is_shared_belongs_to_one_loop() -> None:
    made: list[object] = []

    @once_per_loop
    def make(name: str) -> object:
        made.append(object())
        return made[-1]

    async def twice() -> tuple[object, object]:
        return make("a"), make("a")

    one, same = asyncio.run(twice())
    other, _ = asyncio.run(twice())
    assert one is same
    assert other is not one
    assert len(made) == 2


# The calculator.


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("123456789012345678901234567890+987654321098765432109876543210", "1111111110111111111011111111100"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 / 2", "3.5"),
        ("10**30 / 10**29", "10"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("-2 ** 2", "-4"),
        ("0.1 + 0.2", "0.3"),
        ("1e3 + .5", "1000.5"),
        ("012 + 0034", "46"),
        ("1.005 + 1e-05", "1.00501"),
        ("sqrt(10**40)", "100000000000000000000"),
        ("sqrt(2)", "1.41421356237"),
        ("max(1, min(5, 3), abs(-2))", "3"),
        ("round(2.567, 1)", "2.6"),
        ("round(2.567)", "3"),
        ("round(1234, -2)", "1200"),
        ("1**(10**1000)", "1"),
        ("+5", "5"),
        ("sqrt(" * 150 + "1" + ")" * 150, "1"),
        ("+".join(["1"] * 300), "300"),
    ],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert in_loop(calculator(expression)) == result


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("1, 2", "not an arithmetic expression"),
        ("1(2)", "not an arithmetic expression"),
        ("abs", "not an arithmetic expression"),
        ("min(*(1, 2))", "not an arithmetic expression"),
        ("1\n+2", "not an arithmetic expression"),
        ("٣+1", "cannot be read"),
        ("x + 1", "cannot be read"),
        ("__import__('os').system('id')", "cannot be read"),
        ("().__class__", "cannot be read"),
        ("1if 2else 3", "cannot be read"),
        ("[1 for _ in (1,)]", "cannot be read"),
        ("'a' * 10**9", "cannot be read"),
        ("1_000", "cannot be read"),
        ("0x10", "cannot be read"),
        ("2j", "cannot be read"),
        ("1\x00", "cannot be read"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("5 % 0.0", "division by zero"),
        ("9**9**9", "too large"),
        ("9**9**9**9**9", "too large"),
        ("(-9)**9999999", "too large"),
        ("10**1000 * 10**1000", "too large"),
        ("9.0**9999", "too large"),
        ("1e400", "too large"),
        ("10**400 + 0.5", "too large"),
        ("sqrt(10**999)", "too large"),
        ("2 ** -(10**900)", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("sqrt(-1)", "not a real number"),
        ("round(1, 0.5)", "whole number of digits"),
        ("round(1, -10**9)", "whole number of digits"),
        ("abs()", "abs takes"),
        ("max()", "max takes"),
        ("-" * 999 + "1", "not an arithmetic|nested"),
        ("(" * 499 + "1" + ")" * 499, "not an arithmetic|nested"),
        ("1" * 1_000_000, "1000 are allowed"),
        ("9" * 990 + "**2", "too large"),
    ],
)
def test_hostile_arithmetic_is_refused(expression: str, complaint: str) -> None:
    with pytest.raises(ToolError, match=complaint):
        evaluate(expression)


NUMBERS = st.integers(-(10**30), 10**30)
EXPRESSIONS = st.recursive(
    NUMBERS.map(lambda number: f"({number})"),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=8,
)


def outcome(expression: str) -> str:
    try:
        return format_number(evaluate(expression))
    except ToolError as error:
        return str(error)


@given(EXPRESSIONS)
def test_whole_numbers_are_as_python_has_them(expression: str) -> None:
    try:
        expected = str(eval(expression))  # made here, from numbers and operators
    except ZeroDivisionError:
        expected = "division by zero"
    assert outcome(expression) == expected


@given(st.text("0123456789+-*/%()., eabsqrtminmxroud", max_size=40))
def test_whatever_is_typed_ends_in_a_bounded_number_or_an_error(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ToolError:
        return
    assert isinstance(value, float) or value.bit_length() <= MAX_BITS


# Python.


def test_python_runs_in_the_sandbox() -> None:
    async def all_of_it() -> None:
        assert await python("print(sum(range(10)))") == "45"
        assert await python("x = 1") == "the program printed nothing"
        many = await asyncio.gather(*(python(f"print({number})") for number in range(8)))
        assert many == [str(number) for number in range(8)]
        for program, complaint in {
            "print('so far')\n1/0": "ZeroDivisionError",
            "def f(:": "SyntaxError",
            "while True: pass": "longer than 0.5 s",
            "while True: print('x' * 10_000)": "printed too much",
            f"print(open({sys.executable!r} + '_no', 'w'))": "exit status 1",
            "import socket; socket.socket()": "exit status 1|killed",
        }.items():
            with pytest.raises(ToolError, match=complaint):
                await python(program, wall_s=0.5 if "while True: pass" in program else 10.0)
        await workshop()[0].close()

    asyncio.run(all_of_it())


def test_a_failing_program_is_told_to_the_model() -> None:
    _, step, again = played(configured({"kind": "python", "wall_s": 10}), asked("python", code="1/0"), asked("python", code="print(2)"))
    assert results(step)[0].startswith("error: the program failed (exit status 1)")
    assert results(step)[0].endswith("ZeroDivisionError: division by zero")
    assert results(again) == ["2"]


# Search.


@pytest.fixture
def documents(tmp_path: Path) -> str:
    folder = tmp_path / "docs"
    (folder / "animals").mkdir(parents=True)
    (folder / "animals" / "cats.md").write_text("# Cats\n\nCats sleep most of the day.\n\nA cat has four paws.")
    (folder / "animals" / "dogs.txt").write_text("Dogs bark. Some dogs chase cats.")
    (folder / "space.txt").write_bytes(b"The moon orbits the earth. \xff\xfe")
    (folder / "ignored.json").write_text('{"zebra": 1}')
    (folder / "empty.md").write_text("\n\n")
    return str(folder)


def test_search_finds_passages_with_their_files(documents: str) -> None:
    assert in_loop(search("MOON!", folder=documents)).startswith("[space.txt]\nThe moon orbits the earth.")
    found = in_loop(search("do cats sleep?", folder=documents))
    assert found.startswith("[animals/cats.md]\n# Cats\n\nCats sleep most of the day.")
    assert "[animals/dogs.txt]" in found
    assert "dogs.txt" not in in_loop(search("do cats sleep?", folder=documents, num_results=1))
    assert "[animals/cats.md]\nA cat has four paws." in in_loop(search("paws", folder=documents, passage_chars=40))


@pytest.mark.parametrize("query", ["zebra", "", "?!", "\x00", "x" * 100_000, " ".join(map(str, range(5000)))])
def test_a_search_that_finds_nothing(documents: str, query: str) -> None:
    assert in_loop(search(query, folder=documents)) == "nothing was found"


def test_an_index_is_made_once(documents: str) -> None:
    async def many() -> list[str]:
        return await asyncio.gather(*(search("cats", folder=documents, passage_chars=77) for _ in range(8)))

    assert len(set(asyncio.run(many()))) == 1
    (Path(documents) / "more.txt").write_text("zebra")
    assert in_loop(search("zebra", folder=documents, passage_chars=77)) == "nothing was found"
    assert "zebra" in in_loop(search("zebra", folder=documents, passage_chars=78))


@pytest.mark.parametrize("name", ["nowhere", "docs/animals/none"])
def test_a_folder_without_text_is_the_users_mistake(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="holds no text"):
        in_loop(search("a", folder=str(tmp_path / name)))


@given(st.text("ab \n", max_size=200), st.integers(1, 30))
def test_passages_are_small_and_lose_no_word(text: str, size: int) -> None:
    passages = list(split_passages(text, size))
    assert all(0 < len(passage) <= size for passage in passages)
    assert "".join("".join(words(passage)) for passage in passages) == "".join(words(text))
