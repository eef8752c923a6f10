"""The reference of all config keys, as Markdown, from the docstrings under the fields: `python -m drumroll.config.reference`."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drumroll.config.models import PIPELINES, DeviceRequest, RunConfig
from drumroll.config.sections import annotation_of, forms
from drumroll.registry import REGISTRY

HEAD = """# Config reference

Every key, with its type, its default and what it does. Files merge left to right, then come overrides such as
`trainer.lr=3e-4`. Unknown keys are errors. This page is written by `make docs`.
"""

HOLDERS = {"": "section", "<n>.": "list of sections", "<name>.": "mapping of sections"}

Row = tuple[str, ...]
"""The cells of a table's row: key, type, default, what it does."""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    parts += ["## Every pipeline\n", *_table(RunConfig, skip=())]
    for name, model in PIPELINES.items():
        parts += [f"\n## `pipeline: {name}`\n", inspect.getdoc(model) or "", "", *_table(model, skip=tuple(RunConfig.model_fields))]
    return "\n".join(parts) + "\n"


def _table(model: type[BaseModel], skip: tuple[str, ...]) -> Iterator[str]:
    yield "| key | type | default | what it does |"
    yield "|---|---|---|---|"
    for cells in _rows(model, "", skip):
        yield f"| {' | '.join(_cell(text) for text in cells)} |"


def _rows(model: type[BaseModel], prefix: str, skip: tuple[str, ...] = ()) -> Iterator[Row]:
    for name, info in model.model_fields.items():
        if name in skip or (prefix and name == "kind"):
            continue
        key = f"{prefix}{name}"
        family, section, step = _inside(annotation_of(info))
        if section is None:
            yield f"`{key}`", _type(info.annotation), _default(info), info.description or ""
            continue
        yield f"`{key}`", HOLDERS[step], _default(info), info.description or inspect.getdoc(section) or ""
        inner = f"{key}.{step}"
        if not family:
            yield from _rows(section, inner)
        elif _homes().get(family, key) == key:
            yield from _variant_rows(family, section, inner)
        else:
            yield f"`{inner}…`", "", "", f"As under `{_homes()[family]}`."


@cache
def _homes() -> dict[str, str]:
    """Family → the key under which its options are explained: the shortest one."""
    homes: dict[str, str] = {}

    def visit(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            family, section, _ = _inside(annotation_of(info))
            key = f"{prefix}{name}"
            if family and key.count(".") < homes.get(family, "." * 9).count("."):
                homes[family] = key
            elif not family and section is not None:
                visit(section, f"{key}.")

    for pipeline in PIPELINES.values():
        visit(pipeline, "")
    return homes


def _variant_rows(family: str, base: type[BaseModel], prefix: str) -> Iterator[Row]:
    """`kind`, the options of all kinds, then those of each."""
    known = REGISTRY.built_in(family)
    yield f"`{prefix}kind`", "name", _default(base.model_fields["kind"]), f"{', '.join(f'`{name}`' for name in known)}, or one's own"
    yield from _rows(base, prefix)
    for name in known:
        schema = REGISTRY.lookup(family, name).schema(base)  # type: ignore[type-var]
        for key, *rest in _rows(schema, prefix, skip=tuple(base.model_fields)):
            yield f"{key if key.startswith('(') else f'(`{name}`) {key}'}", *rest


def _inside(annotation: Any) -> tuple[str, type[BaseModel] | None, str]:
    """The registry family and the section inside an annotation, where there are such, and what stands between its key and theirs."""
    for form, family in forms(annotation):
        origin = get_origin(form)
        if origin is None:
            return family, form, ""
        inner, section, _ = _inside(get_args(form)[1 if origin is dict else 0])
        if section is not None and section is not DeviceRequest:
            return inner, section, "<name>." if origin is dict else "<n>."
    return "", None, ""


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in args if part is not type(None))
    if origin is not None:
        return "mapping" if issubclass(origin, Mapping) else "list"
    return str({"str": "text", "bool": "true, false", "float": "number", "int": "integer"}.get(annotation.__name__, annotation.__name__))


def _default(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return ""
    if info.default is PydanticUndefined:
        return "required"
    if info.default is None or isinstance(info.default, BaseModel | dict):
        return ""
    return f"`{_literal(info.default)}`"


def _literal(value: Any) -> str:
    """A value as YAML reads it, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(one) for one in value)}]"
    return json.dumps(value) if isinstance(value, str) and (value != value.strip() or not value.isprintable() or not value) else str(value)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    print(reference(), end="")
