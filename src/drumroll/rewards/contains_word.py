"""The reply must contain a word."""

from __future__ import annotations

import re

from drumroll.registry import register
from drumroll.types import Trajectory


@register.reward("contains_word")
def contains_word(trajectory: Trajectory, *, word: str) -> float:
    """1.0 when the word stands in the last reply as a whole word, in any case, else 0.0.

    Options:
        word: The word to look for.
    """
    # Not \b: it would never match beside a word that itself begins or ends with punctuation, such as "C++".
    return float(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", trajectory.last_reply, re.IGNORECASE) is not None)
