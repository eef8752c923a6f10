"""Code that a model wrote, judged by the task's tests in a sandbox.

    reply → extract_code → (prefix +) program ─┬─ stdin tests: Sandbox.run, output compared here
    tests column → read_tests ─────────────────┴─ calls: Python asserts, Sandbox.examine

Expected values never enter the process that runs the reply's code.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.rewards.place import Place
from drumroll.sandbox import Limits, Sandbox
from drumroll.types import Task, Trajectory

LARGEST_CODE = 1 << 20
"""Characters; no honest solution comes near."""
TOLERANCE = 1e-6
"""How far a number with a decimal point may be from the expected one, absolutely or relatively."""
ACCEPTED = (
    'Accepted: [{"input": text, "output": text}, …]; {"inputs": […], "outputs": […]}, for functions with "fn_name"; '
    '["assert f(1) == 2", …]; one text of Python tests; [{"call": name, "args": […], "kwargs": {…}, "expected": value}, …]; '
    "or any of these as JSON text."
)


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Inputs of a whole program with the outputs they should lead to: `StdinTests((("1 2\\n", "3\\n"),))`."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Python sources that assert something of what the program defines: `CallTests(("assert add(1, 2) == 3",))`."""

    sources: tuple[str, ...]


@register.reward("code", seat="pooled")
class Code:
    """1.0 when the reply's Python code passes the task's tests in a sandbox, else 0.0.

    The code is the reply's last fenced block that is marked as Python or not marked, or the whole reply where there is no fence.
    The column `tests_field` holds one of these, as data or as JSON text:

    - `[{"input": "1 2", "output": "3"}, …]` or `{"inputs": ["1 2", …], "outputs": ["3", …]}`: a program reads the input from stdin and
      prints the output. Inputs and outputs may also be lists of lines. Outputs are compared word by word, whatever the space between
      them. Where the expected word is a number with a decimal point or exponent, the printed one may be off by 1e-6, absolutely or
      relatively. The program must end by itself, without an error.
    - `{"inputs": [[1, 2], …], "outputs": [3, …], "fn_name": "add"}` (APPS, TACO): the function, or the method of that name of a class
      `Solution`, is called with each list of arguments. Tuples count as lists, keys of mappings as text, floats may be off as above, and an
      expected list of one value also stands for the value.
    - `[{"call": "add", "args": [1, 2], "kwargs": {}, "expected": 3}, …]`: the same, without the last rule.
    - `["assert add(1, 2) == 3", …]` (MBPP): each statement is one test.
    - one text of Python tests (HumanEval): it is one test. Where it defines `check(candidate)`, `entry_field` names the column with the
      name of the function to check.
    """

    class Config(RewardConfig):
        """Which columns hold what, and what a program may use."""

        tests_field: str = "tests"
        """Column with the tests."""
        entry_field: str | None = None
        """Column with the name of the function that the tests call `candidate`."""
        prefix_field: str | None = None
        """Column with the beginning of the program, such as HumanEval's prompt. The reply may continue it or define everything anew."""
        setup_field: str | None = None
        """Column with Python that runs before each test, after the program, such as MBPP's `test_setup_code`."""
        score: Literal["all", "share"] = "all"
        """all: 1.0 only when every test passes; share: the share of tests that pass."""
        wall_s: PositiveFloat = 10.0
        """Seconds for all tests of a task together; for stdin tests, for each input."""
        memory_mib: PositiveInt = 1024
        """Memory of the program, in MiB."""
        max_tests: PositiveInt | None = None
        """Take only the first tests of each task; all otherwise."""
        deadline_s: PositiveFloat = 300.0
        """For one sample. A program whose stdin tests have taken nine tenths of it fails those that are left."""

        @model_validator(mode="after")
        def _times_fit(self) -> Code.Config:
            if self.wall_s > 0.9 * self.deadline_s:
                raise ValueError(f"`wall_s` ({self.wall_s:g}) must be less than nine tenths of `deadline_s` ({self.deadline_s:g}).")
            return self

    concurrency = 1  # the wall clock of a second program would run while it waits for a core

    def __init__(self, config: Config, sandbox: Sandbox | None = None) -> None:
        self._config = config
        self._sandbox = sandbox or Sandbox()

    async def start(self, place: Place) -> None:
        """Make the sandbox; a `SandboxError` where the kernel offers no isolation."""
        await self._sandbox.start()

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.close()

    def check_task(self, task: Task) -> None:
        """A `ValueError` that says what is wrong with the task's columns."""
        self._tests(task)
        self._prefix(task)

    async def __call__(self, trajectory: Trajectory) -> float:
        task = trajectory.task
        code = extract_code(trajectory.last_reply)
        tests = self._tests(task)
        if code is None:
            return 0.0
        program = join_program(self._prefix(task), code, self._entry(task))
        passed = await (self._run(program, tests) if isinstance(tests, StdinTests) else self._examine(program, tests, task))
        return float(all(passed)) if self._config.score == "all" else sum(passed) / len(passed)

    async def _examine(self, program: str, tests: CallTests, task: Task) -> Sequence[bool]:
        limits = Limits(wall_s=self._config.wall_s, memory_mib=self._config.memory_mib)
        examination = await self._sandbox.examine(program, tests.sources, limits=limits)
        if examination.broken:
            raise ValueError(
                f"task '{task.id}': the tests in column '{self._config.tests_field}' cannot be run: {examination.broken}. "
                f"Put the task right or leave it out."
            )
        return examination.passed

    async def _run(self, program: str, tests: StdinTests) -> Sequence[bool]:
        """One run for each input; the rest fails when the verdict is clear or there is no time left."""
        passed = [False] * len(tests.cases)
        spent_s = 0.0
        for number, (stdin, expected) in enumerate(tests.cases):
            if spent_s + self._config.wall_s > 0.9 * self._config.deadline_s:
                break
            limits = Limits(
                wall_s=self._config.wall_s,
                memory_mib=self._config.memory_mib,
                output_bytes=max(Limits().output_bytes, 2 * len(expected.encode())),
            )
            run = await self._sandbox.run(program, stdin=stdin, limits=limits)
            spent_s += run.seconds
            passed[number] = run.ending == "exited" and run.exit_code == 0 and same_output(run.stdout, expected)
            if not passed[number] and self._config.score == "all":
                break
        return passed

    def _tests(self, task: Task) -> StdinTests | CallTests:
        field, entry = self._config.tests_field, self._entry(task)
        try:
            setup = helpers(self._prefix(task), entry) + self._text(task, self._config.setup_field)
            tests = read_tests(task.data[field], entry=entry, setup=setup)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column '{field}': {error}") from error
        most = self._config.max_tests
        return StdinTests(tests.cases[:most]) if isinstance(tests, StdinTests) else CallTests(tests.sources[:most])

    def _entry(self, task: Task) -> str | None:
        field = self._config.entry_field
        if field is None:
            return None
        name = task.data[field]
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"column '{field}' holds {_shown(name)}; the name of a function was expected.")
        return name

    def _prefix(self, task: Task) -> str:
        return self._text(task, self._config.prefix_field)

    def _text(self, task: Task, field: str | None) -> str:
        """A column's text; empty where the config names no column or the row holds null."""
        text = None if field is None else task.data[field]
        if text is not None and not isinstance(text, str):
            raise ValueError(f"column '{field}' holds {_shown(text)}; text was expected.")
        return text or ""


