"""Verifiers of numbers, choices, short answers, form and length."""

import decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from replies import reward, trajectory

from drumroll.rewards.exact_match import exact_match
from drumroll.rewards.format import has_tags
from drumroll.rewards.multiple_choice import named_options
from drumroll.rewards.numeric_match import Number, only_number, read_number
from drumroll.rewards.overlong import soft_punishment
from drumroll.rewards.short_answer import normalise
from drumroll.types import Task

EXACT = decimal.Context(prec=60)  # whatever precision some package has set for the whole process
CITIES = ["Paris", "York", "New York", "1.5 million"]


# Exact match


@pytest.mark.parametrize(
    ("reply", "options", "expected"),
    [
        ("<think>43?</think> 42", {}, 1.0),
        ("I say <answer>42</answer>.", {"extract": "tag:answer"}, 1.0),
        ("I say 42.", {"extract": "tag:answer"}, 0.0),
        ("I say 42.", {}, 0.0),
    ],
)
def test_exact_match_looks_where_it_is_told(reply: str, options: dict[str, Any], expected: float) -> None:
    assert exact_match(trajectory(reply, answer=42), **options) == expected


def test_exact_match_may_ignore_case() -> None:
    assert exact_match(trajectory("STRASSE", answer="straße")) == 0.0
    assert exact_match(trajectory("STRASSE", answer="straße"), ignore_case=True) == 1.0


# Numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18), ("-18", -18), ("+18", 18), ("−18", -18), ("1,234", 1234), (r"1{,}234", 1234), (r"1\,234", 1234), ("1\u00a0234", 1234),
        ("$1,234.50", Fraction(2469, 2)), ("-$18", -18), ("$-18", -18), ("€ 18", 18), (".5", Fraction(1, 2)), ("18.00", 18),
        ("1.8e1", 18), ("1.8E+1", 18), ("180e-1", 18), (r"1.8 \times 10^{1}", 18), ("1.8×10^1", 18), ("18*10**0", 18),
        ("3/4", Fraction(3, 4)), (r"-\frac{3}{4}", Fraction(-3, 4)), (r"\dfrac{-3}{4}", Fraction(-3, 4)), ("2 3/4", Fraction(11, 4)),
        (r"-2\frac{3}{4}", Fraction(-11, 4)), ("007", 7), ("1,234,567", 1234567),
    ],
)  # fmt: skip
def test_spellings_of_numbers(text: str, value: int | Fraction) -> None:
    assert read_number(text) == Number(Fraction(value))


@pytest.mark.parametrize(
    "text", ["", "x", "1,23", "1 2", "1.2.3", "3/0", "1e99999", "9" * 5000, "1/2/3", "10^5", "18 dollars", "--5", "1e5x"]
)
def test_what_is_no_number(text: str) -> None:
    assert read_number(text) is None


@given(st.fractions(max_denominator=1000), st.sampled_from(["{}", "is {}.", "**{}**", "= {}", "${}$", "about {} metres"]))
def test_a_fraction_is_read_back_in_any_company(value: Fraction, form: str) -> None:
    sign = "-" if value < 0 else ""
    top, bottom = abs(value.numerator), value.denominator
    for text in (f"{value.numerator}/{bottom}", f"{sign}\\frac{{{top}}}{{{bottom}}}", f"{sign}{top // bottom} {top % bottom}/{bottom}"):
        assert only_number(form.format(text)) == Number(value)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12))
def test_a_decimal_matches_every_spelling_of_itself(value: Any) -> None:
    judge = reward("numeric_match")
    for text in (f"{value:f}", f"{value:,f}", f"{value:.20e}", f"${value:,f}", f"It is {value:f}.", f"{value:f} kg", f"{value:f}%"):
        assert judge(trajectory(text, answer=f"{value:f}")) == 1.0
        assert judge(trajectory(text, answer=f"#### {EXACT.add(value, 1):f}")) == 0.0


@pytest.mark.parametrize(
    ("reply", "reference", "expected"),
    [
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("0.5", "50%", 1.0),
        ("50", "50%", 1.0),
        ("50%", "0.5%", 0.0),
        ("5%", "50", 0.0),
        ("5 percent", "5", 1.0),
        ("2 million", "2000000", 1.0),
        ("$1.5 million", "1500 thousand", 1.0),
        ("2", "2 million", 1.0),
        ("2 million", "2 thousand", 0.0),
        ("2 million", "2000", 0.0),
    ],
)
def test_percentages_and_words_of_size(reply: str, reference: str, expected: float) -> None:
    assert reward("numeric_match")(trajectory(reply, answer=reference)) == expected


