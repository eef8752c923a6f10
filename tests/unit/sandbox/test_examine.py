"""Tests on programs: verdicts, and the ways in which a program might make one up."""

import json

import pytest
from walled import Walled

from drumroll.sandbox.host import judge
from drumroll.sandbox.process import End

DOUBLE = "def double(x): return 2 * x"


def test_each_test_has_its_own_verdict(walled: Walled) -> None:
    exam = walled.examine(
        DOUBLE, "assert double(2) == 4", "assert double(2) == 5", "assert double('a') == 'aa', 'text'", "assert double() == 1"
    )
    assert exam.passed == (True, False, True, False)
    assert exam.broken == ""
    assert exam.problems[0] == exam.problems[2] == ""
    assert exam.problems[1] == "AssertionError (line 1: assert double(2) == 5)"
    assert exam.problems[3].startswith("the program raised TypeError: double() missing 1 required positional argument")
    assert 0 < exam.seconds < 10


def test_tests_may_define_functions_and_hand_the_program_over(walled: Walled) -> None:
    test = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n\ncheck(double)"
    assert walled.examine(DOUBLE, test).passed == (True,)
    assert walled.examine("def double(x): return 3 * x", test).passed == (False,)


def test_tests_do_not_see_each_other(walled: Walled) -> None:
    exam = walled.examine(DOUBLE, "seen = 1\nassert double(1) == 2", "assert seen == 1")
    assert exam.passed == (True, False)
    assert exam.problems[1].startswith("NameError: name 'seen' is not defined")


def test_modules_classes_and_globals_of_the_program_are_there(walled: Walled) -> None:
    program = """
import math, sys
from collections import Counter, deque
import collections as c
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
class TooSmall(ValueError): pass
def length(node): return 0 if node is None else 1 + length(node.next)
def root(x):
    if x < 0: raise TooSmall("negative")
    return math.sqrt(x)
calls = 0
def count():
    global calls
    calls += 1
    return calls
def squares(n):
    for i in range(n): yield i * i
def letters(text): return Counter(text)
LIMIT = [1, 2]
"""
    tests = [
        "assert math.isclose(root(2), 1.41421, rel_tol=1e-4)",
        "first = Node(1)\nfirst.next = Node(2)\nassert length(first) == 2 and first.next.value == 2",
        "try:\n    root(-1)\n    assert False\nexcept TooSmall as error:\n    assert str(error) == 'negative'",
        "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "count(); count()\nassert calls == 2 and count() == 3 and calls == 3",
        "assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5 and 4 in squares(9)",
        "assert letters('aab') == {'a': 2, 'b': 1} and letters('ab') == Counter('ba') and isinstance(letters(''), c.Counter)",
        "LIMIT.append(3)\nassert LIMIT == [1, 2]",
        "assert sys.getsizeof((1, 2)) > 0 and deque([1]) == deque([1])",
        "import copy\nassert [copy.deepcopy(LIMIT)] == [[1, 2]]",
    ]
    exam = walled.examine(program, *tests)
    assert exam.problems == ("",) * len(tests)


def test_changes_in_place_come_back(walled: Walled) -> None:
    program = "def rotate(m):\n    m[:] = [list(row) for row in zip(*m[::-1])]\ndef mark(d): d['new'] = 1"
    test = "grid = [[1, 2], [3, 4]]\nrotate(grid)\nassert grid == [[3, 1], [4, 2]]\nd = {}\nmark(d)\nassert d == {'new': 1}"
    assert walled.examine(program, test).passed == (True,)


def test_functions_are_handed_to_the_program(walled: Walled) -> None:
    program = "def apply(f, xs): return [f(x) for x in xs]\ndef only(kind, xs): return [x for x in xs if isinstance(x, kind)]"
    exam = walled.examine(
        program, "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]", "assert only(int, [1, 'a']) == [1]", "assert apply(len, ['ab']) == [2]"
    )
    assert exam.problems == ("", "", "")


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (["assert double(1) == 2", "assert double(1 == 2"], "test 2 is not Python: SyntaxError"),
        (["import numpy_of_nobody\nassert double(1) == 2"], "test 1 cannot be run: ModuleNotFoundError"),
        (["from math import nothing\nassert double(1) == 2"], "test 1 cannot be run: ImportError"),
        (["double(1)"], "test 1 cannot fail"),
        (["assert True"], "test 1 cannot fail"),
        (["assert (double(1) == 3, 'always true')"], "test 1 cannot fail"),
        ([""], "test 1 cannot fail"),
        (["assert double(1) == '\0'"], "test 1 is not Python"),
        ([], "there are no tests"),
    ],
)
def test_broken_tests_are_no_verdict(walled: Walled, tests: list[str], reason: str) -> None:
    exam = walled.examine(DOUBLE, *tests)
    assert reason in exam.broken
    assert exam.passed == (False,) * len(tests)


