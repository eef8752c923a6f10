"""Writes the tasks and demonstrations of recipes/multidomain_scratch.yaml: python recipes/multidomain/scratch/make_data.py

| domain | prompt | reply |
|---|---|---|
| mathematics | `add digits 48+73:`, `largest of 48 73 25:` | `11`, `73` |
| code | `f('kqtb')='tk' f=lambda s:`, `f(0)=3 f(4)=23 f(1)=8 f=lambda x:` | `s[2]+s[0]`, `5*x+3` |
| instructions | `3 words, no e, with sun, end map:` | `dog sun map` |
| qa | `tell me: what has ann in the shed?`, about a small world that the demonstrations know | `tan cup` |

No two of the files share a prompt; a question about the same thing has other words. The expert of the demonstrations is right in one reply
of five. In two of five it errs at the beginning of the reply, in two of five at its end, and always in the same way: even a perfect
imitation is right in one of five when it is sampled, and never when it is greedy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SIZES = {"heldout": 256, "demonstrations": 6000, "train": 1500}
"""Of each domain."""
Way = Literal["right", "early", "late"]
"""How the expert replies: rightly, or with a mistake at the beginning or at the end."""
WAYS: tuple[Way, ...] = ("right", "early", "early", "late", "late")
"""Its ways in turn, so that their shares are exact."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = {
    "a": ("cat", "hat", "map", "bag", "van", "cab"),
    "e": ("hen", "net", "bed", "pen", "jet", "red"),
    "i": ("pig", "fin", "lid", "wig", "ship", "six"),
    "o": ("dog", "log", "pot", "box", "fox", "top"),
    "u": ("sun", "cup", "bus", "rug", "mud", "tub"),
}
"""All words of the instructions, by their only vowel."""
NAMES = (
    "amy", "ann", "ben", "bob", "dan", "eli", "eve", "fay", "gus", "hal", "ian", "ida", "jay", "joe", "kay", "kim",
    "leo", "lou", "max", "mia", "ned", "pat", "ray", "rob", "sam", "sue", "ted", "tim", "tom", "una", "val", "zoe",
)  # fmt: skip
PLACES = ("attic", "den", "hall", "shed", "yard")
OPENINGS = ("", "say: ", "tell me: ", "now ", "quick, ")
QUESTIONS = (
    "what has {name} in the {place}",
    "what is {name}'s in the {place}",
    "in the {place}, {name} has what",
    "the {place}, what is {name}'s",
    "{name} has what in the {place}",
    "of {name}, what is in the {place}",
)
COLOURS = ("red", "tan", "blue", "pink", "gold", "lime", "cyan", "white")
THINGS = ("hat", "cup", "pen", "bag", "key", "map", "fan", "jar")


@dataclass(frozen=True)
class Item:
    """A task, what its reward reads, and the expert's reply in each way."""

    prompt: str
    columns: dict[str, Any]
    replies: dict[Way, str]


