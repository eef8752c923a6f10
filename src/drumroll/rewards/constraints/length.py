"""`length_constraints:`: how many sentences, paragraphs and words the reply has."""

from __future__ import annotations

import re
from itertools import groupby

from drumroll.rewards.constraints.parameters import Count, Relation, Text, compare
from drumroll.rewards.constraints.sentences import split_sentences
from drumroll.rewards.constraints.words import composed, count_words, find_word, has_words

_THREE_ASTERISKS = re.compile(r"(?<!\S)\*\*\*(?!\S)")


def number_sentences(reply: str, *, num_sentences: Count, relation: Relation) -> bool:
    """At least, or less than, so many sentences; `sentences` says what ends one."""
    return compare(len(split_sentences(reply)), relation, num_sentences)


def number_words(reply: str, *, num_words: Count, relation: Relation) -> bool:
    """At least, or less than, so many words."""
    return compare(count_words(reply), relation, num_words)


def number_paragraphs(reply: str, *, num_paragraphs: Count) -> bool:
    """Exactly so many paragraphs, with three asterisks that stand alone (`***`) between them."""
    paragraphs = split_parts(reply, _THREE_ASTERISKS)
    return len(paragraphs) == num_paragraphs and all(paragraphs)


def nth_paragraph_first_word(reply: str, *, num_paragraphs: Count, nth_paragraph: Count, first_word: Text) -> bool:
    """Exactly so many paragraphs, with blank lines between them; the nth, from 1, starts with the word.

    Quotes and markup before the word, and its case, do not matter.
    """
    lines = composed(reply).splitlines()
    paragraphs = ["\n".join(block) for has_text, block in groupby(lines, lambda line: bool(line.strip())) if has_text]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    paragraph = paragraphs[nth_paragraph - 1]
    places = find_word(paragraph, first_word)
    return bool(places) and not has_words(paragraph[: places[0]])


def split_parts(reply: str, divider: re.Pattern[str]) -> list[str]:
    """What stands between dividers. One divider before the first part and one after the last are allowed."""
    parts = [part.strip() for part in divider.split(reply)]
    return parts[not parts[0] : len(parts) - (not parts[-1])]
