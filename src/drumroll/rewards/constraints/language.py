"""`language:`: which language the reply is in."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator

from drumroll.registry import nearest, require


@cache
def _identifier() -> Any:
    require("py3langid", extra="instructions")
    from py3langid import langid

    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)
    # Codes of three letters are left out: dialects and small neighbours, which replies in the large languages are taken for.
    identifier.set_languages([code for code in identifier.labels if len(code) == 2])
    return identifier


def _known(code: str) -> str:
    known = sorted(_identifier().labels)
    if code not in known:
        raise ValueError(f"no language with the code '{code}'.{nearest(code, known)} Known: {', '.join(known)}")
    return code


Language = Annotated[str, AfterValidator(_known)]
"""Two letters of ISO 639-1, for example `de`."""


def response_language(reply: str, *, language: Language) -> bool:
    """The reply is most likely in this language, as a whole: single words of others do not matter.

    The verdict is the same for the same reply, always. A reply without letters is in no language. The shorter a reply is, the less
    reliable is its verdict; a few words are enough where the script tells.
    """
    return any(map(str.isalpha, reply)) and _identifier().classify(reply)[0] == language