def test_a_program_that_fails_to_import_does_not_break_the_tests(walled: Walled) -> None:
    exam = walled.examine("def f():\n    import numpy_of_nobody", "assert f() is None", "import math\nassert f() is None")
    assert exam.broken == ""
    assert all("the program raised ModuleNotFoundError" in problem for problem in exam.problems)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("", "NameError: name 'f' is not defined"),
        ("def f(:", "the program could not be loaded: SyntaxError"),
        ("1 / 0", "the program could not be loaded: ZeroDivisionError"),
        ("import sys; sys.exit(0)", "the program ended during the test: it exited with status 0"),
        ("import os; os._exit(0)", "the program ended during the test: it exited with status 0"),
        ("def f():\n    import os; os._exit(0)", "the program ended during the test: it exited with status 0"),
        ("def f(): raise SystemExit(0)", "the program ended during the test: it exited with status 0"),
        ("def f():\n    import ctypes; ctypes.string_at(0)", "the program ended during the test: killed by SIGSEGV"),
        ("def f():\n    while True: pass", "out of time"),
        ("while True: pass", "out of time"),
        ("def f(): return f()", "the program raised RecursionError"),
        ("def f(): return 'x' * (20 << 20)", "the program raised ValueError: a value of"),
        ("def f():\n    while True: yield 1", "AssertionError"),
        ("def f(): return [0] * (1 << 40)", "the program raised MemoryError"),
        ("x = []\nx.append(x)\ndef f(): return x", "the program raised RecursionError"),
        ("import os\nos.write(5, bytes(8))", "the program ended during the test"),
        ("import os\nos.write(5, b'\\xff' * 8)\ndef f(): return 1", "it sent a message that is too long"),
        ("import os\nos.close(5)\ndef f(): return 1", "the program ended during the test"),
        ("import sys\nsys.stdout.write('x' * (1 << 25))\ndef f(): return 1", ""),
    ],
)  # fmt: skip
def test_programs_that_fail(walled: Walled, program: str, problem: str) -> None:
    exam = walled.examine(program, "assert f() == 1", wall_s=1.0 if problem == "out of time" else 20.0)
    assert exam.broken == ""
    assert exam.passed == (problem == "",)
    assert problem in exam.problems[0]


def test_a_program_that_ends_fails_later_tests_too(walled: Walled) -> None:
    program = "import os\ndef f(n):\n    if n == 2: os._exit(0)\n    return n"
    exam = walled.examine(program, *(f"try:\n    assert f({n}) == {n}\nexcept BaseException:\n    pass" for n in range(1, 5)))
    assert exam.passed == (True, False, False, False)


LIAR = "class Liar(BASE):\n    METHODS = lambda *args: ANSWER\ndef f(x): return Liar()"


def liar(methods: str, answer: str, base: str = "object") -> str:
    """A program that returns an object whose methods all give one answer."""
    return LIAR.replace("BASE", base).replace("METHODS", methods).replace("ANSWER", answer)