@pytest.mark.parametrize(
    ("options", "reply", "expected"),
    [
        ({}, "3.14", 0.0),
        ({"rel_tolerance": 0.001}, "3.14", 1.0),
        ({"abs_tolerance": 0.001}, "3.14", 0.0),
        ({"abs_tolerance": 0.01}, "3.14", 1.0),
        ({}, "first 3.1416, then 5", 0.0),
        ({"extract": "reply"}, "3.1416 (that is 3.14160)", 1.0),
        ({"extract": "reply"}, "3.1416 or 5", 0.0),
        ({"extract": "boxed"}, r"\boxed{3.1416\text{ m}^2}", 1.0),
        ({"extract": "boxed"}, "3.1416", 0.0),
        ({}, "", 0.0),
        ({}, "1e999999999", 0.0),
    ],
)
def test_numeric_match(options: dict[str, Any], reply: str, expected: float) -> None:
    assert reward("numeric_match", **options)(trajectory(reply, answer=3.1416)) == expected


@pytest.mark.parametrize("answer", ["x", "", None, "3 or 4", True, r"\sqrt{x}"])
def test_a_reference_that_is_no_number_is_named_beforehand(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"task 't-7': column 'answer' holds .*; one number was expected"):
        reward("numeric_match").check_task(Task("t-7", data={"answer": answer}))


# Multiple choice


@pytest.mark.parametrize(
    "reply",
    [
        "B", "(B)", "B.", "b", "(b)", "**B**", " B \n", "B) York", "B. York", "B: York", "(B) York", "**B.** York", "Option B",
        "option (B)", "Answer: B",
        "answer is B", "The answer is (B).", "The answer is **B**.", "The answer is (b).",
        "The correct answer is option B because A is too far.",
        "**Answer:** B", "A and C are too far.\nThe answer is B", "It cannot be A.\n\nB", "B\nbecause of the river", r"\boxed{B}",
        r"so $\boxed{\text{B}}$",
        r"\boxed{(B)}", "<answer>B</answer>", "<answer>(B) York</answer>", "#### B", "<think>The answer is A.</think>B", "York",
        "york.", "It is York, I think.",
        r"\boxed{York}", "<answer>york</answer>", "Answer: B\nFinal answer: B",
    ],
)  # fmt: skip
def test_ways_to_name_an_option(reply: str) -> None:
    judge = reward("multiple_choice", choices_field="choices")
    assert judge(trajectory(reply, answer="B", choices=CITIES)) == 1.0
    assert judge(trajectory(reply, answer="C", choices=CITIES)) == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        "", "A or B", "The answer is A or B.", "The answer is B, C.", "The answer is A.\nThe answer is B.", r"\boxed{A, B}",
        "<answer>A and B</answer>",
        "vitamin B is good", "Bob", "The answer is unclear.", "B C", "York or Paris", "The answer is not B", "<think>B</think>", "Z",
    ],
)  # fmt: skip
def test_naming_none_or_two_is_wrong(reply: str) -> None:
    judge = reward("multiple_choice", choices_field="choices")
    assert [judge(trajectory(reply, answer=letter, choices=CITIES)) for letter in "ABCD"] == [0.0] * 4


def test_an_article_is_no_option() -> None:
    assert named_options("The answer is A dog.") == set()
    assert named_options("The answer is A because dogs bark.") == {"A"}
    assert named_options("A dog") == set()


def test_the_longer_text_counts() -> None:
    assert named_options("It must be New York.", ["paris", "york", "new york"]) == {"C"}
    assert named_options("1.5 million", [normalise("15 million"), normalise("1.5 million")]) == {"B"}


@pytest.mark.parametrize("answer", ["C", "c", "(C)", 2, "New York", "new york."])
def test_references_to_options(answer: Any) -> None:
    judge = reward("multiple_choice", choices_field="choices")
    assert judge(trajectory("C", answer=answer, choices=CITIES)) == 1.0
    assert judge(trajectory("B", answer=answer, choices=CITIES)) == 0.0


def test_choices_may_be_looked_for_in_one_place() -> None:
    judge = reward("multiple_choice", extract="last_line")
    assert judge(trajectory("The answer is A.\nB", answer=1)) == 1.0


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            {"answer": "E", "choices": CITIES},
            "holds 'E'; a letter from A to D or a whole number from 0 to 3 was expected, or the text of an option",
        ),
        ({"answer": 4, "choices": CITIES}, "holds '4'"),
        ({"answer": True, "choices": CITIES}, "holds 'True'"),
        ({"answer": "A", "choices": ["x"]}, "column 'choices' holds .* a list of 2 to 26"),
        ({"answer": "A", "choices": ["x", "X."]}, "all differ"),
        ({"answer": "A", "choices": "xy"}, "column 'choices'"),
    ],
)
def test_tasks_without_a_right_option_are_named_beforehand(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"task 't-7': .*{problem}"):
        reward("multiple_choice", choices_field="choices").check_task(Task("t-7", data=data))


# Short answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Well-Known U.S. dollar!", "well known us dollar"), ("ＡＢＣ", "abc"), ("O'Brien", "obrien"), ("the", "the"),
        ("-1.5", "-1.5"), ("−1.5 %", "-1.5"),
        ("1,000.", "1000"), ("snake_case/x", "snake case x"), ("...", ""), ("«Été»", "été"), (".5", ".5"),
    ],
)  # fmt: skip
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected


@given(st.text(max_size=30))
def test_spacing_never_matters(text: str) -> None:
    assert normalise(f"  {text}\n") == normalise(text) == normalise(text.replace(" ", "  "))


