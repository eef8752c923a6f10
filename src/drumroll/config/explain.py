"""What the user is told when a config is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from drumroll.config.models import PIPELINES, RunConfig
from drumroll.config.sections import child, field_at, keys_below, section_of
from drumroll.config.synonyms import SYNONYMS
from drumroll.registry import nearest


def explain(error: ValidationError, model: type[RunConfig], tree: Mapping[str, Any]) -> str:
    """Every problem on a line of its own: dotted key, what was got, what is accepted, the nearest known name."""
    taken: dict[str, list[str]] = {}
    untaken: dict[str, list[str]] = {}
    strangers: dict[tuple[str, ...], list[str]] = {}
    for problem in error.errors(include_url=False):
        keys = _keys_of(problem["loc"], tree)
        text = _explain_one(problem, keys, model, tree)
        of_branch = untaken if _untaken_branch(problem["loc"], problem["input"]) else taken
        texts = of_branch.setdefault(".".join(keys), [])
        texts.append(text)
        if problem["type"] == "extra_forbidden":
            strangers[tuple(keys[:-1])] = texts
    for section, texts in strangers.items():  # once, behind the last unknown key of a section
        known = section_of(*field_at(model, section, tree))
        texts[-1] += f" Known here: {', '.join(known.model_fields)}." if known is not None else ""
    # a union complains once for each branch: keep the branch that the value was meant for, if there is one
    merged = taken | {dotted: texts for dotted, texts in untaken.items() if not any(key.startswith(dotted) for key in taken)}
    return "\n".join(f"`{dotted}`: {text}" if dotted else text for dotted, texts in merged.items() for text in dict.fromkeys(texts))


def _explain_one(problem: Any, keys: list[str], model: type[RunConfig], tree: Mapping[str, Any]) -> str:
    message = str(problem["msg"])
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown key.{_hint(keys, model, tree)}"
        case "missing":
            return "is required and missing."
        case "unknown_kind" | "kind_missing":
            keys.append("kind")
            return message
        case "value_error":
            return message.removeprefix("Value error, ") + "."
    got = problem["input"]
    return f"got {shown(got)}, expected {_expected(problem, *field_at(model, keys, tree))}"


def _expected(problem: Any, annotation: Any, node: Any) -> str:
    """What is accepted, with an example of what may have been meant."""
    got, kind = problem["input"], problem["type"]
    if kind in ("tuple_type", "list_type"):
        return f"a list{_such_as([got], annotation)}."
    if kind == "dict_type":
        return "a mapping."
    section = section_of(annotation, node) if kind == "model_type" else None
    if section is not None:
        names = list(section.model_fields)
        example = "" if got is None or isinstance(got, bool) else _such_as({names[0]: got}, annotation)
        return f"a section{example}. Its keys: {', '.join(names)}."
    expected = str(problem["msg"]).removeprefix("Input should be ").removesuffix(".")
    choices = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
    return f"{expected}.{nearest(got, choices) if kind == 'literal_error' and isinstance(got, str) else ''}"


def _such_as(example: Any, annotation: Any) -> str:
    """The example, where the field would accept it."""
    try:
        TypeAdapter(annotation).validate_python(example)
        return f", such as `{yaml.safe_dump(example, default_flow_style=True, width=1000, sort_keys=False).strip()}`"
    except (ValidationError, yaml.YAMLError):
        return ""


def _hint(keys: Sequence[str], model: type[RunConfig], tree: Mapping[str, Any]) -> str:
    """Where a key that its section does not know is known: in another pipeline, elsewhere, under another name."""
    *section, key = keys
    pipelines = [name for name, other in PIPELINES.items() if not section and key in other.model_fields]
    belongs = f" It belongs to `pipeline: {pipelines[0]}`." if pipelines else ""
    places = _places(key, section, model, tree)
    if places:
        *others, last = (f"`{place}`" for place in places)
        return f"{belongs} Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    own = section_of(*field_at(model, section, tree))
    return belongs or nearest(key, own.model_fields if own is not None else ())


def _places(key: str, section: Sequence[str], model: type[RunConfig], tree: Mapping[str, Any]) -> list[str]:
    """Dotted keys with that name, or with what it may stand for: of those that are nearest to the section, the three least deep."""
    known = list(keys_below(model, tree, ""))
    meant = (*SYNONYMS.get(key.lower(), ()), key)
    found = dict.fromkeys(place for ending in meant for place in known if f".{place}".endswith(f".{ending}"))
    shared = {place: _num_shared(place.split("."), section) for place in found}
    near = [place for place in found if shared[place] == max(shared.values())]
    return sorted([place for place in near if "<" not in place] or near, key=lambda place: place.count("."))[:3]


def _num_shared(left: Sequence[str], right: Sequence[str]) -> int:
    """How many keys two ways have in common before they part."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _keys_of(loc: Sequence[int | str], tree: Any) -> list[str]:
    """The keys on the way to a problem, without the branches of unions that pydantic names in between."""
    keys: list[str] = []
    for part in loc:
        is_key = part in tree if isinstance(tree, dict) else isinstance(part, int)
        if is_key or not _is_union_tag(part):
            keys.append(str(part))
            tree = child(tree, str(part))
    return keys


def _is_union_tag(part: int | str) -> bool:
    """Pydantic marks the branches of a union in the location: `literal['auto']`, `dict[...]`, `str`, a class name."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int") or (part[:1].isupper() and part.isidentifier()))


def _untaken_branch(loc: Sequence[int | str], value: Any) -> bool:
    """Whether the problem is of a union's branch that the value was clearly not meant for."""
    tag = next((str(part) for part in reversed(loc) if _is_union_tag(part)), "")
    meant = {"literal[": str, "dict[": dict, "str": str, "int": int, "tuple[": list | tuple}
    for prefix, kind in meant.items():
        if tag.startswith(prefix) and loc[-1] == tag:
            return not isinstance(value, kind)
    return bool(tag[:1].isupper()) and loc[-1] == tag and not isinstance(value, dict)


def shown(value: Any) -> str:
    """A value as an error message shows it, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})" if value is not None else "nothing"
