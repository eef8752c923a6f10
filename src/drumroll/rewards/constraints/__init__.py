"""Constraints on a reply that a program can check: the 25 kinds of IFEval (arXiv 2311.07911), by its ids.

A constraint is a plain function of the reply, whose keyword-only arguments are the constraint's `kwargs`. `check` asks one by its id:

    check("No comma here.", "punctuation:no_comma")                                                   # True
    check("Three words here.", "length_constraints:number_words", {"relation": "less than", "num_words": 3})   # False
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError, create_model

from drumroll.registry import Options, nearest
from drumroll.rewards.constraints import format, keywords, language, length, whole

CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": keywords.existence,
    "keywords:frequency": keywords.frequency,
    "keywords:forbidden_words": keywords.forbidden_words,
    "keywords:letter_frequency": keywords.letter_frequency,
    "language:response_language": language.response_language,
    "length_constraints:number_sentences": length.number_sentences,
    "length_constraints:number_paragraphs": length.number_paragraphs,
    "length_constraints:number_words": length.number_words,
    "length_constraints:nth_paragraph_first_word": length.nth_paragraph_first_word,
    "detectable_content:number_placeholders": format.number_placeholders,
    "detectable_content:postscript": format.postscript,
    "detectable_format:number_bullet_lists": format.number_bullet_lists,
    "detectable_format:constrained_response": format.constrained_response,
    "detectable_format:number_highlighted_sections": format.number_highlighted_sections,
    "detectable_format:multiple_sections": format.multiple_sections,
    "detectable_format:json_format": format.json_format,
    "detectable_format:title": format.title,
    "combination:two_responses": whole.two_responses,
    "combination:repeat_prompt": whole.repeat_prompt,
    "startend:end_checker": whole.end_checker,
    "startend:quotation": whole.quotation,
    "change_case:capital_word_frequency": whole.capital_word_frequency,
    "change_case:english_capital": whole.english_capital,
    "change_case:english_lowercase": whole.english_lowercase,
    "punctuation:no_comma": whole.no_comma,
}


def check(reply: str, constraint_id: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a reply satisfies a constraint. A blank reply satisfies none. A `ValueError` when id and kwargs make no constraint."""
    arguments = parse(constraint_id, kwargs or {})
    return bool(reply.strip()) and CONSTRAINTS[constraint_id](reply, **arguments)


def parse(constraint_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constraint, checked; those that are None count as absent. A `ValueError` names the id and what is wrong."""
    if constraint_id not in CONSTRAINTS:
        raise ValueError(f"no constraint '{constraint_id}'.{nearest(constraint_id, CONSTRAINTS)} Known: {', '.join(CONSTRAINTS)}.")
    schema = _schema(constraint_id)
    try:
        return dict(schema(**{name: value for name, value in kwargs.items() if value is not None}))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        expected = ", ".join(schema.model_fields) or "none"
        raise ValueError(f"constraint '{constraint_id}' cannot be used with its kwargs: {problems}. Expected: {expected}.") from error


@cache
def _schema(constraint_id: str) -> type[BaseModel]:
    """The keyword-only arguments of the constraint's function, as a model that checks them."""
    hints = get_type_hints(CONSTRAINTS[constraint_id], include_extras=True)
    arguments = {name: (kind, ...) for name, kind in hints.items() if name not in ("reply", "return")}
    return create_model(constraint_id, __base__=Options, **arguments)  # type: ignore[call-overload, no-any-return]
