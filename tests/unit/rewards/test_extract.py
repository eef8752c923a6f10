"""Finding the answer in a reply: what was put in comes out, and what is no way to look is said before a run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll.config.models import RewardConfig
from drumroll.registry import REGISTRY
from drumroll.rewards.extract import after_thinking, extract, reference_text

WORDS = st.text(st.sampled_from("abc 123.\n"), max_size=20)
ANSWERS = st.text(st.sampled_from("abcxyz123+-. "), min_size=1).map(str.strip).filter(bool)


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        (" 42\n", "reply", " 42\n"),
        ("", "reply", ""),
        ("one\ntwo\n\n", "last_line", "two"),
        ("", "last_line", None),
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, 2 \right.}", "boxed", r"\left\{ 1, 2 \right."),
        (r"\boxed{\boxed{5}}", "boxed", "5"),
        (r"\boxed {5}", "boxed", "5"),
        (r"\boxed{1} \boxed{2", "boxed", None),
        (r"\boxed{ }", "boxed", None),
        ("<answer>1</answer> no, <answer> 2 </answer>!", "tag:answer", "2"),
        ("<final>3", "tag:final", "3"),
        ("answer", "tag:answer", None),
        ("2+2\n#### 4 \nthanks", "hash", "4"),
        ("#### 3\n#### 4", "hash", "4"),
        ("####", "hash", None),
        ("none", "hash", None),
        ("from 3 to $1,234.50.", "last_number", "$1,234.50"),
        ("no number", "last_number", None),
        ("Answer: blue\nAnswer: red", r"regex:Answer: (\w+)", "red"),
        ("nothing", r"regex:Answer: (\w+)", None),
        ("a:b", "regex:a(?:(x)|:b)", None),
        ("<think>It is 4.</think>\n5", "last_number", "5"),
        ("<think>It is 4.", "last_number", None),
    ],
)
def test_ways(text: str, how: str, expected: str | None) -> None:
    assert extract(text, how) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 apples", "3"), ("x2 and m^2, 10^5, y_{1}, s^{-1}", None), ("16-18", "18"), ("is -5.", "-5"), ("is −5", "-5"), ("- 5", "5"),
        ("US$18", "18"), ("cost -$18", "-$18"), (r"\$18", r"\$18"), ("1,234,567.8", "1,234,567.8"), ("1,2345", "2345"), ("18.", "18"),
        (".5", ".5"), ("1.5e-3 m", "1.5e-3"), (r"3 \times 10^{8}", r"3 \times 10^{8}"), ("3/4 cup", "3/4"), ("2 3/4", "2 3/4"),
        (r"2\frac{3}{4}", r"2\frac{3}{4}"), ("50 %", "50 %"), ("50 percent", "50 percent"), ("答案是18", "18"), ("１８", "18"),
        ("90^\\circ", "90"),
    ],
)  # fmt: skip
def test_last_number(text: str, expected: str | None) -> None:
    assert extract(text, "last_number") == expected


@given(before=WORDS, answer=ANSWERS, after=WORDS)
def test_what_was_put_in_comes_out(before: str, answer: str, after: str) -> None:
    assert extract(f"{before}\\boxed{{{answer}}}{after}", "boxed") == answer
    assert extract(f"{before}<answer>{answer}</answer>{after}", "tag:answer") == answer
    assert extract(f"{before}#### {answer}\n{after}", "hash") == answer
    assert extract(f"{before}\n{answer}\n \n", "last_line") == answer
    assert extract(f"{before}[[{answer}]]{after}", r"regex:\[\[(.*?)\]\]") == answer
    assert extract(f"<think>{before}</think>{answer}", "reply") == answer


@given(st.text(st.sampled_from(r"\boxed{}<think></think><answer>#### 12,.-e/%$" + "\n"), max_size=60))
def test_no_text_is_too_strange(text: str) -> None:
    for how in ("reply", "last_line", "boxed", "tag:answer", "hash", "last_number", "regex:(1+)"):
        found = extract(text, how)
        assert found is None or found in text


def test_thoughts_are_no_answer() -> None:
    assert after_thinking("a</think>b<think>c</think>d") == "d"
    assert after_thinking("d<think>e") == "d"
    assert after_thinking("d") == "d"


@pytest.mark.parametrize("value", ["18", 18, " 18 ", r"\boxed{18}", "16 - 3 = <<16+2=18>>18\n#### 18"])
def test_references(value: Any) -> None:
    assert reference_text(value) == "18"


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("boxd", "no way to find an answer is called 'boxd'. Known: reply, last_line, boxed"),
        ("tag:", "no way"),
        ("tag:<answer>", "no way"),
        ("regex:a", r"has 0 groups: put exactly one pair of \( \)"),
        ("regex:(a)(b)", "has 2 groups"),
        ("regex:(a", "is no regular expression: missing"),
    ],
)
def test_unknown_ways_are_found_in_the_config(how: str, problem: str) -> None:
    schema = REGISTRY.lookup("reward", "exact_match").schema(RewardConfig)
    with pytest.raises(ValidationError, match=problem):
        schema(kind="exact_match", extract=how)
    with pytest.raises(ValueError, match=problem):
        extract("a", how)


@pytest.mark.parametrize("text", ["\\boxed{" * 20_000, "1 " * 20_000, "1,111" * 10_000, "1" * 50_000, "1/" * 20_000, "<answer>" * 10_000])
def test_long_replies_end(text: str) -> None:
    assert extract(text, "boxed") is None
    assert extract(text, "tag:answer") is None
    assert (extract(text, "last_number") is None) == ("1" not in text)
