"""Every answer of GSM8K, in the spellings that models write, by the rewards that verify it."""

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from replies import reward, trajectory

from drumroll.types import Task, Turn

DATA = Path(__file__).parents[3] / ".." / "shared" / "data"

pytestmark = pytest.mark.skipif(not (DATA / "gsm8k_train.jsonl").exists(), reason="../shared/data has no GSM8K")

SPELLINGS: dict[str, Callable[[int], str]] = {
    "plain": lambda n: f"{n}",
    "decimals": lambda n: f"{n}.00",
    "currency and separators": lambda n: f"${n:,}",
    "box": lambda n: f"We add and get $\\boxed{{{n}}}$.",
    "sentence": lambda n: f"Of 7 boxes 3 are left.\nThe answer is {n:,}.",
    "hash": lambda n: f"2 + 3 = 5\n#### {n}",
    "LaTeX fraction": lambda n: f"\\frac{{{2 * n}}}{{2}}",
    "unit": lambda n: f"{n} dollars",
    "text in a box": lambda n: f"\\boxed{{\\text{{{n}}}}}",
    "scientific": lambda n: f"{Decimal(n):.12e}",
    "tag after thoughts": lambda n: f"<think>Is it {n + 1}?</think><answer>{n}</answer>",
    "bold": lambda n: f"**{n:,}**",
}


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, int]]:
    """The answer column of every row, and the number behind its `####`."""
    rows = [json.loads(line) for name in ("train", "test") for line in (DATA / f"gsm8k_{name}.jsonl").open()]
    return [(row["answer"], int(row["answer"].rpartition("####")[2].replace(",", ""))) for row in rows]


@pytest.mark.parametrize("kind", ["math", "numeric_match"])
def test_every_answer_verifies_in_every_spelling(kind: str, answers: list[tuple[str, int]]) -> None:
    """All 8,792 rows, each with its whole answer column as the reference, in all twelve spellings; `numeric_match`, which looks for the
    last number, reads all of them too. The next greater number must fail in the same spelling; this is tried once for each of the
    distinct numbers."""
    assert len(answers) == 8792
    judge = reward(kind)
    subject = trajectory("")
    wrong = []
    tried: set[int] = set()
    for column, number in answers:
        task = Task("t", data={"answer": column})
        judge.check_task(task)
        for name, spell in SPELLINGS.items():
            if judge(replace(subject, task=task, turns=(Turn("policy", 0, 1, spell(number)),))) != 1.0:
                wrong.append((name, number))
            if number not in tried and judge(replace(subject, task=task, turns=(Turn("policy", 0, 1, spell(number + 1)),))) != 0.0:
                wrong.append((name, number + 1))
        tried.add(number)
    assert wrong == []


def test_the_slow_way_agrees(answers: list[tuple[str, int]]) -> None:
    """`math` decides plain numbers by itself. Here every eighth of the distinct numbers goes through math-verify, as an equation and
    as a product."""
    judge = reward("math")
    for number in sorted({number for _, number in answers})[::8]:
        assert judge(trajectory(f"$x = {number}$", answer=str(number))) == 1.0
        assert judge(trajectory(f"$x = {number + 1}$", answer=str(number))) == 0.0
        assert judge(trajectory(f"\\boxed{{2 \\cdot {number}}}", answer=str(2 * number))) == 1.0
        assert judge(trajectory(f"\\boxed{{2 \\cdot {number}}}", answer=str(2 * number + 1))) == 0.0