@pytest.mark.parametrize(
    ("metric", "reply", "expected"),
    [
        ("exact", "the united states", 1.0), ("exact", "USA", 1.0), ("exact", "In the USA", 0.0), ("exact", "", 0.0),
        ("contains", "It was in the U.S.A., I think", 1.0), ("contains", "thousand", 0.0), ("contains", "busa", 0.0),
        ("f1", "united states", 1.0), ("f1", "the united kingdom", 0.5), ("f1", "France", 0.0), ("f1", "", 0.0),
        ("f1", "united states of america", 2 * 2 / 6),
    ],
)  # fmt: skip
def test_short_answer(metric: str, reply: str, expected: float) -> None:
    assert reward("short_answer", metric=metric)(trajectory(reply, answer=["United States", "USA"])) == pytest.approx(expected)


def test_short_answers_are_extracted_and_columns_may_hold_one() -> None:
    judge = reward("short_answer", extract="tag:answer")
    assert judge(trajectory("Well. <answer>The Moon.</answer>", answer="moon")) == 1.0
    assert judge(trajectory("The Moon.", answer="moon")) == 0.0
    assert judge(trajectory("<answer>1969</answer>", answer=1969)) == 1.0


@pytest.mark.parametrize("answer", [None, "", "?!", [], ["moon", ""]])
def test_answers_of_nothing_are_named_beforehand(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"task 't-7': column 'answer' holds .* at least one letter or digit"):
        reward("short_answer").check_task(Task("t-7", data={"answer": answer}))


# Form


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<think>a</think><answer>b</answer>", True), ("\n<think>\n</think>\n\n<answer>b</answer> ", True),
        ("<answer>b</answer><think>a</think>", False), ("<think>a</think>", False), ("<think>a</think> so <answer>b</answer>", False),
        ("x<think>a</think><answer>b</answer>", False), ("<think>a</think><answer>b</answer>.", False),
        ("<think>a<answer>b</answer></think>", False), ("<think>a</think><think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer></answer>", False), ("<think>a<answer></think>b</answer>", False), ("", False),
    ],
)  # fmt: skip
def test_tags(reply: str, expected: bool) -> None:
    assert has_tags(reply, ["think", "answer"]) is expected
    assert reward("format", tags=["think", "answer"])(trajectory(reply)) == float(expected)


@given(st.lists(st.text(st.characters(exclude_characters="<>")), min_size=3, max_size=3), st.permutations(["a", "b", "c"]))
def test_only_the_right_order_of_tags_passes(contents: list[str], order: list[str]) -> None:
    reply = "\n".join(f"<{tag}>{content}</{tag}>" for tag, content in zip(order, contents, strict=True))
    assert has_tags(reply, order)
    assert has_tags(reply, ["a", "b", "c"]) == (order == ["a", "b", "c"])


@pytest.mark.parametrize(("reply", "expected"), [(" yes\n", 1.0), ("yes, sir", 0.0), ("no", 1.0), ("", 0.0)])
def test_patterns_match_the_whole_reply(reply: str, expected: float) -> None:
    assert reward("format", pattern="yes|no")(trajectory(reply)) == expected


def test_thoughts_are_part_of_the_form() -> None:
    assert reward("format", pattern="(?s)<think>.*</think>.+")(trajectory("<think>\n</think>yes")) == 1.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "takes `pattern` or `tags`"),
        ({"pattern": "a", "tags": ["b"]}, "give one of them"),
        ({"pattern": "(a"}, "is no regular expression"),
        ({"tags": []}, "at least one name"),
        ({"tags": ["a", "a"]}, "none twice"),
        ({"tags": ["<a>"]}, "'<a>' is no name for a tag"),
    ],
)
def test_impossible_forms_are_found_in_the_config(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        reward("format", **options)


@pytest.mark.parametrize("reply", ["<think>" * 50_000, "<think>" + " " * 200_000 + "</think>", "<" * 200_000])
def test_tags_of_hostile_replies(reply: str) -> None:
    assert reward("format", tags=["think", "answer"])(trajectory(reply)) == 0.0


# Length


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_overlong(num_tokens: int, expected: float) -> None:
    assert reward("overlong", buffer_tokens=20, max_tokens=100)(trajectory("", num_tokens)) == expected
    assert reward("overlong", buffer_tokens=20)(trajectory("", num_tokens, max_new_tokens=100)) == expected


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 200), st.integers(0, 200))
def test_longer_is_never_better(one: int, two: int, buffer_tokens: int, rest: int) -> None:
    short, long = (soft_punishment(n, buffer_tokens, buffer_tokens + rest) for n in sorted((one, two)))
    assert -1.0 <= long <= short <= 0.0


def test_a_buffer_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ValidationError, match="buffer_tokens 20, more than max_tokens 10: every reply would be punished"):
        reward("overlong", buffer_tokens=20, max_tokens=10)
    with pytest.raises(ValueError, match="more than max_new_tokens of its sampling 10"):
        reward("overlong", buffer_tokens=20)(trajectory("", max_new_tokens=10))