LIARS = {
    "equality": liar("__eq__ = __contains__ = __bool__", "True")
    + "\nLiar.__ne__ = lambda *args: False\nLiar.__hash__ = lambda self: hash(4)",
    "equality of a number": liar("__eq__", "True", "int") + "\nLiar.__hash__ = int.__hash__",
    "equality of a list": liar("__eq__", "True", "list"),
    "arithmetic": liar("__sub__ = __rsub__ = __abs__ = __round__", "0") + "\nLiar.__float__ = lambda self: 4.0",
    "order": liar("__lt__ = __le__ = __gt__ = __ge__", "True"),
    "a list of liars": liar("__eq__", "True") + "\nf = lambda x: [Liar()]",
    "a false class": liar("__eq__", "True") + "\nLiar.__class__ = int",
    "own functions": "abs = lambda x: 0\nround = sorted = len = max = lambda *a: 4\nall = lambda x: True\ndef f(x): return 0",
    "patched builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = None\ndef f(x): return 0",
    "own math": "class math:\n    isclose = lambda *a, **k: True\n    fabs = lambda x: 0.0\ndef f(x): return 0",
    "patched math": "import math\nmath.isclose = lambda *a, **k: True\nmath.fabs = lambda x: 0.0\ndef f(x): return 0",
    "any": "from unittest import mock\ndef f(x): return mock.ANY",
    "mock": "from unittest.mock import MagicMock as f",
    "stop": "def f(x): raise StopIteration",
    "a written verdict": """
import os
for file in range(1, 64):
    try: os.write(file, b'{"nonce": "", "test": 0, "problem": ""}\\n')
    except OSError: pass
os._exit(0)
""",
}
HONEST_TESTS = (
    "assert f(2) == 4",
    "assert not f(2) != 4",
    "assert 4 == f(2)",
    "assert [f(2)] == [4]",
    "assert f(2) in [4]",
    "assert abs(f(2) - 4) < 1e-6",
    "assert math.isclose(f(2), 4) and math.fabs(f(2) - 4) < 1e-6",
    "import math\nassert math.isclose(f(2), 4)",
    "assert 3 < f(2) < 5",
    "assert round(f(2)) == 4",
    "assert max([f(2), 0]) == 4",
    "assert sorted([f(2)]) == [4]",
    "assert {4: True}.get(f(2))",
    "assert isinstance(f(2), int) and f(2) == 4",
)


@pytest.mark.parametrize("kind", LIARS)
def test_a_program_cannot_make_its_verdict_up(walled: Walled, kind: str) -> None:
    assert walled.examine("import math\ndef f(x): return 2 * x", *HONEST_TESTS).problems == ("",) * len(HONEST_TESTS)
    assert walled.examine(LIARS[kind], *HONEST_TESTS).passed == (False,) * len(HONEST_TESTS)


def test_tests_are_not_where_the_program_is(walled: Walled) -> None:
    program = """
import gc, sys
def find(backwards):
    frame, found = sys._getframe(), []
    while frame:
        found += [repr(frame.f_locals), repr(frame.f_globals)]
        frame = frame.f_back
    found += [repr(item) for item in gc.get_objects() if isinstance(item, (dict, list, tuple))]
    return sum(backwards[::-1] in text for text in found), sum(backwards in text for text in found) > 0
"""
    assert walled.examine(program, "expected = 'MARKED'\nassert find('DEKRAM') == (0, True)").passed == (True,)


def test_functions_named_like_pythons_own_can_be_tested(walled: Walled) -> None:
    program = "def sum(a, b): return a * b\ndef bisect(x): return -x"
    assert walled.examine(program, "assert sum(2, 5) == 10", "assert bisect(3) == -3", "assert abs(sum(2, 3) - 6) == 0").problems == (
        "",
        "",
        "",
    )
    liar = program + "\nabs = lambda x: 0"
    assert walled.examine(liar, "assert abs(sum(2, 3) - 7) == 0", "assert abs(bisect(1)) == 0").passed == (False, False)


def test_a_name_that_is_a_module_and_what_is_in_it_means_what_the_program_imported(walled: Walled) -> None:
    program = "from datetime import datetime\nimport copy\ndef new_year(y): return datetime(y, 1, 1)"
    assert walled.examine(program, "assert new_year(2020) == datetime(2020, 1, 1)", "assert copy.copy(new_year(1)).year == 1").problems == (
        "",
        "",
    )


def test_only_lines_with_the_nonce_count() -> None:
    ended = End("exited", 0, 0.5)

    def line(**message: object) -> bytes:
        return json.dumps(message).encode() + b"\n"

    report = (
        line(nonce="right", test=0, problem="")
        + line(nonce="wrong", test=1, problem="")
        + line(test=2, problem="")
        + b'{"nonce": "right", "te'
    )
    exam = judge(report, "right", 3, ended, ended)
    assert exam.passed == (True, False, False)
    assert exam.problems[1] == "the tests did not end: it exited with status 0"
    assert exam.seconds == 0.5
    assert judge(line(nonce="wrong", broken="why") + line(nonce="right", test=0, problem=""), "right", 1, ended, ended).passed == (True,)
    assert judge(line(nonce="right", test=0, problem="") + line(nonce="right", broken="why"), "right", 1, ended, ended).passed == (False,)
