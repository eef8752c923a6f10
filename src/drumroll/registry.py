"""Names that configs may use: `kind: <name>` → the function or class behind it, with a schema for its options.

A stateless extension is a function whose keyword-only arguments are its options. A stateful one is a class with a nested
`Config`. Both are registered by the same decorator:

    @register.reward("exact_match")
    def exact_match(trajectory: Trajectory, *, field: str = "answer") -> float:
        \"\"\"1.0 when the last reply equals the task's answer.

        Options:
            field: Column of the answer.
        \"\"\"

What the docstring says of an option is its help text, as is the docstring under a field of a `Config`.

`kind:` takes a registered name, `package.module:function`, or `./file.py:function` (`./file.py` alone when the file holds
one fitting function). Built-in names map to modules that are imported on first use, so that looking one up costs only what
the config names.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from drumroll.errors import PluginError

T = TypeVar("T")


class Options(BaseModel):
    """Base of every config section: unknown keys are errors, values are frozen, the docstring under a field is its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class Variant(Options):
    """A section whose `kind` names a registered entry; that entry's schema checks the remaining keys."""

    kind: str
    """Registered name, `package.module:name`, or `./file.py:name`."""


V = TypeVar("V", bound=Variant)

Seat = Literal["inline", "pooled", "device"]
"""Where a reward is computed: beside the episode, in the reward workers, or in reward workers that have devices for a model."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered function or class."""

    family: str
    name: str
    target: Callable[..., Any]
    needs: tuple[str, ...] = ()
    """What must be there for it: fields of the batch (`ref_logp`, `values`, `entropy`, `teacher_logp`, `teacher_top_logp`, `top_logp`),
    `groups` of several members, or in each group a member that is `greedy`."""
    seat: Seat = "inline"
    """Of a reward."""

    @property
    def short_name(self) -> str:
        """The registered name, or the function's own where a config names it by path."""
        by_path = ":" in self.name or self.name.endswith(".py")
        return str(getattr(self.target, "__name__", self.name)) if by_path else self.name

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.target) or "").split("\n")[0]

    def schema(self, base: type[V]) -> type[V]:
        """The option model: the class's own `Config`, or one made from the function's keyword-only arguments."""
        nested = getattr(self.target, "Config", None)
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            if not issubclass(nested, base):
                raise PluginError(f"{self.family} '{self.name}': its nested Config must extend {base.__module__}.{base.__qualname__}.")
            return nested
        return _schema_of(self.target, self.name, base)


@cache  # one class for each function, so that equal options compare equal
def _schema_of(function: Callable[..., Any], name: str, base: type[V]) -> type[V]:
    hints = get_type_hints(inspect.unwrap(function), include_extras=True) if inspect.isfunction(function) else {}
    explained = explained_names(inspect.getdoc(function) or "", "Options")
    options: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            hint, text = hints.get(parameter.name, Any), explained.get(parameter.name)
            options[parameter.name] = (hint, default if text is None else Field(default, description=text))
    return create_model(f"{name}_options", __base__=base, **options)


def explained_names(docstring: str, heading: str) -> dict[str, str]:
    """What a section of a docstring, such as `Options:`, says of each name."""
    head = re.search(rf"^{heading}:[ \t]*\n", docstring, re.MULTILINE)
    lines = takewhile(lambda line: not line.strip() or line[0] == " ", docstring[head.end() :].splitlines() if head else ())
    explained: dict[str, str] = {}
    name = ""
    for line in dedent("\n".join(lines)).splitlines():
        entry = re.match(r"(\w+)(?: \([^)]*\))?:(.*)", line)
        if entry:
            name = entry[1]
            explained[name] = entry[2].strip()
        elif name and line.strip():
            explained[name] = f"{explained[name]} {line.strip()}"
    return explained


