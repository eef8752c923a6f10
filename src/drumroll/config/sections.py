"""Which sections, lists and mappings stand where in a config, as the annotations of its models say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drumroll.config.models import VariantOf
from drumroll.errors import PluginError
from drumroll.registry import REGISTRY, Variant


def annotation_of(info: FieldInfo) -> Any:
    """A field's annotation as it was written, with the `VariantOf` that pydantic keeps apart."""
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def child(node: Any, key: str) -> Any:
    """What stands under a key of a mapping or at a place of a list; None where nothing does."""
    if isinstance(node, list | tuple):
        return node[int(key)] if key.isdigit() and int(key) < len(node) else None
    return node.get(key) if isinstance(node, dict) else None


def field_at(model: type[BaseModel], keys: Iterable[str], tree: Any) -> tuple[Any, Any]:
    """The annotation of what stands at `keys`, None where nothing may, and the value there."""
    annotation: Any = model
    for key in keys:
        annotation, tree = _inner(annotation, tree, key), child(tree, key)
    return annotation, tree


def _inner(annotation: Any, node: Any, key: str) -> Any:
    """The annotation of one entry of a section, a mapping or a list."""
    for form, family in forms(annotation):
        origin = get_origin(form)
        if origin is None:
            info = _variant(form, family, node).model_fields.get(key)
            if info is not None:
                return annotation_of(info)
        elif isinstance(node, dict if origin is dict else list | tuple):
            return get_args(form)[1 if origin is dict else 0]
    return None


def keys_below(annotation: Any, node: Any, prefix: str) -> Iterator[str]:
    """Every dotted key that may follow; `<name>` and `<n>` stand for the entries of mappings and lists that have none yet."""
    for form, family in forms(annotation):
        origin = get_origin(form)
        if origin is None:
            for name, info in _variant(form, family, node).model_fields.items():
                yield f"{prefix}{name}"
                yield from keys_below(annotation_of(info), child(node, name), f"{prefix}{name}.")
        else:
            inner = get_args(form)[1 if origin is dict else 0]
            named = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list | tuple) else ()
            for key in map(str, named or ["<name>" if origin is dict else "<n>"]):
                yield from keys_below(inner, child(node, key), f"{prefix}{key}.")


def section_of(annotation: Any, node: Any) -> type[BaseModel] | None:
    """The section inside an annotation such as `WarmupConfig | None`, by the registered schema where it has a `kind`."""
    return next((_variant(form, family, node) for form, family in forms(annotation) if get_origin(form) is None), None)


def forms(annotation: Any, family: str = "") -> Iterator[tuple[Any, str]]:
    """The sections, mappings and lists that a field may hold; of a section also the family that its `kind` is of."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        family = next((part.family for part in parts if isinstance(part, VariantOf)), family)
        yield from forms(parts[0], family)
    elif origin in (Union, UnionType):
        for part in parts:
            yield from forms(part, family)
    elif origin in (tuple, dict) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        yield annotation, family


def _variant(section: type[BaseModel], family: str, node: Any) -> type[BaseModel]:
    """The registered schema of the section's `kind`; the section itself where it has none."""
    if not family or not issubclass(section, Variant):
        return section
    kind = node if isinstance(node, str) else node.get("kind") if isinstance(node, dict) else None
    try:
        return REGISTRY.lookup(family, str(kind or section.model_fields["kind"].default)).schema(section)
    except PluginError:
        return section
