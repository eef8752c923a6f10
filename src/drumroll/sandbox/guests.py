"""What runs behind the walls, by role: a script, the candidate that serves a program's functions, the examiner that runs tests on them.

Each reads its payload from descriptor 3. A script has the usual three files. Candidate and examiner read from descriptor 4 and write to
5, which are two pipes between them (`exchange`). Descriptor 6 is the examiner's alone: its reports to drumroll. So the tests, their
expected values and the nonce that makes a report count are never where the program is.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import importlib
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

from drumroll.sandbox.exchange import ENDED, MAX_TEXT, OPERATIONS, OPERATIONS_ON_TESTS, Link, LinkLost

PAYLOAD, READ, WRITE, REPORT = 3, 4, 5, 6
GONE = "the program ended during the test"
"""The problem of a test whose program is no longer there. Drumroll, which knows how it ended, adds that."""


def job(role: str) -> Callable[[], None]:
    """What a guest of a role runs."""
    return {"script": run_script, "candidate": serve_program, "examiner": run_tests}[role]


def payload() -> dict[str, Any]:
    """What drumroll sent for this guest alone."""
    with open(PAYLOAD, "rb") as file:
        content = json.load(file)
    assert isinstance(content, dict)
    return content


def load(program: str, name: str, module: types.ModuleType) -> None:
    """Runs a program's source as a module."""
    for ours in [key for key in sys.modules if key.partition(".")[0] == "drumroll"]:
        del sys.modules[ours]
    sys.argv = [name]
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    linecache.cache[name] = (len(program), None, [line + "\n" for line in program.split("\n")], name)
    exec(compile(program, name, "exec", dont_inherit=True), module.__dict__)


def run_script() -> None:
    """The program as `__main__`."""
    program = payload()["program"]
    module = types.ModuleType("__main__")
    status = 0
    try:
        load(program, "program.py", module)
    except SystemExit as leaving:
        status = status_of(leaving)
    except BaseException as error:
        frames = error.__traceback__
        traceback.print_exception(error.with_traceback(frames.tb_next.tb_next if frames and frames.tb_next else None))
        status = 1
    leave(module, status)


def status_of(leaving: SystemExit) -> int:
    """The exit status that the interpreter makes of a SystemExit. A text is printed."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def leave(module: types.ModuleType, status: int) -> None:
    """Ends as the interpreter would, without the time that it takes to tear down the modules that come from the zygote."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        module.__dict__.clear()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def serve_program() -> None:
    """The candidate: runs the program, says which names it defines, and then does what the examiner asks of them."""
    program = payload()["program"]
    link = Link(os.fdopen(READ, "rb"), os.fdopen(WRITE, "wb"), OPERATIONS)
    module = types.ModuleType("program")
    status = 0
    try:
        try:
            load(program, "program.py", module)
        except Exception as error:
            link.send(["raise", link.encode_error(error), None])
        else:
            link.give(module.__dict__)
            names = {key: isinstance(value, types.ModuleType) for key, value in module.__dict__.items()}
            link.send(["ok", link.encode(names), None])
            link.serve()
    except SystemExit as leaving:
        status = status_of(leaving)
    except LinkLost:
        pass
    finally:
        os._exit(status)


# The examiner.


def run_tests() -> None:
    """The examiner: reports on each test, in order, or that the tests themselves are broken."""
    content = payload()
    link = Link(os.fdopen(READ, "rb"), os.fdopen(WRITE, "wb"), OPERATIONS_ON_TESTS)

    def say(**message: Any) -> None:
        os.write(REPORT, json.dumps({"nonce": content["nonce"], **message}).encode() + b"\n")

    tests: list[Test] = []
    for number, source in enumerate(content["tests"]):
        try:
            tests.append(Test(number, source))
        except BrokenTest as error:
            say(broken=str(error))
            return
    names, problem = names_of_program(link)
    for test in tests:
        try:
            why = problem or gone(link) or test.problem(link, names)
        except BrokenTest as error:
            say(broken=str(error))
            return
        say(test=test.number, problem=why[:MAX_TEXT])
    os._exit(0)


def names_of_program(link: Link) -> tuple[dict[str, bool], str]:
    """The names that the program defines, each with whether it is a module; or what kept the program from being loaded."""
    try:
        answer = link.wait()
        if answer[0] == "ok":
            names = link.decode(answer[1])
            return {str(name): is_module is True for name, is_module in names.items()}, ""
        error = link.decode_error(answer[1])
    except LinkLost:
        return {}, gone(link)
    except Exception as broken:
        return {}, f"the program could not be loaded ({type(broken).__name__})"
    return {}, f"the program could not be loaded: {describe(error)}"


