"""The reference of all config keys, as Markdown, from the docstrings under the fields: `python -m drumroll.config.reference`."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drumroll.config.load import PIPELINES
from drumroll.config.models import DeviceRequest, RunConfig, VariantOf
from drumroll.registry import REGISTRY

HEAD = """# Config reference

Every key, with its type, its default and what it does. Files merge left to right, then come overrides such as
`trainer.lr=3e-4`. Unknown keys are errors. This page is written by `make docs`.
"""


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
    yield from _rows(model, "", skip)


def _rows(model: type[BaseModel], prefix: str, skip: tuple[str, ...] = ()) -> Iterator[str]:
    for name, info in model.model_fields.items():
        if name in skip or (prefix and name == "kind"):
            continue
        key = f"{prefix}{name}"
        family, section = _inside(Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation)
        if section is None:
            yield f"| `{key}` | {_type(info.annotation)} | {_default(info)} | {_text(info.description)} |"
            continue
        many = get_origin(info.annotation) in (tuple, dict)
        what = _text(info.description or inspect.getdoc(section))
        yield f"| `{key}` | {'list of sections' if many else 'section'} | {_default(info)} | {what} |"
        inner = f"{key}.<n>." if get_origin(info.annotation) is tuple else f"{key}.<name>." if many else f"{key}."
        if family is None:
            yield from _rows(section, inner)
        elif _homes().get(family, key) == key:
            yield from _variant_rows(family, section, inner)
        else:
            yield f"| `{inner}…` |  |  | As under `{_homes()[family]}`. |"


@cache
def _homes() -> dict[str, str]:
    """Family → the key under which its options are explained: the shortest one."""
    homes: dict[str, str] = {}

    def visit(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            family, section = _inside(Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation)
            key = f"{prefix}{name}"
            if family is not None and key.count(".") < homes.get(family, "." * 9).count("."):
                homes[family] = key
            elif family is None and section is not None:
                visit(section, f"{key}.")

    for pipeline in PIPELINES.values():
        visit(pipeline, "")
    return homes


def _variant_rows(family: str, base: type[BaseModel], prefix: str) -> Iterator[str]:
    """`kind`, the options of all kinds, then those of each."""
    known = REGISTRY.built_in(family)
    yield f"| `{prefix}kind` | name | {_default(base.model_fields['kind'])} | {', '.join(f'`{name}`' for name in known)}, or one's own |"
    yield from _rows(base, prefix)
    for name in known:
        schema = REGISTRY.lookup(family, name).schema(base)  # type: ignore[type-var]
        for row in _rows(schema, prefix, skip=tuple(base.model_fields)):
            yield row.replace(f"| `{prefix}", f"| (`{name}`) `{prefix}", 1)


def _inside(annotation: Any) -> tuple[str | None, type[BaseModel] | None]:
    """The registry family and the section inside an annotation, where there are such."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None, annotation
    parts = get_args(annotation)
    family = next((part.family for part in parts if isinstance(part, VariantOf)), None)
    for part in parts:
        deeper, section = _inside(part)
        if section is not None and section is not DeviceRequest:
            return family or deeper, section
    return None, None


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in args if part is not type(None))
    if origin in (tuple, dict):
        return "list" if origin is tuple else "mapping"
    return str({"str": "text", "bool": "true, false", "float": "number", "int": "integer"}.get(annotation.__name__, annotation.__name__))


def _default(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return ""
    if info.default is PydanticUndefined:
        return "required"
    if info.default is None or isinstance(info.default, BaseModel | dict):
        return ""
    return f"`{list(info.default) if isinstance(info.default, tuple) else info.default}`"


def _text(description: str | None) -> str:
    return re.sub(r"\s+", " ", description or "").replace("|", "\\|").strip()


if __name__ == "__main__":
    print(reference(), end="")
