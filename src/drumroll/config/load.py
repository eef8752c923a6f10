"""From YAML files and dotted overrides to a checked config, or to one `ConfigError` that lists everything wrong with it.

defaults < files, left to right < overrides such as `trainer.lr=3e-4`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from drumroll.config.explain import explain, shown
from drumroll.config.models import PIPELINES, RunConfig
from drumroll.config.sections import child
from drumroll.errors import ConfigError, PluginError
from drumroll.registry import import_plugin, nearest


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
        advice = (
            "A file that is laid over another comes after it: drumroll train BASE.yaml OVER.yaml"
            if pipeline is None
            else "Algorithms are chosen within: PPO, GRPO and the like by `algo` of `pipeline: rl`, DPO and the like by `preference.kind`."
        )
        raise ConfigError(f"`pipeline`: got {shown(pipeline)}, expected one of {', '.join(PIPELINES)}.{hint} {advice}")
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
        raise ConfigError(f"config file '{path}': expected a mapping of sections, got {shown(tree)}.")
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
        elif not isinstance(node, dict):
            raise ConfigError(f"override '{override}': `{where}` is {shown(node)}, not a section.")
        slot: Any = int(key) if isinstance(node, list) else key
        if last:
            node[slot] = value
            return
        inner = child(node, key)
        if not isinstance(inner, dict | list):  # `advantage: grpo` is short for `advantage: {kind: grpo}`, and so is an entry of `rewards`
            node[slot] = {"kind": inner} if isinstance(inner, str) else {}
        node = node[slot]
