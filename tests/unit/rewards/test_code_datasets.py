"""The code reward on real tasks: every reference solution of HumanEval and MBPP passes, and two wrong versions of each do not.

The wrong versions are sure to differ from the reference: every function that the tests call is wrapped, and its value is put into a
tuple (`mutated`), or changed to one beside it, such as n + 1 for a number and the opposite for a truth value (`near miss`).
"""

import ast
import asyncio
import json
from pathlib import Path

import pytest
from replies import attempt

from drumroll.rewards.code import Code
from drumroll.rewards.place import Place
from drumroll.types import Task

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in some of MBPP's programs

DATA = Path(__file__).parents[3] / ".." / "shared" / "data"

MUTATED = """
def _change(value):
    return ("mutated", value)
"""
NEAR_MISS = """
def _change(value):
    if value is None:
        return 0
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return value + (1,)
    if isinstance(value, dict):
        return {**value, "x": 1}
    if isinstance(value, set):
        return value | {"x"}
    return [*value, 1]
"""
WRAP = """
def _wrap(function):
    depth = [0]
    def wrapped(*args, **kwargs):
        depth[0] += 1
        try:
            value = function(*args, **kwargs)
        finally:
            depth[0] -= 1
        return value if depth[0] else _change(value)
    return wrapped
"""


def rows(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


def wrong(program, tests, change):
    """The program with every function that the tests call changed."""
    defined = {node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)}
    used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    assert defined & used
    return "\n".join([program, change, WRAP, *(f"{name} = _wrap({name})" for name in sorted(defined & used))])


def judge(subjects, **options):
    """The reward of each subject, by its task's id; two are judged at a time."""
    rewards: dict[str, float] = {}
    waiting = iter(subjects)

    async def work():
        reward = Code(Code.Config(kind="code", **options))
        await reward.start(Place())
        try:
            for subject in waiting:
                reward.check_task(subject.task)
                rewards[subject.task.id] = await reward(subject)
        finally:
            await reward.close()

    async def both():
        await asyncio.gather(work(), work())

    asyncio.run(both())
    return rewards


def human_eval(change):
    for row in rows("humaneval.jsonl"):
        reply = row["canonical_solution"]
        if change:
            tests = f"{row['test']}\ncheck({row['entry_point']})"
            reply = f"```python\n{wrong(row['prompt'] + reply, tests, change)}\n```"
        yield attempt(Task(str(row["task_id"]), prompt="", data=row), reply)


def mbpp(change):
    for row in rows("mbpp.jsonl"):
        program = row["code"].replace("\r\n", "\n")
        program = wrong(program, "\n".join(row["test_list"]), change) if change else program
        yield attempt(Task(str(row["task_id"]), prompt="", data=row), f"```python\n{program}\n```")


VERSIONS = {"reference": ("", 1.0), "mutated": (MUTATED, 0.0), "near miss": (NEAR_MISS, 0.0)}


@pytest.mark.parametrize(("change", "expected"), VERSIONS.values(), ids=VERSIONS)
def test_human_eval(change, expected):
    rewards = judge(human_eval(change), tests_field="test", entry_field="entry_point", prefix_field="prompt")
    assert len(rewards) == 164
    assert {task: reward for task, reward in rewards.items() if reward != expected} == {}


@pytest.mark.parametrize(("change", "expected"), VERSIONS.values(), ids=VERSIONS)
def test_mbpp(change, expected):
    rewards = judge(mbpp(change), tests_field="test_list", setup_field="test_setup_code")
    assert len(rewards) == 974
    assert {task: reward for task, reward in rewards.items() if reward != expected} == {}