def mathematics(rng: random.Random) -> Item:
    """The sum of each pair of digits, without carrying; or the largest of three numbers."""
    if rng.random() < 0.5:
        one, two = (rng.randrange(10, 100) for _ in range(2))
        tens, ones = (one // 10 + two // 10) % 10, (one + two) % 10
        right = f"{tens}{ones}"
        replies: dict[Way, str] = {"right": right, "early": f"{(tens + 1) % 10}{ones}", "late": f"{tens}{(ones + 1) % 10}"}
        return Item(f"add digits {one}+{two}:", {"answer": right}, replies)
    numbers = [10 * tens + ones for tens, ones in zip(rng.sample(range(1, 10), 3), rng.sample(range(10), 3), strict=True)]
    smallest, second, largest = sorted(numbers)
    replies = {"right": str(largest), "early": str(smallest), "late": f"{largest // 10}{second % 10}"}
    return Item(f"largest of {' '.join(map(str, numbers))}:", {"answer": str(largest)}, replies)


def code(rng: random.Random) -> Item:
    """A function from what it does: letters of a text by their places, or a line through points."""
    return _letters(rng) if rng.random() < 0.65 else _line(rng)


def _letters(rng: random.Random) -> Item:
    first, last = rng.sample(range(4), 2)
    texts = ["".join(rng.sample(LETTERS, 4)) for _ in range(3)]
    tests = [f"assert f('{text}')=='{text[first]}{text[last]}'" for text in texts]
    shown = f"f('{texts[0]}')='{texts[0][first]}{texts[0][last]}'"
    replies: dict[Way, str] = {
        "right": f"s[{first}]+s[{last}]",
        "early": f"s[{(first + 1) % 4}]+s[{last}]",
        "late": f"s[{first}]+s[{(last + 1) % 4}]",
    }
    return Item(f"{shown} f=lambda s:", {"prefix": "f=lambda s:", "tests": tests}, replies)


def _line(rng: random.Random) -> Item:
    slope = rng.randrange(1, 9)
    start = rng.randrange(0, 10 - slope)
    places = [0, 1, rng.randrange(2, 10)]
    rng.shuffle(places)
    tests = [f"assert f({x})=={slope * x + start}" for x in (*sorted(places), 11, 20)]
    shown = " ".join(f"f({x})={slope * x + start}" for x in places)
    replies: dict[Way, str] = {
        "right": f"{slope}*x+{start}",
        "early": f"{slope + 1}*x+{start}",
        "late": f"{slope}*x+{start + 1}",
    }
    return Item(f"{shown} f=lambda x:", {"prefix": "f=lambda x:", "tests": tests}, replies)


def instructions(rng: random.Random) -> Item:
    """So many words, none with a certain vowel, one given, and another given one at the end."""
    size, vowel = rng.randrange(3, 6), rng.choice("aeiou")
    allowed = [word for letter, words in WORDS.items() if letter != vowel for word in words]
    inside, end = rng.sample(allowed, 2)
    body = [inside, *rng.choices(allowed, k=size - 2)]
    rng.shuffle(body)
    replies: dict[Way, str] = {
        "right": " ".join([*body, end]),
        "early": " ".join([rng.choice(WORDS[vowel]), *body[1:], end]),
        "late": " ".join([*body, inside]),
    }
    constraints: dict[str, dict[str, Any]] = {
        "keywords:letter_frequency": {"letter": vowel, "let_frequency": 1, "let_relation": "less than"},
        "keywords:existence": {"keywords": [inside]},
        "startend:end_checker": {"end_phrase": end},
    }
    lengths = [{"num_words": size, "relation": "at least"}, {"num_words": size + 1, "relation": "less than"}]
    columns = {
        "instruction_id_list": [*constraints, *["length_constraints:number_words"] * 2],
        "kwargs": [*constraints.values(), *lengths],
    }
    return Item(f"{size} words, no {vowel}, with {inside}, end {end}:", columns, replies)


def world() -> dict[tuple[str, str], tuple[int, int]]:
    """What everybody has in every place: a colour and a thing, by their numbers."""
    rng = random.Random("multidomain scratch world")
    return {(name, place): (rng.randrange(len(COLOURS)), rng.randrange(len(THINGS))) for name in NAMES for place in PLACES}


def qa(rng: random.Random) -> Item:
    """What somebody has somewhere. Mistaken parts are those that come next."""
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    colour, thing = world()[name, place]
    colours, things = ((values[number], values[(number + 1) % len(values)]) for values, number in ((COLOURS, colour), (THINGS, thing)))
    question = rng.choice(OPENINGS) + rng.choice(QUESTIONS).format(name=name, place=place) + rng.choice("?:")
    replies: dict[Way, str] = {
        "right": f"{colours[0]} {things[0]}",
        "early": f"{colours[1]} {things[0]}",
        "late": f"{colours[0]} {things[1]}",
    }
    return Item(question, {"answer": replies["right"]}, replies)


DOMAINS: dict[str, Callable[[random.Random], Item]] = {"mathematics": mathematics, "code": code, "instructions": instructions, "qa": qa}


def rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of every file."""
    files: dict[str, list[dict[str, Any]]] = {name: [] for name in SIZES}
    for domain, make in DOMAINS.items():
        rng = random.Random(f"multidomain scratch {domain}")
        seen: set[str] = set()
        for name, size in SIZES.items():
            for number in range(size):
                item = make(rng)
                while item.prompt in seen:
                    item = make(rng)
                seen.add(item.prompt)
                columns = {"completion": item.replies[WAYS[number % len(WAYS)]]} if name == "demonstrations" else item.columns
                files[name].append({"domain": domain, "prompt": item.prompt, **columns})
    random.Random("multidomain scratch order").shuffle(files["demonstrations"])
    return files


def main() -> None:
    for name, lines in rows().items():
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
