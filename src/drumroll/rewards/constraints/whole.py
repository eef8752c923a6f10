"""`combination:`, `startend:`, `change_case:` and `punctuation:`: what holds for the reply from its first character to its last."""

from __future__ import annotations

import re

from drumroll.rewards.constraints.length import split_parts
from drumroll.rewards.constraints.parameters import Count, Relation, Text, compare
from drumroll.rewards.constraints.words import has_words, plain

_SIX_ASTERISKS = re.compile(r"\*{6,}")
_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_QUOTES = '"“”'
_COMMAS = frozenset(",，﹐،、﹑､")


def two_responses(reply: str) -> bool:
    """Two responses that differ by more than case and punctuation, with six asterisks (`******`), or more, between them."""
    responses = [_WORD.findall(plain(part)) for part in split_parts(reply, _SIX_ASTERISKS)]
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def repeat_prompt(reply: str, *, prompt_to_repeat: Text) -> bool:
    """The reply begins with the prompt, and goes on. Case and the kind of space do not matter."""
    spoken, prompt = plain(reply), plain(prompt_to_repeat)
    return spoken.startswith(prompt) and has_words(spoken.removeprefix(prompt))


def end_checker(reply: str, *, end_phrase: Text) -> bool:
    """The reply ends with the phrase. Case, the kind of space, and quotation marks after it do not matter."""
    spoken, phrase = (plain(text).rstrip(_QUOTES + " ") for text in (reply, end_phrase))
    return re.search(rf"(?!(?<=\w)\w){re.escape(phrase)}\Z", spoken) is not None


def quotation(reply: str) -> bool:
    """The whole reply stands between double quotation marks, straight or curly."""
    text = reply.strip()
    return text[:1] in _QUOTES and text[-1:] in _QUOTES and has_words(text)


def capital_word_frequency(reply: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """At least, or less than, so many words in capitals. "I" is one, and so is "WELL-KNOWN"."""
    return compare(sum(map(str.isupper, _WORD.findall(reply))), capital_relation, capital_frequency)


def english_capital(reply: str) -> bool:
    """No small letter, and at least one capital. Only the case is checked, not whether it is English: a short reply, or one in capitals,
    is easily taken for another language."""
    return reply.isupper()


def english_lowercase(reply: str) -> bool:
    """No capital, and at least one small letter. Only the case is checked, not whether it is English."""
    return reply.islower()


def no_comma(reply: str) -> bool:
    """No comma of any script, also none in numbers."""
    return _COMMAS.isdisjoint(reply)
