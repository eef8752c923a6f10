"""Mathematical answers: equal in any form, and a verdict on whatever a reply holds."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replies import reward, trajectory

from drumroll.registry import REGISTRY
from drumroll.types import Task

MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"


def judge(reply: str, answer: Any, **options: Any) -> float:
    score: float = reward("math", **options)(trajectory(reply, answer=answer))
    return score


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        # numbers
        ("18", "x = 18"), ("18", r"\boxed{18\text{ dollars}}"), ("18", r"\boxed{\$18.00}"), ("18", "18 €"), ("18", r"\sqrt{324}"),
        ("18", "2 * 9"),
        ("18", "So he pays 5+13=18 dollars in total."), ("18", r"She sells 6 for 3: $6 \cdot 3 = 18$."), ("18", "**Answer:** 18"),
        ("18", "18 is the answer."),
        ("18", "The answer is **18**. I hope this answer is helpful."), ("1,234", r"1\,234"), ("1234", "$1{,}234$"),
        ("109200000", "1.092e8"),
        ("18", "The mass is 1.8e1 grams, which is what was asked for."), (18, "18"), (0.5, r"\frac{1}{2}"), ("2^{10}", "1024"),
        ("10^{-3}", "0.001"),
        # fractions and mixed numbers
        (r"\frac{1}{2}", "0.5"), ("1/2", r"\dfrac{2}{4}"), ("1/3", "0.333333"), (r"\frac12", "1/2"), (r"2\frac{3}{4}", "2.75"),
        ("-1/2", r"\frac{-1}{2}"),
        # percent and degrees
        ("50", r"50\%"), ("0.5", r"\boxed{50\%}"), (r"50\%", "50"), ("90", r"90^\circ"),
        # roots and constants
        (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{1}{\sqrt{2}}", r"\boxed{\frac{\sqrt{2}}{2}}"), (r"\pi/2", r"\frac{\pi}{2}"),
        # expressions and equations
        ("x^2+2x+1", "(x+1)^2"), ("2x", "x+x"), ("x=3", "3"), ("3", "x=3"), ("x=3", "$x = 3$"), ("3+2i", "2i+3"),
        ("y = 2x + 1", "y = 1 + 2x"),
        # sets and intervals
        (r"\{1,2,3\}", r"\{3,1,2\}"), ("1,2,3", "3, 2, 1"), (r"5\pm2", r"\{3,7\}"), ("(1,2]", r"\boxed{(1, 2]}"),
        ("(3,4)", "The answer is (3, 4)."),
        (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(2,\infty)\cup(-\infty,1)}"), ("x<3", r"(-\infty,3)"),
        # matrices, units, words
        (MATRIX, rf"\boxed{{{MATRIX}}}"), (r"12\text{ cm}^2", "12"), ("12", r"12\text{ cm}^2"),
        ("12", "12 apples per day"), ("2000000", "2 million people"), ("2, 3", "3 and 2"), (r"\text{east}", r"\boxed{east}"),
        ("west", r"The answer is \text{West}."), ("no solution", r"\boxed{\text{No solution}}"), (r"\text{(A)}", "A"),
        # thoughts
        ("18", r"<think>\boxed{17}</think> It is \boxed{18}."),
    ],
)  # fmt: skip
def test_equal_answers(answer: Any, reply: str) -> None:
    assert judge(reply, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("18", "19"), ("18", ""), ("18", "eighteen"), ("18", r"\boxed{}"), ("18", r"\boxed{18} or rather \boxed{19}"),
        ("109200000", "109200001.0"),
        ("18", r"<think>18</think>"), ("18", "<think>18"), ("1/2", r"-\frac{1}{2}"), ("1/3", "0.33"), ("2", "2x"),
        ("2", r"\boxed{2x}"), ("2", r"\boxed{2 \pi}"),
        ("4", "The answer is (3, 4)."), ("(1,2]", "[1,2]"), ("(1,2]", "(1,2)"), (r"\{1,2,3\}", r"\{1,2\}"),
        (r"\{1,2\}", r"\{1,2,3\}"), ("x=3", "y=3"), ("x=3", "x=4"),
        (r"\sqrt{8}", r"\sqrt{2}"), ("x^2+2x+1", "(x-1)^2"), (MATRIX, MATRIX.replace("4", "5")), (r"\text{west}", "stew"),
        ("yes", "No"), ("5", "x = 4 or x = 5"),
        ("18", r"\frac{1}{0}"), ("50", "0.5"), ("5", r"\boxed{5 \text{ or } 6}"), ("2000", "2 million"), ("3", "2 and 3"),
        ("1234", r"\boxed{1\,235}"),
    ],
)  # fmt: skip
def test_different_answers(answer: Any, reply: str) -> None:
    assert judge(reply, answer) == 0.0


@given(st.integers(-(10**9), 10**9), st.integers(1, 999))
def test_a_number_verifies_against_every_spelling_of_itself(top: int, bottom: int) -> None:
    answer = f"{top}/{bottom}"
    for text in (
        answer,
        f"\\frac{{{top}}}{{{bottom}}}",
        f"$\\frac{{{3 * top}}}{{{3 * bottom}}}$",
        f"\\boxed{{{answer}}}",
        f"The answer is {answer}.",
    ):
        assert judge(text, answer) == 1.0
        assert judge(text, f"{top + 1}/{bottom}") == 0.0


def test_it_may_look_in_one_place_only() -> None:
    assert judge("The answer is 18.", "18", extract="boxed") == 0.0
    assert judge(r"\boxed{17}, no: <final>$18$</final>", "18", extract="tag:final") == 1.0
    assert judge("First 17.\nThen the answer is 18.", "18", extract="last_line") == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        r"\boxed{9^{9^{9^{9}}}}", "so 9**9**9**9 is it", "(10^9)!", r"\boxed{\sum_{n=1}^{10^9} \frac{1}{n^2}}",
        r"\boxed{x^{1000000}-(x+1)^{100000}}",
        "\\boxed{" + "\\frac{1}{" * 1000 + "2" + "}" * 1001, "(" * 2000 + "1" + ")" * 2000,
        "\\boxed{" + "{" * 3000 + "1" + "}" * 3001, "1" * 100_000, "1e999999999", "1.5e900",
        "$" * 50_000, "answer: " * 5_000, "\\boxed{" * 10_000, "1 " * 20_000, "\x00\ud800", "\\", "\\boxed{\\input{/etc/passwd}}",
        "__import__('os').abort()",
    ],
    ids=lambda reply: repr(reply[:20]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the alarm may ring first inside the garbage collector
def test_hostile_replies_are_wrong_and_nothing_more(reply: str) -> None:
    assert judge(reply, "18", deadline_s=0.4) == 0.0
    assert judge(reply, "x=18", deadline_s=0.4) == 0.0
    assert judge("18", "18", deadline_s=0.4) == 1.0


def test_it_works_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(judge(r"2\sqrt{2}", r"\sqrt{8}")))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize(
    "answer", ["18", 18, r"\frac{1}{2}", "x=3", MATRIX, "east", r"\{1,2\}", "3 + 4 = 7\n#### 7", r"so \boxed{7}", r"$x=1$ and $x=2$"]
)
def test_references_that_can_be_used(answer: Any) -> None:
    reward("math").check_task(Task("t-7", data={"answer": answer}))


@pytest.mark.parametrize("answer", ["", "?!", r"\frac{1}{0}", r"\frac{1", "5 apples and 3 pears"])
def test_references_that_cannot_are_named_beforehand(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"task 't-7': column 'answer' holds .* cannot be read as mathematics"):
        reward("math", deadline_s=0.5).check_task(Task("t-7", data={"answer": answer}))


def test_it_is_pooled_with_a_deadline() -> None:
    config = reward("math").config
    assert (config.seat, config.deadline_s) == ("pooled", 5.0)
    assert REGISTRY.lookup("reward", "math").short_name == "math"
