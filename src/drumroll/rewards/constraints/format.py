"""`detectable_format:` and `detectable_content:`: what markup, marks and fixed phrases the reply holds."""

from __future__ import annotations

import json
import re
from typing import Any

from drumroll.rewards.constraints.parameters import Count, Text
from drumroll.rewards.constraints.words import has_words

# None of these goes over the same text again and again, however odd the reply: possessive where two parts could share a stretch.
_BULLET = re.compile(r"^[ \t]*+[*+-][ \t]++.*[^\s*+-]", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?=[^\s*])[^*\n]*[^\s*]\1(?!\*)")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]++)\]")
_TITLE = re.compile(r"<<([^<>\n]++)>>")
_FENCE = re.compile(r"```\w*+[ \t]*+\n?+(.*)```", re.DOTALL)

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""What `constrained_response` lets one choose from."""


def number_bullet_lists(reply: str, *, num_bullets: Count) -> bool:
    """Exactly so many bullet points: lines that begin with `*`, `-` or `+` and a space."""
    return len(_BULLET.findall(reply)) == num_bullets


def number_highlighted_sections(reply: str, *, num_highlights: Count) -> bool:
    """At least so many stretches of a line between asterisks: `*so*`, `**so**` or `***so***`."""
    return len(_HIGHLIGHT.findall(reply)) >= num_highlights


def multiple_sections(reply: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """At least so many sections, each with some text, that begin with the mark and a number of their own: `SECTION 1`, `SECTION 2`.

    The case of the mark does not matter.
    """
    mark = r"\s+".join(map(re.escape, section_spliter.split()))
    _, *marked = re.split(rf"(?<!\w){mark}\s?(\d{{1,4}})(?!\d)", reply, flags=re.IGNORECASE)
    return len({int(number) for number, text in zip(marked[::2], marked[1::2], strict=True) if has_words(text)}) >= num_sections


def title(reply: str) -> bool:
    """There is a title in double angular brackets: `<<title>>`."""
    return any(map(has_words, _TITLE.findall(reply)))


def json_format(reply: str) -> bool:
    """The whole reply is one JSON object or array; a fence of three backticks around it is allowed."""
    text = reply.strip()
    fence = _FENCE.fullmatch(text)
    try:
        value = json.loads(fence[1] if fence else text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


def constrained_response(reply: str) -> bool:
    """Exactly one of the three `ANSWERS` is there, word for word."""
    return sum(answer in reply for answer in ANSWERS) == 1


def number_placeholders(reply: str, *, num_placeholders: Count) -> bool:
    """At least so many placeholders in square brackets: `[name]`."""
    return sum(map(has_words, _PLACEHOLDER.findall(reply))) >= num_placeholders


def postscript(reply: str, *, postscript_marker: Text) -> bool:
    """There is a postscript: the mark, such as `P.S.`, in any case, with some text after it. `P.P.S.` is no `P.S.`."""
    mark = r"\.\s?".join(map(re.escape, postscript_marker.strip().split(".")))
    found = re.search(rf"(?<![\w.]){mark}(?!(?<=\w)\w)", reply, re.IGNORECASE)
    return found is not None and has_words(reply[found.end() :])


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
