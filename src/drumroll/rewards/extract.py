r"""Finding the answer in a reply, and the reference in a column.

What a reasoning model thinks is not its answer: whatever stands before the last `</think>`, or after a `<think>` that never
ends, is left out of every search. The ways to look for the answer in the rest:

| way | the answer is |
|---|---|
| `reply` | all of it, as it stands |
| `last_line` | the last line that is not empty |
| `boxed` | inside the last `\boxed{…}` |
| `tag:answer` | inside the last `<answer>…</answer>`, or any other tag; to the end of the reply where a stop string has cut it |
| `hash` | on the line of the last `####`, behind it |
| `last_number` | the last number |
| `regex:Answer: (\w+)` | the group of the last match of a regular expression of Python's `re` that has exactly one group |

Only `reply` keeps the space around what it finds.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_PLAIN = ("reply", "last_line", "boxed", "hash", "last_number")
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

# Signs and digits of other keyboards, one for one, so that places in the text stay where they are.
_KEYBOARD = str.maketrans("０１２３４５６７８９．，％－−–", "0123456789.,%---")

# The parts are possessive (`++`, `?+`): no text makes the search go back over what it has read.
_NUMBER = re.compile(
    r"""
    (?<![0-9A-Za-z_^]) (?<![_^]\{) (?<!\^[-+]) (?<!\^\{[-+])       # not inside a name, not an index, not a power
    (?P<sign> (?<![0-9A-Za-z_)\]}%])[-+] )?+
    (?: \\?[$€£¥₹₽₩₺] [ ]? )?+
    (?P<inner_sign> (?<![0-9A-Za-z_)\]}%+-])[-+] )?+
    (?:
        (?: (?P<whole>[0-9]++) (?: [ ]?(?=\\) | [ ](?=[0-9]) ) )?  # 2 3/4
        (?:
            \\[dt]?frac \{ (?P<top>[-+]?[0-9]++) \} \{ (?P<bottom>[0-9]++) \}
          | (?P<over>[0-9]++) [ ]?/[ ]? (?P<under>[0-9]++) (?![.,][0-9] | [ ]?/)
        )
      |
        (?: (?P<integer> [0-9]{1,3} (?: (?: \{,\} | ,\\! | , | \\, | [\u00a0\u2009\u202f_] ) [0-9]{3} )++ (?![0-9]) | [0-9]++ )
            (?: \. (?P<decimals>[0-9]++) )?+
          | (?<![0-9.]) \. (?P<only_decimals>[0-9]++)
        )
        (?: [eE] (?P<e>[-+]?[0-9]++) (?![A-Za-z])
          | [ ]? (?: × | x | \* | \\times | \\cdot ) [ ]? 10 [ ]? (?: \^ | \*\* ) [ ]? \{? (?P<power>[-+]?[0-9]++) \}?
        )?+
    )
    (?! \^\{?[-+0-9A-Za-z] )                                       # a base is not the number, but 90^\circ is
    (?: \s?
        (?: (?P<percent> \\?% | (?i:percent|per[ ]cent|pct)\b ) | (?P<scale> (?i:dozen|hundred|thousand|million|billion|trillion)\b ) )
    )?+
    """,
    re.VERBOSE,
)


def extract(text: str, how: str) -> str | None:
    r"""The answer in a reply, or None where there is none: `extract(r"so \boxed{\frac{1}{2}}.", "boxed")` is `\frac{1}{2}`."""
    text = after_thinking(text)
    kind, _, detail = check_extraction(how).partition(":")
    match kind:
        case "reply":
            return text
        case "last_line":
            found = text.rstrip().rpartition("\n")[2]
        case "boxed":
            found = _last_box(text)
        case "tag":
            found = _last_tag(text, detail)
        case "hash":
            found = text.rpartition("####")[2].partition("\n")[0] if "####" in text else ""
        case "last_number":
            found = next((match[0] for match in reversed(find_numbers(text))), "")
        case _:
            found = next((match[1] or "" for match in reversed(list(re.finditer(detail, text)))), "")
    return found.strip() or None


def check_extraction(how: str) -> str:
    """The way itself, where there is such a way; else a ValueError that names those there are."""
    kind, colon, detail = how.partition(":")
    if kind == "regex" and colon:
        if re.compile(check_pattern(detail)).groups != 1:
            raise ValueError(f"'{how}' has {re.compile(detail).groups} groups: put exactly one pair of ( ) around the answer.")
    elif not (how in _PLAIN or (kind == "tag" and _TAG_NAME.fullmatch(detail))):
        raise ValueError(f"no way to find an answer is called '{how}'. Known: {', '.join(_PLAIN)}, tag:NAME, regex:PATTERN.")
    return how


def check_pattern(pattern: str) -> str:
    """The pattern itself, where it is a regular expression; else a ValueError that says why not."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"'{pattern}' is no regular expression: {error}.") from error
    return pattern


def check_tag(name: str) -> str:
    """The name itself, where a tag can have it; else a ValueError."""
    if not _TAG_NAME.fullmatch(name):
        raise ValueError(f"'{name}' is no name for a tag: write it without brackets, such as 'answer'.")
    return name


Extraction = Annotated[str, AfterValidator(check_extraction)]
"""Type of an option that says where in a reply the answer stands."""

Pattern = Annotated[str, AfterValidator(check_pattern)]
"""Type of an option that is a regular expression."""

TagName = Annotated[str, AfterValidator(check_tag)]
"""Type of an option that names a tag."""


def after_thinking(text: str) -> str:
    """The reply without the thoughts before it: `after_thinking("<think>6*7</think>42")` is `42`."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def find_numbers(text: str) -> list[re.Match[str]]:
    """Every number of a text as a match; digits and signs of other keyboards appear in it as ASCII."""
    return list(_NUMBER.finditer(text.translate(_KEYBOARD)))


def match_number(text: str) -> re.Match[str] | None:
    """The match of a text that is one number and nothing else."""
    return _NUMBER.fullmatch(text.translate(_KEYBOARD))


def reference_text(value: object) -> str:
    r"""The answer in a dataset's column: behind GSM8K's `####`, inside a `\boxed{…}`, or all of it."""
    text = str(value)
    return extract(text, "hash") or extract(text, "boxed") or text.strip()


def _last_box(text: str) -> str:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return ""
    start, depth = boxes[-1].end(), 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # \{ and \} are text
        if depth == 0:
            return text[start : brace.start()]
    return ""


def _last_tag(text: str, name: str) -> str:
    _, opening, inside = text.rpartition(f"<{name}>")
    return inside.partition(f"</{name}>")[0] if opening else ""
