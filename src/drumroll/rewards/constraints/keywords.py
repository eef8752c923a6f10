"""`keywords:`: which words and letters stand in the reply. Case does not matter; words count as whole words."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from drumroll.rewards.constraints.parameters import Character, Count, Relation, Text, compare
from drumroll.rewards.constraints.words import find_word

Words = Annotated[list[Text], Field(min_length=1)]


def existence(reply: str, *, keywords: Words) -> bool:
    """Every keyword is there."""
    return all(find_word(reply, keyword) for keyword in keywords)


def frequency(reply: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """The keyword is there at least, or less than, so many times."""
    return compare(len(find_word(reply, keyword)), relation, frequency)


def forbidden_words(reply: str, *, forbidden_words: Words) -> bool:
    """None of the words is there."""
    return not any(find_word(reply, word) for word in forbidden_words)


def letter_frequency(reply: str, *, letter: Character, let_frequency: Count, let_relation: Relation) -> bool:
    """The letter, or another character such as `#`, is there at least, or less than, so many times."""
    return compare(reply.casefold().count(letter.casefold()), let_relation, let_frequency)