# What the reply says.

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_PYTHON = {"python", "python3", "py", "py3"}


def extract_code(reply: str) -> str | None:
    """The reply's Python: its last fenced block marked as Python, else its last unmarked one, else, where nothing is fenced, all of it.

    What stands before the last `</think>` does not count. A block that is still open at the end does. None where there is no code, and for
    text that is no program: NUL characters, halves of surrogate pairs, more than a million characters.

    Example: `extract_code("Here:\\n```python\\nprint(1)\\n```")` → `"print(1)\\n"`.
    """
    text = reply.rpartition("</think>")[2]
    blocks = _blocks(text)
    marked = [code for label, code in blocks if label in _PYTHON]
    unmarked = [code for label, code in blocks if not label]
    code = next((found[-1] for found in (marked, unmarked) if found), "" if blocks else text)
    return code if code.strip() and _is_source(code) else None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Every fenced block with its label, the last one perhaps unclosed."""
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.match(line.rstrip("\r"))
        if opening is None:
            opening, lines = fence, []
        elif fence and not fence[3].strip() and fence[2].startswith(opening[2]):
            blocks.append((_label(opening), _join_lines(lines)))
            opening = None
        else:
            indent = len(opening[1])
            lines.append(line[indent:] if not line[:indent].strip() else line)
    if opening is not None:
        blocks.append((_label(opening), _join_lines(lines)))
    return blocks


def _label(opening: re.Match[str]) -> str:
    words = opening[3].lower().split()
    return words[0] if words else ""


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _is_source(code: str) -> bool:
    if "\0" in code or len(code) > LARGEST_CODE:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in code)


_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


def join_program(prefix: str, code: str, entry: str | None = None) -> str:
    """The whole program: `code` after `prefix`, whether it continues the prefix or defines everything anew.

    A second definition of a function takes the place of the first, so the prefix, with its imports and helpers, stays in front. Only where
    it is cut off in the middle of a statement does code that defines `entry` itself stand alone. The reply is never parsed
    here: only the sandbox compiles it.

    Example: `join_program("def f(x):\\n", "    return x\\n")` → `"def f(x):\\n    return x\\n"`.
    """
    if not prefix.strip():
        return code
    if entry is not None and re.search(rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{entry}\b|^{entry}[ \t]*=", code, re.MULTILINE):
        if not _parses(prefix):
            return code
        prefix += "\n"
    futures = "".join(line if line.endswith("\n") else line + "\n" for line in _FUTURE.findall(code))
    return futures + prefix + _FUTURE.sub("", code)


def helpers(prefix: str, entry: str | None) -> str:
    """What the prefix defines besides the entry point, for the tests: a test that computes by them must not take a reply's own for them."""
    if entry is None or not _parses(prefix):
        return ""
    kept = [node for node in ast.parse(prefix).body if getattr(node, "name", None) != entry and not isinstance(node, ast.Expr)]
    return ast.unparse(ast.Module(kept, [])) + "\n" if kept else ""


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


