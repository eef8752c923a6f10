"""What a word is, for every constraint that counts or looks for words."""

from __future__ import annotations

import re
import unicodedata

# Thai to Myanmar, Khmer, Japanese and Chinese put no space between words; Korean attaches particles to them.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_LETTER = rf"[^\W_{_UNSPACED}]"
_INSIDE_WORD = re.compile(rf"(?<={_LETTER}){_LETTER}")
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def find_word(text: str, word: str) -> list[int]:
    """Where a word or phrase begins in a text, in any case, as a whole word: `war` is not in "warm" and not in "award".

    Letters of scripts that put no space between words may stand beside it.
    """
    spaced = r"\s+".join(re.escape(part) for part in composed(word).split())
    found = re.finditer(spaced, composed(text), re.IGNORECASE)
    return [match.start() for match in found if not any(_INSIDE_WORD.match(match.string, place) for place in match.span())]


def count_words(text: str) -> int:
    """How many words a text has: stretches between spaces that hold a letter or digit. Chinese and Japanese characters count one each."""
    spaced = _IDEOGRAPH.sub(" ", text)
    return sum(map(has_words, spaced.split())) + len(_IDEOGRAPH.findall(text))


def has_words(text: str) -> bool:
    """Whether there is a letter or digit in it."""
    return any(map(str.isalnum, text))


def plain(text: str) -> str:
    """The text in one case and with single spaces, for comparisons."""
    return " ".join(composed(text).casefold().split())


def composed(text: str) -> str:
    """One spelling for letters with accents, whichever way they are encoded."""
    return unicodedata.normalize("NFC", text)