# Built-in names and the modules that register them; `drumroll list` reads this table.
BUILT_IN: dict[str, dict[str, str]] = {
    "env": {
        "single_turn": "drumroll.envs.single_turn",
        "frozen_lake": "drumroll.envs.frozen_lake",
        "sokoban": "drumroll.envs.sokoban",
        "webshop": "drumroll.envs.webshop",
        "tools": "drumroll.envs.tools",
        "gymnasium": "drumroll.envs.adapters.gymnasium",
        "reasoning_gym": "drumroll.envs.adapters.reasoning_gym",
        "verifiers": "drumroll.envs.adapters.verifiers",
        "gem": "drumroll.envs.adapters.gem",
        "agent": "drumroll.agents.process",
    },
    "tool": {
        "calculator": "drumroll.envs.tools.calculator",
        "python": "drumroll.envs.tools.python",
        "search": "drumroll.envs.tools.search",
        "mcp": "drumroll.envs.tools.mcp",
    },
    "reward": {
        "exact_match": "drumroll.rewards.exact_match",
        "contains_word": "drumroll.rewards.contains_word",
        "numeric_match": "drumroll.rewards.numeric_match",
        "math": "drumroll.rewards.mathematics",
        "code": "drumroll.rewards.code",
        "instructions": "drumroll.rewards.instructions",
        "multiple_choice": "drumroll.rewards.multiple_choice",
        "short_answer": "drumroll.rewards.short_answer",
        "format": "drumroll.rewards.format",
        "overlong": "drumroll.rewards.overlong",
        "judge": "drumroll.rewards.judge",
        "reward_model": "drumroll.rewards.reward_model",
    },
    "advantage": {
        **dict.fromkeys(
            ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax"), "drumroll.algo.advantage"
        ),
        **dict.fromkeys(("step_level", "gigpo"), "drumroll.algo.credit"),
        "gae": "drumroll.algo.critic",
        "distill": "drumroll.algo.distill",
    },
    "loss": {
        **dict.fromkeys(
            ("ppo_clip", "gspo", "gspo_token", "cispo", "topr", "kimi", "policy_gradient", "cross_entropy"), "drumroll.algo.loss"
        ),
        "gkd": "drumroll.algo.distill",
    },
    "correction": dict.fromkeys(("none", "decoupled", "truncated_is", "masked_is"), "drumroll.algo.correction"),
    "preference_loss": dict.fromkeys(("dpo", "ipo", "kto", "simpo", "reward_model"), "drumroll.algo.preference"),
    "group_filter": dict.fromkeys(("all_right", "all_wrong", "all_equal", "reward_variance"), "drumroll.rollout.filters"),
    "infer_backend": {
        "native": "drumroll.backends.infer.native",
        "vllm": "drumroll.backends.infer.vllm",
        "sglang": "drumroll.backends.infer.sglang",
    },
    "train_backend": {"fsdp2": "drumroll.backends.train.fsdp2"},
}

FAMILIES = tuple(BUILT_IN)