# What the program printed.

_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def same_output(printed: str, expected: str) -> bool:
    """Whether a program printed what it should: word by word, numbers with a decimal point or exponent within 1e-6.

    Example: `same_output("0.3333333 yes\\n", "0.33333333  yes")` → True; `same_output("1.0", "1")` → False.
    """
    got, wanted = printed.split(), expected.split()
    return len(got) == len(wanted) and all(map(_same_word, got, wanted))


def _same_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    if not (_DECIMAL.fullmatch(wanted) and _NUMBER.fullmatch(got)):
        return False
    value = float(got)
    return math.isfinite(value) and math.isclose(value, float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


# What the tests column holds.


def read_tests(value: Any, *, entry: str | None = None, setup: str = "") -> StdinTests | CallTests:
    """The tests in any of the accepted forms (see `Code`); a `ValueError` that says what is wrong with them.

    Example: `read_tests([{"call": "add", "args": [1, 2], "expected": 3}])`, `read_tests(["assert add(1, 2) == 3"])`.
    """
    value = _decoded(value)
    if isinstance(value, str):
        return CallTests((_assertions(value, "the test", entry, setup),))
    cases = list(value) if isinstance(value, list | tuple) else None
    if isinstance(value, Mapping):
        cases = _paired(value)
    if cases is None:
        raise ValueError(f"it holds {_shown(value)}. {ACCEPTED}")
    if not cases:
        raise ValueError(f"there is no test in it. {ACCEPTED}")
    if all(isinstance(case, str) for case in cases):
        return CallTests(tuple(_assertions(case, f"test {number}", entry, setup) for number, case in enumerate(cases, 1)))
    if all(isinstance(case, Mapping) and "input" in case for case in cases):
        if setup:
            raise ValueError("tests by stdin have no setup code: leave `setup_field` out.")
        return StdinTests(tuple(_stdin_case(case, number) for number, case in enumerate(cases, 1)))
    if all(isinstance(case, Mapping) and "call" in case for case in cases):
        return CallTests(tuple(_call(case, number, setup) for number, case in enumerate(cases, 1)))
    raise ValueError(f"its tests are of no accepted form, or of several; the first is {_shown(cases[0])}. {ACCEPTED}")


def _decoded(value: Any) -> Any:
    """JSON text as what it stands for."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"it begins like JSON text but is none: {error}. {ACCEPTED}") from error


def _paired(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`{"inputs": […], "outputs": […]}` as one mapping for each test."""
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise ValueError(f"a mapping was found without lists 'inputs' and 'outputs': {_shown(value)}. {ACCEPTED}")
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs; as many of both were expected.")
    name = value.get("fn_name")
    if not name:
        return [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    return [{"call": name, "args": given, "expected": wanted, "unwrap": True} for given, wanted in zip(inputs, outputs, strict=True)]


def _stdin_case(case: Mapping[str, Any], number: int) -> tuple[str, str]:
    if "output" not in case:
        raise ValueError(f"test {number} has an 'input' but no 'output'.")
    return _lines(case["input"], f"the input of test {number}"), _lines(case["output"], f"the output of test {number}")


def _lines(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "".join(f"{line}\n" for line in value)
    raise ValueError(f"{where} is {_shown(value)}; text or a list of lines was expected. Calls of a function need 'fn_name'.")


# The comparison runs beside the tests, away from the program. Its names are those of `builtins`, whatever the program defines.
_SAME = f"""
import builtins as _drumroll
from math import inf as inf, nan as nan

def _drumroll_same(got, expected):
    kinds = (_drumroll.type(got), _drumroll.type(expected))
    if kinds[0] in (_drumroll.list, _drumroll.tuple) and kinds[1] is _drumroll.list:
        return _drumroll.len(got) == _drumroll.len(expected) and _drumroll.all(_drumroll.map(_drumroll_same, got, expected))
    if kinds == (_drumroll.dict, _drumroll.dict):
        got = {{_drumroll.str(key): value for key, value in got.items()}}
        return got.keys() == expected.keys() and _drumroll.all(_drumroll_same(got[key], expected[key]) for key in expected)
    if _drumroll.float in kinds and kinds[0] in (_drumroll.int, _drumroll.float):
        close = _drumroll.abs(got - expected) <= {TOLERANCE} * _drumroll.max(1.0, _drumroll.abs(expected))
        return got == expected or (got != got and expected != expected) or close
    return (got == expected) is True

def _drumroll_check(find, find_method, args, kwargs, accepted):
    try:
        function = find()
    except _drumroll.NameError:
        function = find_method()
    got = function(*args, **kwargs)
    assert _drumroll.any(_drumroll_same(got, expected) for expected in accepted)
"""


def _call(case: Mapping[str, Any], number: int, setup: str) -> str:
    """A call with an expected value, as Python that asserts it."""
    name, args, kwargs = case["call"], case.get("args", []), case.get("kwargs") or {}
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"test {number} calls {_shown(name)}; the name of a function was expected.")
    if not isinstance(args, list | tuple):
        raise ValueError(f"the arguments of test {number} are {_shown(args)}; a list was expected.")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ValueError(f"the keyword arguments of test {number} are {_shown(kwargs)}; a mapping of names was expected.")
    if "expected" not in case:
        raise ValueError(f"test {number} has no 'expected' value.")
    accepted = [_plain(case["expected"], number)]
    if case.get("unwrap") and isinstance(accepted[0], list) and len(accepted[0]) == 1:
        accepted.append(accepted[0][0])
    given = f"{_plain(args, number)!r}, {_plain(kwargs, number)!r}"
    return f"{setup}\n{_SAME}\n_drumroll_check(lambda: {name}, lambda: Solution().{name}, {given}, {accepted!r})\n"


def _plain(value: Any, number: int) -> Any:
    """JSON's values, which `repr` writes as Python."""
    if isinstance(value, list | tuple):
        return [_plain(item, number) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, number) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"test {number} holds {_shown(value)}; values of JSON were expected.")


def _assertions(source: str, where: str, entry: str | None, setup: str) -> str:
    """A test in Python, ready to run: the setup before it, `check(candidate)` called after it."""
    tree = _parsed(source, where)
    defines_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    needs_call = defines_check and not any(isinstance(node, ast.Expr) and _calls(node.value, "check") for node in tree.body)
    if needs_call and entry is None:
        raise ValueError(f"{where} defines `check` but never calls it: name the column with the function to check by `entry_field`.")
    if not any(map(_can_fail, ast.walk(tree))):
        raise ValueError(f"{where} asserts nothing, so it would pass whatever the code does: {_shown(source)}.")
    whole = f"{setup}\n{source}\n"
    _parsed(whole, f"{where} with its setup")
    return whole if entry is None else f"candidate = {entry}\n{whole}" + (f"check({entry})\n" if needs_call else "")


def _parsed(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where} is not Python: {error}: {_shown(source)}. {ACCEPTED}") from error


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _can_fail(node: ast.AST) -> bool:
    """An assertion, a raise, or a call of something like `assert_allclose`."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return isinstance(node, ast.Assert | ast.Raise) or name.lower().startswith("assert")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
