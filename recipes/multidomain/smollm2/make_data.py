"""Writes the tasks of recipes/multidomain_smollm2.yaml: python recipes/multidomain/smollm2/make_data.py

Questions that a weak instruction model answers now and then: word problems with two numbers, functions of one line, requests with one or
two checkable constraints, and questions about a few given facts. Held-out tasks and training tasks share no prompt. How an answer is to
be given, and where it is looked for, stands in the recipe.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SIZES = {"heldout": 500, "train": 2000}
"""Of each domain."""

Row = dict[str, Any]

NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Karen", "Liam"),
    *("Mia", "Noah", "Olivia", "Paul", "Quinn", "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Zoe"),
)
THINGS = ("apples", "books", "marbles", "stickers", "pencils", "cookies", "shells", "coins", "stamps", "balloons", "cards", "flowers")

# Word problems. {a} and {b} are the numbers, {x} and {y} two people, {things} what is counted; the last entry is the answer.

Numbers = Callable[[random.Random], tuple[int, int]]


def _up_to(most: int) -> Numbers:
    return lambda rng: (rng.randrange(2, most), rng.randrange(2, most))


def _less(rng: random.Random) -> tuple[int, int]:
    a = rng.randrange(5, 60)
    return a, rng.randrange(1, a)


def _shared(rng: random.Random) -> tuple[int, int]:
    b = rng.randrange(2, 10)
    return b * rng.randrange(2, 10), b


def _plus(a: int, b: int) -> int:
    return a + b


def _minus(a: int, b: int) -> int:
    return a - b


def _times(a: int, b: int) -> int:
    return a * b


def _over(a: int, b: int) -> int:
    return a // b


PROBLEMS: Sequence[tuple[str, Numbers, Callable[[int, int], int]]] = (
    ("{x} has {a} {things} and buys {b} more. How many {things} does {x} have now?", _up_to(50), _plus),
    ("{x} has {a} {things} and {y} has {b} {things}. How many {things} do they have together?", _up_to(50), _plus),
    ("There are {a} {things} on the table and {b} {things} in a box. How many {things} are there in all?", _up_to(50), _plus),
    ("{x} found {a} {things} in the morning and {b} in the afternoon. How many {things} did {x} find?", _up_to(50), _plus),
    ("{x} had {a} {things} and gave {b} of them to {y}. How many {things} are left?", _less, _minus),
    ("{x} has {a} {things}. {b} of them get lost. How many {things} does {x} still have?", _less, _minus),
    ("A shop had {a} {things} and sold {b}. How many {things} remain in the shop?", _less, _minus),
    ("{x} has {a} {things} and {y} has {b}. How many more {things} does {x} have than {y}?", _less, _minus),
    ("{x} has {a} boxes with {b} {things} in each box. How many {things} does {x} have?", _up_to(11), _times),
    ("{x} collects {b} {things} every day for {a} days. How many {things} is that?", _up_to(11), _times),
    ("{x} shares {a} {things} equally among {b} friends. How many {things} does each friend get?", _shared, _over),
    ("{a} {things} are put into bags of {b}. How many bags are needed?", _shared, _over),
)


def mathematics(rng: random.Random) -> Row:
    """Two numbers and one operation in a sentence or two."""
    template, numbers, solve = rng.choice(PROBLEMS)
    a, b = numbers(rng)
    x, y = rng.sample(NAMES, 2)
    return {"prompt": template.format(a=a, b=b, x=x, y=y, things=rng.choice(THINGS)), "answer": str(solve(a, b))}


# Functions: what is to be returned ({v} is the argument, {k} a number, {c} and {d} letters), and the same as a Python expression.

FUNCTIONS: Mapping[str, Sequence[tuple[str, str]]] = {
    "number": (
        ("{v} plus {k}", "v + k"),
        ("{v} minus {k}", "v - k"),
        ("{k} minus {v}", "k - v"),
        ("{v} multiplied by {k}", "v * k"),
        ("the remainder of {v} divided by {k}", "v % k"),
        ("{v} squared plus {k}", "v * v + k"),
        ("the larger of {v} and {k}", "max(v, k)"),
        ("the smaller of {v} and {k}", "min(v, k)"),
        ("True if {v} is greater than {k} and False otherwise", "v > k"),
        ("True if {v} is divisible by {k} and False otherwise", "v % k == 0"),
    ),
    "text": (
        ("the first {k} characters of the string {v}", "v[:k]"),
        ("the last {k} characters of the string {v}", "v[-k:]"),
        ("the string {v} repeated {k} times", "v * k"),
        ("the length of the string {v} plus {k}", "len(v) + k"),
        ("how many times the letter '{c}' occurs in the string {v}", "v.count(c)"),
        ("the string {v} with every '{c}' replaced by '{d}'", "v.replace(c, d)"),
        ("True if the string {v} starts with '{c}' and False otherwise", "v.startswith(c)"),
        ("True if the string {v} contains '{c}' and False otherwise", "c in v"),
        ("the string {v} with '{c}' added at the end", "v + c"),
        ("the string {v} reversed, with '{c}' added at the end", "v[::-1] + c"),
        ("the string {v} in upper case, with '{c}' added at the end", "v.upper() + c"),
    ),
    "list": (
        ("the sum of the list {v} plus {k}", "sum(v) + k"),
        ("the largest item of the list {v} plus {k}", "max(v) + k"),
        ("the list {v} without its first {k} items", "v[k:]"),
        ("the first {k} items of the list {v}", "v[:k]"),
        ("the list {v} with {k} added at the end", "v + [k]"),
        ("the items of the list {v} that are greater than {k}, as a list", "[item for item in v if item > k]"),
        ("how many items of the list {v} are less than {k}", "sum(item < k for item in v)"),
        ("each item of the list {v} multiplied by {k}, as a list", "[item * k for item in v]"),
        ("True if {k} is in the list {v} and False otherwise", "k in v"),
    ),
}
ARGUMENTS = {"number": ("x", "n", "number"), "text": ("s", "text", "word"), "list": ("items", "values", "numbers")}
TEXTS = ("banana", "letter", "summer", "noon", "paper", "level", "python", "engineer", "coffee", "street", "garden", "apple", "a", "teapot")
COMMON = "aeinorst"


def code(rng: random.Random) -> Row:
    """A function of one line, and what it must return for four arguments."""
    kind = rng.choice(list(FUNCTIONS))
    wording, expression = rng.choice(FUNCTIONS[kind])
    c, d = rng.sample(COMMON, 2)
    k = rng.randrange(2, 30 if kind == "number" else 8)
    name, argument = rng.choice(("f", "g", "solve", "compute", "func")), rng.choice(ARGUMENTS[kind])
    tests: dict[str, str] = {}
    while len(set(tests.values())) < 2:  # else a function that looks at nothing would pass
        given = _arguments(kind, k, c, rng)
        tests = {repr(value): repr(eval(expression, {"v": value, "k": k, "c": c, "d": d})) for value in given}
    return {
        "prompt": f"Write a Python function {name}({argument}) that returns {wording.format(v=argument, k=k, c=c, d=d)}.",
        "tests": [f"assert {name}({value}) == {wanted}" for value, wanted in tests.items()],
    }


def _arguments(kind: str, k: int, c: str, rng: random.Random) -> list[Any]:
    """Four arguments, of which some are near what a function with these parameters looks for."""
    match kind:
        case "number":
            return [rng.randrange(k), k, k * rng.randrange(2, 5), k + rng.randrange(1, 40)]
        case "text":
            return [*rng.sample(TEXTS, 3), c + rng.choice(TEXTS)]
        case _:
            return [*(rng.sample(range(12), rng.randrange(4, 10)) for _ in range(3)), [k, *rng.sample(range(12), 2)]]


# Requests and constraints: how a constraint is put into words, its id, and its arguments.

SUBJECTS = (
    *("the sea", "dogs", "trains", "winter", "a garden", "breakfast", "the moon", "football", "a river", "music", "bread", "the forest"),
    *("a bicycle", "rain", "cats", "a library", "chess", "mountains", "tea", "a market", "birds", "school", "the desert", "a lighthouse"),
    *(
        "holidays",
        "robots",
        "a farm",
        "honey",
        "islands",
        "painting",
        "the night sky",
        "a bakery",
        "horses",
        "snow",
        "apples",
        "friendship",
    ),
)
REQUESTS = ("Write a short text about {s}.", "Describe {s}.", "Tell me something about {s}.", "Write a few lines about {s}.")
KEYWORDS = ("bright", "quiet", "time", "green", "people", "old", "water", "small", "morning", "happy", "light", "home")
CLOSINGS = ("That is all.", "Thank you for reading.", "Have a nice day.", "The end.", "Is there anything else?")

Constraint = tuple[str, str, dict[str, Any]]

CONSTRAINTS: Mapping[str, Callable[[random.Random], Constraint]] = {
    "bullets": lambda rng: _numbered(
        "Use exactly {n} that start with *.", "bullet point", "detectable_format:number_bullet_lists", "num_bullets", rng.randrange(2, 6)
    ),
    "lower": lambda rng: ("Use only lowercase letters.", "change_case:english_lowercase", {}),
    "upper": lambda rng: ("Use only capital letters.", "change_case:english_capital", {}),
    "no_comma": lambda rng: ("Do not use any commas.", "punctuation:no_comma", {}),
    "quotation": lambda rng: ("Put the whole answer in double quotation marks.", "startend:quotation", {}),
    "closing": lambda rng: _closing(rng.choice(CLOSINGS)),
    "keywords": lambda rng: _keywords(rng.sample(KEYWORDS, 2)),
    "short": lambda rng: _words(rng.randrange(10, 26), "less than", "Use fewer than {n} words."),
    "long": lambda rng: _words(rng.randrange(30, 51), "at least", "Use at least {n} words."),
    "title": lambda rng: ("Begin with a title in double angular brackets, such as <<title>>.", "detectable_format:title", {}),
    "postscript": lambda rng: ("Add a postscript that starts with P.S.", "detectable_content:postscript", {"postscript_marker": "P.S."}),
    "highlights": lambda rng: _numbered(
        "Highlight at least {n} with asterisks, such as *word*.",
        "word",
        "detectable_format:number_highlighted_sections",
        "num_highlights",
        rng.randrange(1, 4),
    ),
    "placeholders": lambda rng: _numbered(
        "Use at least {n} in square brackets, such as [name].",
        "placeholder",
        "detectable_content:number_placeholders",
        "num_placeholders",
        rng.randrange(1, 4),
    ),
}
CONFLICTS = (
    {"lower", "upper"},
    {"bullets", "quotation"},
    {"bullets", "highlights"},
    {"bullets", "short"},
    {"short", "long"},
    {"closing", "postscript"},
    {"title", "quotation"},
)
"""Constraints that no reply, or hardly any, can satisfy together."""


def _numbered(words: str, noun: str, constraint: str, argument: str, n: int) -> Constraint:
    return words.format(n=f"{n} {noun}{'s' * (n > 1)}"), constraint, {argument: n}


def _words(n: int, relation: str, words: str) -> Constraint:
    return words.format(n=n), "length_constraints:number_words", {"num_words": n, "relation": relation}


def _closing(phrase: str) -> Constraint:
    return f'End with exactly this sentence: "{phrase}"', "startend:end_checker", {"end_phrase": phrase}


def _keywords(words: list[str]) -> Constraint:
    return f"Use the words {words[0]} and {words[1]}.", "keywords:existence", {"keywords": words}


def instructions(rng: random.Random) -> Row:
    """A small request with one constraint or two."""
    kinds = rng.sample(list(CONSTRAINTS), rng.randrange(1, 3))
    while any(pair <= set(kinds) for pair in CONFLICTS):
        kinds = rng.sample(list(CONSTRAINTS), 2)
    chosen = [CONSTRAINTS[kind](rng) for kind in kinds]
    request = rng.choice(REQUESTS).format(s=rng.choice(SUBJECTS))
    return {
        "prompt": " ".join([request, *(words for words, _, _ in chosen)]),
        "instruction_id_list": [constraint for _, constraint, _ in chosen],
        "kwargs": [arguments for _, _, arguments in chosen],
    }


# Facts: what is told of each person, the questions for the value and for the person, and the values.

FACTS: Sequence[tuple[str, str, str, tuple[str, ...]]] = (
    (
        "{x} plays the {v}.",
        "Which instrument does {x} play?",
        "Who plays the {v}?",
        ("piano", "violin", "guitar", "flute", "trumpet", "cello", "harp"),
    ),
    (
        "{x} lives in {v}.",
        "In which city does {x} live?",
        "Who lives in {v}?",
        ("Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Lisbon"),
    ),
    (
        "{x} has a {v}.",
        "Which animal does {x} have?",
        "Who has a {v}?",
        ("dog", "cat", "horse", "rabbit", "parrot", "hamster", "goat"),
    ),
    (
        "{x} works as a {v}.",
        "What is the job of {x}?",
        "Who works as a {v}?",
        ("baker", "teacher", "doctor", "farmer", "pilot", "painter", "singer", "lawyer"),
    ),
    (
        "{x} drives a {v} car.",
        "What colour is the car of {x}?",
        "Who drives a {v} car?",
        ("red", "blue", "green", "black", "white", "yellow", "silver"),
    ),
    (
        "{x} arrives on {v}.",
        "On which day does {x} arrive?",
        "Who arrives on {v}?",
        ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    ),
    (
        "{x} likes {v}.",
        "Which food does {x} like?",
        "Who likes {v}?",
        ("pizza", "soup", "rice", "pasta", "salad", "cheese", "fish"),
    ),
)


def qa(rng: random.Random) -> Row:
    """The same fact about three people, perhaps a second one of each, and a question about one of them."""
    people = rng.sample(NAMES, 3)
    facts = rng.sample(FACTS, rng.randrange(1, 3))
    values = [rng.sample(known, 3) for *_, known in facts]
    told = [wording[0].format(x=x, v=value[place]) for place, x in enumerate(people) for wording, value in zip(facts, values, strict=True)]
    number, place = rng.randrange(len(facts)), rng.randrange(3)
    for_value, for_person = facts[number][1:3]
    asks_person = rng.random() < 0.5
    question = (for_person if asks_person else for_value).format(x=people[place], v=values[number][place])
    choices = people if asks_person else values[number]
    return {"prompt": f"{' '.join(told)} {question}", "choices": choices, "answer": choices[place]}


DOMAINS: Mapping[str, Callable[[random.Random], Row]] = {"mathematics": mathematics, "code": code, "instructions": instructions, "qa": qa}


def rows() -> dict[str, list[Row]]:
    """The rows of every file, by its name without the ending."""
    files: dict[str, list[Row]] = {}
    for domain, make in DOMAINS.items():
        rng = random.Random(f"multidomain smollm2 {domain}")
        seen: set[str] = set()
        for split, size in SIZES.items():
            lines = files[f"{domain}_{split}"] = []
            while len(lines) < size:
                row = make(rng)
                if row["prompt"] not in seen:
                    seen.add(row["prompt"])
                    lines.append(row)
    return files


def main() -> None:
    for name, lines in rows().items():
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