@dataclass
class Registry:
    """The table behind `register`. One per process."""

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    shipped: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions handed over as Python objects (`python:<name>`), see `drumroll.train`."""
    files: dict[str, str] = field(default_factory=dict)
    """Plugin files by the path the config uses → their source, so that workers need no copy on disk."""

    def add(self, family: str, name: str, needs: Iterable[str] = (), seat: Seat = "inline") -> Callable[[T], T]:
        def decorate(target: T) -> T:
            known = self.entries.get((family, name))
            if known is not None and _origin(known.target) != _origin(target):
                raise PluginError(
                    f"{family} '{name}' is registered twice: by {_origin(known.target)} and by {_origin(target)}. Choose another name."
                )
            self.entries[family, name] = Entry(family, name, target, tuple(needs), seat)  # type: ignore[arg-type]
            return target

        return decorate

    def names(self, family: str) -> list[str]:
        own = (name for kind, name in self.entries if kind == family)
        return sorted({*BUILT_IN[family], *own})

    @staticmethod
    def built_in(family: str) -> list[str]:
        return sorted(BUILT_IN[family])

    def lookup(self, family: str, kind: str) -> Entry:
        """The entry behind `kind`; a `PluginError` that names the nearest known one when there is none."""
        if (family, kind) not in self.entries and kind in BUILT_IN[family]:
            importlib.import_module(BUILT_IN[family][kind])
        if (family, kind) in self.entries:
            return self.entries[family, kind]
        if kind.startswith("python:"):
            return self._shipped(family, kind)
        path, _, name = kind.partition(":")
        if path.endswith(".py"):
            return self._from_module(family, kind, self.load_file(path), name)
        if name:
            return self._from_module(family, kind, import_plugin(path), name)
        raise PluginError(self._unknown(family, kind))

    def load_file(self, path: str) -> Any:
        """Import a plugin file, from its recorded source where there is one."""
        source = self.files.get(path)
        if source is None:
            try:
                source = Path(path).read_text()
            except OSError as error:
                raise PluginError(f"plugin file '{path}' cannot be read: {error}. Paths are relative to the working directory.") from error
            self.files[path] = source
        name = "drumroll_plugin_" + hashlib.sha256(source.encode()).hexdigest()[:16]
        if name in sys.modules:
            return sys.modules[name]
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))  # type: ignore[arg-type]
        module.__file__ = path
        sys.modules[name] = module
        try:
            exec(compile(source, path, "exec"), module.__dict__)  # a plugin is code that the user asked to run
        except Exception as error:
            del sys.modules[name], self.files[path]  # so that the file can be put right and tried again
            line = next((frame.lineno for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.filename == path), None)
            place = f" (line {line})" if line is not None else ""
            raise PluginError(f"plugin file '{path}' fails while it is imported: {type(error).__name__}: {error}{place}") from error
        return module

    def sources(self, kinds: Iterable[str]) -> dict[str, str]:
        """Source text behind those of the names that stand for files or for Python objects, where Python still knows it."""
        sources: dict[str, str] = {}
        for kind in kinds:
            path = kind.partition(":")[0]
            if path in self.files:
                sources[path] = self.files[path]
            elif kind.startswith("python:"):
                with contextlib.suppress(OSError, TypeError):  # defined at a prompt, or not in Python
                    sources[kind] = inspect.getsource(self.shipped[kind.removeprefix("python:")])
        return sources

    def _shipped(self, family: str, kind: str) -> Entry:
        name = kind.removeprefix("python:")
        if name not in self.shipped:
            raise PluginError(
                f"{family} '{kind}' was a Python object of the process that started the run and is not here. "
                f"Name it by import path or file instead."
            )
        return Entry(family, kind, self.shipped[name])

    def _from_module(self, family: str, kind: str, module: Any, name: str) -> Entry:
        if not name:
            own = [e for (f, _), e in self.entries.items() if f == family and getattr(e.target, "__module__", "") == module.__name__]
            if len(own) == 1:
                return own[0]
            functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__ and n[0] != "_"]
            if len(functions) != 1:
                raise PluginError(
                    f"'{kind}' holds {len(functions)} functions ({', '.join(functions) or 'none'}): say which, as '{kind}:name'."
                )
            name = functions[0]
        target = getattr(module, name, None)
        if not callable(target):
            known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            raise PluginError(f"'{kind}': there is no function or class '{name}'.{nearest(name, known)}")
        registered = [e for (f, _), e in self.entries.items() if f == family and e.target is target]
        return registered[0] if registered else Entry(family, kind, target)

    def _unknown(self, family: str, kind: str) -> str:
        names = self.names(family)
        noun = family.replace("_", " ")
        article = "an" if noun[0] in "aeiou" else "a"
        return (
            f"no {noun} named '{kind}'.{nearest(kind, names)} Known: {', '.join(names)}. If {article} {noun} of that name is yours, "
            f"list its module under `plugins`, or name it as 'package.module:function' or './file.py:function'."
        )


REGISTRY = Registry()


class register:  # noqa: N801 - reads as a verb: @register.reward("name")
    """The decorators."""

    env = partial(REGISTRY.add, "env")
    tool = partial(REGISTRY.add, "tool")
    reward = partial(REGISTRY.add, "reward")
    advantage = partial(REGISTRY.add, "advantage")
    loss = partial(REGISTRY.add, "loss")
    correction = partial(REGISTRY.add, "correction")
    preference_loss = partial(REGISTRY.add, "preference_loss")
    group_filter = partial(REGISTRY.add, "group_filter")
    infer_backend = partial(REGISTRY.add, "infer_backend")
    train_backend = partial(REGISTRY.add, "train_backend")


def import_plugin(module: str) -> Any:
    """Import a module that a config names, or say why it cannot be."""
    if module.endswith(".py"):
        return REGISTRY.load_file(module)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise PluginError(
            f"'{module}' cannot be imported: {type(error).__name__}: {error}. Is it installed, or in the working directory?"
        ) from error


def require(package: str, extra: str) -> None:
    """For the head of a module that needs an optional package: a `PluginError` with the install line where it is missing."""
    if importlib.util.find_spec(package) is None:
        raise PluginError(f"the package '{package}' is not installed: pip install 'drumroll[{extra}]'")


def bind(entry: Entry, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The entry's function with its options filled in."""
    return partial(entry.target, **options)


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def _origin(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"
