"""From YAML files and dotted overrides to a checked config, or to one `ConfigError` that lists everything wrong with it.

defaults < files, left to right < overrides such as `trainer.lr=3e-4`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from drumroll.config.models import PreferenceRunConfig, RlConfig, RunConfig, SftRunConfig, VariantOf
from drumroll.errors import ConfigError, PluginError
from drumroll.registry import REGISTRY, Variant, import_plugin, nearest

PIPELINES: dict[str, type[RunConfig]] = {"rl": RlConfig, "sft": SftRunConfig, "preference": PreferenceRunConfig}


def load_config(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Merge, import plugins, check. Nothing is started or written."""
    tree: dict[str, Any] = {}
    for file in files:
        tree = merge(tree, read_yaml(Path(file)))
    for override in overrides:
        apply_override(tree, override)
    return check_config(tree)


def check_config(tree: Mapping[str, Any]) -> RunConfig:
    """A config from plain data: the schema is chosen by its `pipeline`."""
    pipeline = tree.get("pipeline")
    if not isinstance(pipeline, str) or pipeline not in PIPELINES:
        hint = nearest(pipeline, PIPELINES) if isinstance(pipeline, str) else ""
        raise ConfigError(f"`pipeline`: got {_shown(pipeline)}, expected one of {', '.join(PIPELINES)}.{hint}")
    plugins = tree.get("plugins", [])
    for module in plugins if isinstance(plugins, list | tuple) else []:
        try:
            import_plugin(str(module))
        except PluginError as error:
            raise ConfigError(f"`plugins`: {error}") from error
    try:
        return PIPELINES[pipeline].model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError(explain(error, PIPELINES[pipeline], tree)) from None


def resolved_yaml(config: RunConfig) -> str:
    """The config with every default filled in; loading it gives an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def named_kinds(tree: Any) -> Iterator[str]:
    """Every value of a key `kind`, at any depth of a config as plain data."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "kind" and isinstance(value, str):
                yield value
            else:
                yield from named_kinds(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from named_kinds(value)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that appears twice in one mapping, where plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise ConfigError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}.") from error


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(f"config file '{path}' does not exist.{nearest(path.name, siblings)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{path}' cannot be read: {error}.") from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"config file '{path}': expected a mapping of sections, got {_shown(tree)}.")
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge key by key; anything else, lists included, is replaced."""
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        merged[key] = merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; numbers select entries of lists, as in `rewards.0.weight=2`."""
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override '{override}': expected key=value, for example trainer.lr=3e-4.")
    value = parse_yaml(text, f"override '{override}'")
    node: Any = tree
    for depth, key in enumerate(keys):
        where = ".".join(keys[:depth]) or "the config"
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(f"override '{override}': `{where}` is a list of {len(node)}; '{key}' is not one of its places.")
            slot: Any = int(key)
        elif isinstance(node, dict):
            slot = key
            if not last and not isinstance(node.get(key), dict | list):
                # `rewards: exact_match` is short for a mapping with `kind`
                node[key] = {"kind": node[key]} if isinstance(node.get(key), str) else {}
        else:
            raise ConfigError(f"override '{override}': `{where}` is {_shown(node)}, not a section.")
        if last:
            node[slot] = value
        else:
            node = node[slot]


def explain(error: ValidationError, model: type[BaseModel], tree: Mapping[str, Any]) -> str:
    """Every problem on a line of its own: dotted key, what was got, what is accepted, the nearest known name."""
    taken: dict[str, list[str]] = {}
    untaken: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        keys = [str(part) for part in problem["loc"] if not _is_union_tag(part)]
        text = _explain_one(problem, keys, model, tree)
        of_branch = untaken if _untaken_branch(problem["loc"], problem["input"]) else taken
        of_branch.setdefault(".".join(keys), []).append(text)
    # a union complains once for each branch: keep the branch that the value was meant for, if there is one
    merged = taken | {dotted: texts for dotted, texts in untaken.items() if not any(key.startswith(dotted) for key in taken)}
    return "\n".join(f"`{dotted}`: {text}" if dotted else text for dotted, texts in merged.items() for text in dict.fromkeys(texts))


def _explain_one(problem: Any, keys: list[str], model: type[BaseModel], tree: Mapping[str, Any]) -> str:
    message = str(problem["msg"])
    match problem["type"]:
        case "extra_forbidden":
            siblings = _known_keys(model, keys[:-1], tree)
            return f"unknown key.{nearest(keys[-1], siblings)}" + (f" Known here: {', '.join(siblings)}." if siblings else "")
        case "missing":
            return "is required and missing."
        case "unknown_kind" | "kind_missing":
            keys.append("kind")
            return message
        case "value_error":
            return message.removeprefix("Value error, ") + "."
    expected = message.removeprefix("Input should be ").removesuffix(".")
    got = problem["input"]
    choices = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
    hint = nearest(got, choices) if problem["type"] == "literal_error" and isinstance(got, str) else ""
    return f"got {_shown(got)}, expected {expected}.{hint}"


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


def _known_keys(model: type[BaseModel], keys: Iterable[str], tree: Any) -> list[str]:
    """Fields of the section at `keys`, by the registered schema where the section has a `kind`."""
    section: type[BaseModel] | None = model
    is_name = False  # of an entry of a mapping, chosen by the user
    for key in keys:
        tree = tree[int(key)] if isinstance(tree, list | tuple) and key.isdigit() else tree.get(key) if isinstance(tree, dict) else None
        if key.isdigit() or section is None or is_name:
            is_name = False
            continue
        info = section.model_fields.get(key)
        is_name = info is not None and get_origin(info.annotation) is dict
        section = _section(Annotated[info.annotation, info.metadata and info.metadata[-1]], tree) if info is not None else None
    return list(section.model_fields) if section is not None else []


def _section(annotation: Any, tree: Any) -> type[BaseModel] | None:
    """The config section inside an annotation such as `WarmupConfig | None` or `tuple[RewardChoice, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation)
    section = next((found for part in parts if (found := _section(part, tree))), None)
    family = next((part.family for part in parts if isinstance(part, VariantOf)), None)
    if family and section and issubclass(section, Variant):
        node = tree[0] if isinstance(tree, list) and tree else tree
        kind = node.get("kind", section.model_fields["kind"].default) if isinstance(node, dict) else node
        return REGISTRY.lookup(family, str(kind)).schema(section)
    return section


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})" if value is not None else "nothing"
