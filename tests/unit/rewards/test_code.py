"""The code reward: which part of a reply is code, which tests are accepted, and what they lead to in the sandbox."""

import asyncio
import json
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from replies import trajectory

from drumroll.errors import SandboxError
from drumroll.registry import REGISTRY
from drumroll.rewards.code import Code, StdinTests, extract_code, join_program, read_tests, same_output
from drumroll.rewards.place import Place
from drumroll.sandbox import Examination, Sandbox, ScriptRun
from drumroll.types import Task


def code(sandbox=None, **options):
    return Code(Code.Config(kind="code", **options), sandbox)


@pytest.fixture(scope="module")
def judge():
    """Judges a reply by the code reward, in one sandbox for all tests of this file."""
    with asyncio.Runner() as runner:
        sandbox = Sandbox()
        runner.run(sandbox.start())

        def ask(reply, tests, *, columns=None, **options):
            reward = code(sandbox, **{"wall_s": 5.0, **options})
            subject = trajectory(reply, tests=tests, **(columns or {}))
            reward.check_task(subject.task)
            return runner.run(reward(subject))

        yield ask
        runner.run(sandbox.close())


class FakeSandbox:
    """Answers with what it was given, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def run(self, program, *, stdin="", limits):
        self.asked.append((program, stdin, limits))
        return self.answers.pop(0)

    async def examine(self, program, tests, *, limits):
        self.asked.append((program, tests, limits))
        return self.answers.pop(0)


def ended(stdout="", ending="exited", exit_code=0, seconds=0.1):
    return ScriptRun(stdout=stdout, stderr="", ending=ending, exit_code=exit_code, seconds=seconds)


# Which part of a reply is code.


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```", "x = 2\n"),
        ("```py\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```text\n1\n```", "x = 1\n"),
        ("```Python title=a.py\nx = 1\n```", "x = 1\n"),
        ("~~~python3\r\nx = 1\r\n~~~", "x = 1\r\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\nx = 1\n", "x = 1\n\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 2\n"),
        ("1. So:\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()\n"),
        ("    return x\n", "    return x\n"),
        ("x = 1", "x = 1"),
        ("<think>```python\nx = 1\n```</think>\nx = 2", "\nx = 2"),
        ("use `x = 1` or ```x```", "use `x = 1` or ```x```"),
        ("```cpp\nint x;\n```", None),
        ("```python\n```", None),
        ("", None),
        (" \n\t", None),
        ("x = '\0'", None),
        ("x = '\ud800'", None),
        ("x = 1\n" * 200_000, None),
    ],
)
def test_the_code_of_a_reply(reply, expected):
    assert extract_code(reply) == expected


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0`~\r<"), min_size=1).filter(str.strip), st.text("ab \n.#"))
def test_what_is_fenced_comes_out_as_it_was(source, around):
    assert extract_code(f"{around}\n```python\n{source}\n```\n{around}") == source + "\n"


PREFIX = 'import math\n\ndef helper(x):\n    return x + 1\n\ndef f(x):\n    """Doc."""\n'


@pytest.mark.parametrize(
    ("prefix", "source", "expected"),
    [
        ("", "x = 1", "x = 1"),
        (PREFIX, "    return x\n", PREFIX + "    return x\n"),
        (PREFIX, "def f(x):\n    return x\n", PREFIX + "\ndef f(x):\n    return x\n"),
        ("def f(x):\n", "    return x", "def f(x):\n    return x"),
        ("def f(x):\n", "def f(x):\n    return x", "def f(x):\n    return x"),
        ("def f(x):\n", "async def f(x):\n    return x", "async def f(x):\n    return x"),
        ("def f(x):\n", "    f = x\n    return f", "def f(x):\n    f = x\n    return f"),
        ("def f(x):\n    return", " x", "def f(x):\n    return x"),
        ("import math\n", "from __future__ import annotations\nx = 1", "from __future__ import annotations\nimport math\nx = 1"),
    ],
)
def test_the_prefix_is_continued_or_replaced(prefix, source, expected):
    program = join_program(prefix, source, "f")
    assert program == expected
    compile(program, "program", "exec")


# What a program printed.


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        (" 3\r\n\r\n4 ", "3 4", True),
        ("3 4", "34", False),
        ("3", "3 4", False),
        ("", "", True),
        ("", "3", False),
        ("Yes", "YES", False),
        ("0.3333333", "0.33333333333", True),
        ("0.34", "0.33", False),
        ("1", "1.0", True),
        ("1e3", "1000.0", True),
        ("1000000.5", "1.0000001e6", True),
        ("1.0", "1", False),
        ("007", "7", False),
        ("nan", "1.5", False),
        ("inf", "1e999", False),
        ("1e999", "1e999", True),
        ("1_0.0", "10.0", False),
        ("١.٥", "1.5", False),
    ],
)
def test_outputs_are_compared_word_by_word(printed, expected, same):
    assert same_output(printed, expected) is same


@given(st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1)), st.sampled_from([" ", "\n", "\t \r\n"]))
def test_space_between_words_is_nothing(words, space):
    text = space.join(words)
    assert same_output(text, " ".join(words))
    assert not same_output(text, " ".join([*words, "more"]))


@given(st.floats(-1e9, 1e9), st.floats(-1, 1))
def test_decimals_may_be_off_by_a_millionth(value, error):
    allowed = 1e-6 * max(1.0, abs(value))
    assert same_output(repr(value + 0.9 * error * allowed), repr(value))
    assert not same_output(repr(value + 3 * allowed), repr(value))


# Which tests are accepted.


def test_every_form_of_stdin_tests_is_read():
    expected = StdinTests((("1 2", "3"), ("4\n5\n", "9\n")))
    forms = [
        [{"input": "1 2", "output": "3"}, {"input": ["4", "5"], "output": ["9"], "more": 1}],
        {"inputs": ["1 2", ["4", "5"]], "outputs": ["3", ["9"]]},
        {"inputs": ["1 2", ["4", "5"]], "outputs": ["3", ["9"]], "fn_name": None},
    ]
    assert [read_tests(form) for form in forms] == [expected] * 3
    assert [read_tests(json.dumps(form)) for form in forms] == [expected] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"it holds None\. Accepted: .*"),
        (3, r"it holds 3\. Accepted"),
        ([], r"there is no test in it\. Accepted"),
        ({"inputs": [], "outputs": []}, r"there is no test in it"),
        ({"inputs": ["1"]}, r"a mapping was found without lists 'inputs' and 'outputs'"),
        ({"inputs": ["1"], "outputs": []}, r"1 inputs and 0 outputs"),
        ({"inputs": [[1]], "outputs": ["1"]}, r"the input of test 1 is \[1\]; text or a list of lines was expected.*fn_name"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, r"arguments of test 1 are '1'; a list was expected"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f()"}, r"test 1 calls 'f\(\)'; the name of a function"),
        ([{"input": "1"}], r"test 1 has an 'input' but no 'output'"),
        ([{"input": "1", "output": "1"}, "assert f(1)"], r"of no accepted form, or of several; the first is .*Accepted"),
        ([{"call": "f", "args": [1]}], r"test 1 has no 'expected' value"),
        ([{"call": "f", "args": [1], "expected": {1, 2}}], r"test 1 holds \{1, 2\}; values of JSON were expected"),
        ([{"call": "f", "kwargs": [1], "expected": 1}], r"keyword arguments of test 1 are \[1\]"),
        ([["assert f(1)"]], r"of no accepted form"),
        ('{"inputs": [', r"begins like JSON text but is none"),
        (["assert f(1) == 1", "assert f(2 =="], r"test 2 is not Python: .*assert f\(2 =="),
        (["f(1) == 1"], r"test 1 asserts nothing"),
        ("def check(candidate):\n    assert candidate(1) == 1\n", r"defines `check` but never calls it.*`entry_field`"),
        ("[" * 100_000, r"recursion"),
    ],
)
def test_tests_of_no_accepted_form_are_named(value, message):
    with pytest.raises(ValueError, match=rf"(?s)column 'tests': .*{message}"):
        code().check_task(Task("t", data={"tests": value}))


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"entry_field": "name"}, {"name": "f()"}, r"column 'name' holds 'f\(\)'; the name of a function was expected"),
        ({"entry_field": "name"}, {"name": None}, r"column 'name' holds None"),
        ({"prefix_field": "prompt"}, {"prompt": ["def f():"]}, r"column 'prompt' holds \['def f\(\):'\]; text was expected"),
        ({"setup_field": "setup"}, {"setup": "x ="}, r"column 'tests': the test with its setup is not Python"),
        ({"setup_field": "setup"}, {"setup": "x = 1", "tests": [{"input": "", "output": ""}]}, r"tests by stdin have no setup code"),
    ],
)
def test_other_columns_are_checked_too(options, data, message):
    with pytest.raises(ValueError, match=message):
        code(**options).check_task(Task("t", data={"tests": "assert f(1) == 1", **data}))


def test_setup_and_prefix_may_be_null():
    row = {"tests": "assert f(1) == 1", "setup": None, "prompt": None}
    code(setup_field="setup", prefix_field="prompt").check_task(Task("t", data=row))


def test_times_that_do_not_fit_are_refused():
    with pytest.raises(ValidationError, match=r"`wall_s` \(10\) must be less than nine tenths of `deadline_s` \(11\)"):
        Code.Config(kind="code", deadline_s=11)


# Verdicts, without a sandbox.


def test_the_reward_is_registered_for_the_reward_workers():
    entry = REGISTRY.lookup("reward", "code")
    assert (entry.target, entry.seat) == (Code, "pooled")


def ask_fake(sandbox, tests, reply="print(3)", **options):
    return asyncio.run(code(sandbox, **options)(trajectory(reply, tests=tests)))


def test_outputs_count_only_from_programs_that_ended_well():
    tests = [{"input": "1 2", "output": "3"}]
    runs = [
        ended("3"),
        ended("3", exit_code=1),
        ended("3", "killed", None),
        ended("3", "timeout", None),
        ended("3", "output", None),
        ended("4"),
    ]
    assert [ask_fake(FakeSandbox(run), tests) for run in runs] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_first_failure_decides_unless_the_share_counts():
    tests = [{"input": str(n), "output": str(n)} for n in range(4)]
    answers = [ended("0"), ended("x"), ended("2"), ended("3")]
    every, share = FakeSandbox(*answers), FakeSandbox(*answers)
    assert ask_fake(every, tests) == 0.0
    assert ask_fake(share, tests, score="share") == 0.75
    assert [len(sandbox.asked) for sandbox in (every, share)] == [2, 4]


def test_stdin_tests_stop_before_the_deadline():
    sandbox = FakeSandbox(*(ended("1", seconds=2.0) for _ in range(9)))
    tests = [{"input": "", "output": "1"}] * 9
    assert ask_fake(sandbox, tests, score="share", wall_s=2.5, deadline_s=10) == pytest.approx(4 / 9)


def test_limits_are_handed_on_and_large_outputs_have_room():
    sandbox = FakeSandbox(ended("x"))
    ask_fake(sandbox, [{"input": "1", "output": "y" * 3_000_000}], wall_s=3, memory_mib=77)
    program, stdin, limits = sandbox.asked[0]
    assert (program, stdin, limits.wall_s, limits.memory_mib, limits.output_bytes) == ("print(3)", "1", 3.0, 77, 6_000_000)


def test_only_the_first_tests_are_taken():
    sandbox = FakeSandbox(Examination((True, True), ("", ""), "", 0.1))
    assert ask_fake(sandbox, ["assert f(1)", "assert f(2)", "assert f(3)"], max_tests=2) == 1.0
    assert len(sandbox.asked[0][1]) == 2


def test_tests_that_cannot_be_run_give_no_verdict():
    sandbox = FakeSandbox(Examination((False,), ("",), "ImportError: no module named 'numpy'", 0.1))
    with pytest.raises(ValueError, match=r"task 't-7': the tests in column 'tests' cannot be run: ImportError: no module named 'numpy'"):
        ask_fake(sandbox, ["assert f(1)"])


def test_a_broken_sandbox_gives_no_verdict():
    class Broken(FakeSandbox):
        async def run(self, program, *, stdin="", limits):
            raise SandboxError("the sandbox ended")

    with pytest.raises(SandboxError):
        ask_fake(Broken(), [{"input": "", "output": ""}])


def test_a_reply_without_code_asks_nobody():
    assert ask_fake(FakeSandbox(), ["assert f(1)"], reply="```text\nno\n```") == 0.0


def test_a_worker_without_isolation_does_not_come_up():
    class Impossible(FakeSandbox):
        async def start(self):
            raise SandboxError("no user namespaces")

    with pytest.raises(SandboxError, match="no user namespaces"):
        asyncio.run(code(Impossible()).start(Place()))


# Verdicts of the sandbox.

ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
READ_AND_ADD = "a, b = map(int, input().split())\nprint(a + b)\n"

CALLS = {
    "asserts": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"],
    "text": "assert add(1, 2) == 3\nfor n in range(3):\n    assert add(n, n) == 2 * n\n",
    "calls": [{"call": "add", "args": [1, 2], "expected": 3}, {"call": "add", "args": [[1], [2]], "expected": [1, 2]}],
    "keywords": [{"call": "add", "args": [1], "kwargs": {"b": 2}, "expected": 3}],
    "apps": {"inputs": [[1, 2], ["a", "b"]], "outputs": [[3], "ab"], "fn_name": "add"},
    "json": json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}),
}


@pytest.mark.parametrize("tests", CALLS.values(), ids=CALLS)
def test_functions_are_judged_by_calls(judge, tests):
    assert judge(f"```python\n{ADD}```", tests) == 1.0
    assert judge(f"```python\n{SUBTRACT}```", tests) == 0.0


@pytest.mark.parametrize("form", ["calls", "apps"])
def test_methods_of_a_solution_count_as_functions(judge, form):
    assert judge(SOLUTION, CALLS[form]) == 1.0
    assert judge(SOLUTION.replace("+", "-"), CALLS[form]) == 0.0
    assert judge(SOLUTION.replace("Solution", "Answer"), CALLS[form]) == 0.0


def test_programs_are_judged_by_their_output(judge):
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -3", "output": "7"}]
    assert judge(READ_AND_ADD, tests) == 1.0
    assert judge(READ_AND_ADD.replace("+", "-"), tests) == 0.0
    assert judge("if __name__ == '__main__':\n    " + READ_AND_ADD.replace("\n", "\n    "), tests) == 1.0


def test_the_share_of_tests_that_pass(judge):
    asserts = [f"assert absolute({n}) == {abs(n)}" for n in (-2, -1, 1, 2)]
    assert judge("def absolute(n):\n    return n", asserts, score="share") == 0.5
    cases = [{"input": str(n), "output": str(abs(n))} for n in (-2, 1, 2)]
    assert judge("print(input())", cases, score="share") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("returned", "expected", "reward"),
    [
        ("(1, 2)", [1, 2], 1.0),
        ("[(1, 2), [3]]", [[1, 2], [3]], 1.0),
        ("{1: (2,)}", {"1": [2]}, 1.0),
        ("0.1 + 0.2", 0.3, 1.0),
        ("3", 3.0, 1.0),
        ("3.1", 3, 0.0),
        ("float('nan')", float("nan"), 1.0),
        ("float('inf')", float("inf"), 1.0),
        ("float('inf')", 3.0, 0.0),
        ("float('nan')", 3.0, 0.0),
        ("[1, 2, 3]", [1, 2], 0.0),
        ("{'a': 1}", {"b": 1}, 0.0),
        ("'[1]'", [1], 0.0),
        ("{1, 2}", [1, 2], 0.0),
        ("None", None, 1.0),
        ("10 ** 400", 1.5, 0.0),
        ("object()", 3, 0.0),
    ],
)
def test_returned_values_are_compared_as_json_would_write_them(judge, returned, expected, reward):
    assert judge(f"def f():\n    return {returned}\n", [{"call": "f", "expected": expected}]) == reward


def test_an_expected_list_of_one_stands_for_its_value_only_in_the_apps_form(judge):
    program = "def f():\n    return 3\n"
    assert judge(program, {"inputs": [[]], "outputs": [[3]], "fn_name": "f"}) == 1.0
    assert judge(program, [{"call": "f", "expected": [3]}]) == 0.0


HUMAN_EVAL = {
    "prompt": "from typing import List\n\n\ndef encode(s: str) -> str:\n    return s[::-1]\n\n\n"
    'def total(xs: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "total",
}
HUMAN_EVAL_TEST = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert encode('ab') == 'ba'\n"


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("    return sum(xs)\n", 1.0),
        ("    return sum(xs) + 1\n", 0.0),
        ("```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", 1.0),
        ("```python\nfrom __future__ import annotations\n\ndef total(xs: list[int]) -> int:\n    return sum(xs)\n```", 1.0),
        ("```python\ndef sum_of(xs):\n    return sum(xs)\n```", 0.0),
        ("```python\ndef total(xs):\n    return sum(xs\n```", 0.0),
    ],
)
def test_replies_may_continue_the_prompt_or_repeat_it(judge, reply, reward):
    assert judge(reply, HUMAN_EVAL_TEST, columns=HUMAN_EVAL, entry_field="entry_point", prefix_field="prompt") == reward


BUILTIN_CASES = {
    "the function has a builtin's name": ("def sum(a, b):\n    return a * b\n", "assert sum(2, 5) == 10", 1.0),
    "beside names of the test": ("def sum(a, b):\n    return a * b\n", "x = 2\nassert sum(x, 5) == 10", 1.0),
    "the program has its own all": (
        "def f(x):\n    return 1\n\ndef all(x):\n    return True\n",
        "assert all(f(x) == x for x in (1, 2))",
        0.0,
    ),
    "and lacks the function": ("def all(x):\n    return True\n", "assert all(f(x) == x for x in (1, 2))", 0.0),
    "in a function of the test": ("def max(*x):\n    return 3\n", "def g(x):\n    return max(x)\nassert g([1]) == f(3)", 0.0),
}


@pytest.mark.parametrize(("program", "test", "reward"), BUILTIN_CASES.values(), ids=BUILTIN_CASES)
def test_the_program_replaces_no_builtin_that_the_test_uses(judge, program, test, reward):
    assert judge(program, test) == reward


def test_the_function_to_check_may_have_the_name_of_a_builtin(judge):
    test = "def check(candidate):\n    assert abs(candidate(1, 2)) == max(1, 2)\n"
    assert judge("def sum(a, b):\n    return -b\n", test, columns={"name": "sum"}, entry_field="name") == 1.0
    assert judge("def sum(a, b):\n    return a\n", test, columns={"name": "sum"}, entry_field="name") == 0.0


@pytest.mark.parametrize("name", ["isinstance", "any", "all", "type", "len", "_drumroll", "_drumroll_same", "_drumroll_check"])
def test_the_comparison_of_calls_cannot_be_replaced(judge, name):
    program = f"{name} = lambda *args, **kwargs: True\n\ndef f(x):\n    return [x, 2]\n"
    assert judge(program, [{"call": "f", "args": [1], "expected": [1, 1]}]) == 0.0
    assert judge(program, [{"call": "f", "args": [1], "expected": [1, 2]}]) == 1.0


def test_setup_code_runs_after_the_program(judge):
    program = "class Node:\n    def __init__(self, value):\n        self.value, self.next = value, None\n\ndef last(node):\n"
    program += "    while node.next:\n        node = node.next\n    return node.value\n"
    columns = {"setup": "head = Node(1)\nhead.next = Node(2)\n"}
    assert judge(program, ["assert last(head) == 2"], columns=columns, setup_field="setup") == 1.0
    assert judge(program, ["assert last(head) == 1"], columns=columns, setup_field="setup") == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        "I do not know.",
        "def add(a, b):\n    return a +",
        "import nothing_of_this_name",
        "def add(a, b):\n    while True:\n        pass\n",
        "def add(a, b):\n    return add(a, b)\n",
        "add = 3",
        "raise SystemExit(0)",
        "x = 1\n" * 200_000,
        "add = '\0'",
        "add = '\udcff'",
        "(" * 10_000,
        "-" * 100_000 + "1",
        "x" + ".x" * 100_000,
    ],
    ids=str.split("prose syntax import loop recursion number exit long nul surrogate parentheses minus attributes"),
)
def test_bad_replies_are_wrong_and_not_failures(judge, reply):
    assert judge(reply, ["assert add(1, 2) == 3"], wall_s=1.0) == 0.0


def test_tests_with_missing_imports_give_no_verdict(judge):
    with pytest.raises(ValueError, match=r"task 't-7': the tests in column 'tests' cannot be run: .*no_such_package"):
        judge(ADD, ["import no_such_package\nassert add(1, 2) == 3"])


def test_a_program_that_raises_what_broken_tests_raise_is_wrong(judge):
    for raised in ("ImportError('x')", "SyntaxError('x')", "NameError('add')", "AssertionError()"):
        assert judge(f"def add(a, b):\n    raise {raised}\n", ["assert add(1, 2) == 3"]) == 0.0


def test_a_task_may_expect_an_exception(judge):
    test = textwrap.dedent("""
        try:
            add(1, None)
        except TypeError:
            pass
        else:
            assert False
    """)
    assert judge(ADD, test) == 1.0
    assert judge("def add(a, b):\n    return a\n", test) == 0.0


ROOT_PROMPT = '''
import math

def value_at(xs, x):
    return sum(c * math.pow(x, i) for i, c in enumerate(xs))

def find_root(xs):
    """A root of the polynomial."""
'''
ROOT_TEST = "def check(candidate):\n    assert abs(value_at([-6, 11, -6, 1], candidate([-6, 11, -6, 1]))) < 1e-6\n"


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("    return 2.0\n", 1.0),
        ("    return 2.5\n", 0.0),
        ("    return 2.5\n\ndef value_at(xs, x):\n    return 0\n", 0.0),
        ("```python\ndef value_at(xs, x):\n    return 0\n\ndef find_root(xs):\n    return 7\n```", 0.0),
    ],
)
def test_a_helper_of_the_prompt_is_the_prompts_own_in_the_tests(judge, reply, reward):
    columns = {"prompt": ROOT_PROMPT, "entry": "find_root"}
    assert judge(reply, ROOT_TEST, columns=columns, entry_field="entry", prefix_field="prompt") == reward
