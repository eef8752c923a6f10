"""Where sentences end.

A sentence ends at `.`, `!`, `?` or `…` before a space or the end of the text, closing quotes and brackets included, and at the full
stops of scripts that need no space after them (`。`, `।`, …). Line breaks end no sentence, so a title belongs to the sentence after it.
What has no letter or digit is no sentence. These do not end one:

- a point without a space after it: `3.14`, `example.com`
- a point after a title or a Latin short form (`Mr.`, `e.g.`), an initial (`J. Smith`) or capitals with points (`U.S.`, `P.S.`)
- a point after a short form that can end a sentence (`etc.`, `p.m.`), or an ellipsis, before a small letter
- a point after `No.`, `Fig.`, `Jan.` and the like before a number
- the label of a list: `1.` or `a.` at the beginning of a line
- a mark inside quotes before a small letter: `"Stop!" he said`
"""

from __future__ import annotations

import re

from drumroll.rewards.constraints.words import has_words

_NEVER = re.compile(
    r"mr|mrs|ms|mx|messrs|mme|dr|prof|st|gen|col|capt|lt|sgt|sen|rep|gov|hon|rev|vs|cf|viz|e\.g|i\.e|eg|ie|al|approx", re.IGNORECASE
)
_BEFORE_SMALL = re.compile(r"etc|inc|ltd|co|corp|jr|sr|dept|est|a\.m|p\.m|ph\.d", re.IGNORECASE)
_BEFORE_NUMBER = re.compile(r"nos?|nr|vol|figs?|eq|ch|sec|art|pp?|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec", re.IGNORECASE)
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_OPENING = "\"'“‘«([{<*_#"
_MARK = re.compile(
    rf"""(?<![.!?…])(?P<mark>[.!?…]++)(?P<close>["'”’»)\]}}*_]*+)(?=\Z|\s[\s{re.escape(_OPENING)}]*+(?P<after>.?))"""
    r"""|[。．！？｡।॥؟۔።]++["'”’»」』）)\]]*+""",
    re.DOTALL,
)
_LABEL = re.compile(r"[ \t>#*_-]*(?:\d{1,3}|[^\W\d_])")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without the space around them.

    Example: `split_sentences("Dr. Li paid 3.50. Why?")` is `["Dr. Li paid 3.50.", "Why?"]`.
    """
    text = text.strip()
    stretches: list[str] = []
    start = 0
    for mark in _MARK.finditer(text):
        if _ends_sentence(text, mark):
            stretches.append(text[start : mark.end()].strip())
            start = mark.end()
    stretches.append(text[start:].strip())
    return [stretch for stretch in stretches if has_words(stretch)]


def _ends_sentence(text: str, mark: re.Match[str]) -> bool:
    if mark["mark"] is None or mark.end() == len(text):
        return True
    after = mark["after"]
    if mark["mark"] == "." and _is_short_form(text, mark.start(), after):
        return False
    is_ellipsis = mark["mark"] != "." and not mark["mark"].strip(".…")
    in_quotes = any(quote in mark["close"] for quote in "\"'”’»")
    return not (after.islower() and (in_quotes or is_ellipsis))


def _is_short_form(text: str, point: int, after: str) -> bool:
    before = text[max(0, point - 40) : point]
    line = before.rpartition("\n")[2]
    if len(line) < 40 and _LABEL.fullmatch(line):
        return True
    word = (line.split() or [""])[-1].lstrip(_OPENING)
    if _BEFORE_NUMBER.fullmatch(word) and after.isdecimal():
        return True
    if _BEFORE_SMALL.fullmatch(word) and after.islower():
        return True
    is_initial = word.isupper() and word != "I" and _INITIALS.fullmatch(word)
    return bool(is_initial or _NEVER.fullmatch(word))