def gone(link: Link) -> str:
    """The problem of a test whose program cannot be asked any more; "" while it can."""
    return GONE if link.lost == ENDED else f"{GONE}: {link.lost}" if link.lost else ""


class BrokenTest(Exception):
    """A test that says nothing about any program."""


class Test:
    """One test, compiled. Raises BrokenTest for what is no test."""

    def __init__(self, number: int, source: str) -> None:
        self.number = number
        self.name = f"test {number + 1}"
        try:
            self.tree = ast.parse(source, self.name)
            self.code = compile(self.tree, self.name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BrokenTest(f"{self.name} is not Python: {describe(error)}") from None
        if not any(can_fail(node) for node in ast.walk(self.tree)):
            raise BrokenTest(f"{self.name} cannot fail: it asserts nothing")
        self.lines = source.splitlines()

    def problem(self, link: Link, names: dict[str, bool]) -> str:
        """Runs the test: "" if it passed, otherwise why not."""
        space = Names(link, names, names_to_trust(self.tree, names))
        why = ""
        try:
            exec(self.code, space)
        except BaseException as error:
            if isinstance(error, ImportError) and not from_program(error) and self.stands_at_import(error):
                raise BrokenTest(f"{self.name} cannot be run: {describe(error)}") from None
            why = f"{'the program raised ' if from_program(error) else ''}{describe(error)}{self.place(error)}"
        return gone(link) or why

    def line_of(self, error: BaseException) -> int:
        """The last line of this test in an error's traceback; 0 if there is none."""
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == self.name]
        return lines[-1] if lines else 0

    def place(self, error: BaseException) -> str:
        line = self.line_of(error)
        return f" (line {line}: {self.lines[line - 1].strip()})" if 0 < line <= len(self.lines) else ""

    def stands_at_import(self, error: ImportError) -> bool:
        line = self.line_of(error)
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in imports)


def from_program(error: BaseException) -> bool:
    return "from_program" in error.__dict__


def describe(error: BaseException) -> str:
    """An error in one line. Example: `ValueError: too small`."""
    lines = traceback.format_exception_only(error)
    place = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
    return lines[-1].strip() + place if lines else type(error).__name__


def can_fail(node: ast.AST) -> bool:
    """Whether a part of a test can tell a wrong program from a right one: an assertion that may be false, a raise, an assert method."""
    if isinstance(node, ast.Assert):
        test = node.test
        return not (test.value if isinstance(test, ast.Constant) else isinstance(test, ast.Tuple) and test.elts)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")
    return isinstance(node, ast.Raise)


class Names(dict[str, Any]):
    """The names that a test sees: its own, then those of the program, each asked for when it is used, then Python's."""

    def __init__(self, link: Link, program: dict[str, bool], trusted: Iterable[str]) -> None:
        super().__init__(__name__="test")
        self.link = link
        self.program = program
        self.trusted = frozenset(trusted)

    def __missing__(self, name: str) -> Any:
        if name not in self.program or (name in self.trusted and hasattr(builtins, name)):
            raise KeyError(name)
        if name in self.trusted:
            module = importlib.import_module(name)
            return module if self.program[name] else getattr(module, name, module)  # `from datetime import datetime` means the class
        return self.link.ask("item", 0, name)


def is_reserved(name: str) -> bool:
    return hasattr(builtins, name) or name in sys.stdlib_module_names


def names_to_trust(test: ast.AST, program: dict[str, bool]) -> set[str]:
    """The names for which a test gets Python's own meaning although the program defines them.

    A test that says `abs(f(2) - 4) < 0.1` means Python's `abs`, and a program must not put its own in place of it. But some tasks
    ask for a function that is named like one of Python's, and test it alone: `assert sum(10, 15) == 6`. So Python's names are
    Python's, unless the test uses no other name that it does not define itself, be it one that the program lacks; then the innermost
    one that is called is what the test is about.
    """
    used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    reserved = {name for name in program if is_reserved(name)}
    if any(not is_reserved(name) for name in used - names_defined(test)):
        return reserved
    tested = {name for name in used & reserved if not (program[name] and name in sys.stdlib_module_names)}
    if len(tested) > 1:
        calls = [node for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        outer = {call.func.id for call in calls for inner in calls if inner is not call and holds(call, inner, tested)}  # type: ignore[attr-defined]
        tested -= outer
    return reserved - tested if len(tested) == 1 else reserved


def names_defined(test: ast.AST) -> set[str]:
    """Every name that a test itself gives a meaning to, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def holds(call: ast.Call, inner: ast.Call, names: set[str]) -> bool:
    """Whether a call has another one, of one of these names, among its arguments."""
    return isinstance(inner.func, ast.Name) and inner.func.id in names and any(node is inner for node in ast.walk(call))
