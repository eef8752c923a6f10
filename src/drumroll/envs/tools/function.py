"""A plain function as a tool: its signature is the schema, its docstring the description.

    def population(city: str, year: int = 2020, *, table: str = "cities.csv") -> int:
        \"\"\"How many people live in a city.

        Args:
            city: Its name in English.

        Options:
            table: File with the numbers.
        \"\"\"

Ordinary parameters are the arguments that the model gives, keyword-only ones the options in the config, of which it is not told. An
`async def` runs in the event loop and must not block it; an ordinary function runs in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, get_type_hints

import typing_extensions
from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema

from drumroll.envs.tools.tool import Tool, ToolConfig, ToolError
from drumroll.errors import PluginError
from drumroll.registry import Entry, explained_names


@dataclass(frozen=True, slots=True)
class _Face:
    """What a function shows of itself."""

    description: str
    parameters: Mapping[str, Any]
    adapter: TypeAdapter[Any]
    """Turns JSON data into what the function's types say."""


def function_tool(entry: Entry, config: ToolConfig) -> Tool:
    """The tool behind a function, with its options filled in; a `PluginError` where the signature leaves something open."""
    face = _face(entry.target)
    options = {name: getattr(config, name) for name in type(config).model_fields if name != "kind"}
    run = partial(entry.target, **options)

    async def call(arguments: Mapping[str, Any]) -> str:
        try:
            values = face.adapter.validate_python(dict(arguments))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ToolError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        is_async = inspect.iscoroutinefunction(entry.target)
        answer = await run(**values) if is_async else await asyncio.to_thread(run, **values)
        return as_text(answer, entry.short_name)

    return Tool(entry.short_name, face.description, face.parameters, call)


def as_text(answer: Any, name: str) -> str:
    """Text as it is, anything else as JSON; a `TypeError` for what is neither."""
    if isinstance(answer, str):
        return answer
    try:
        return json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the tool '{name}' returned a {type(answer).__name__}; text or JSON data was expected ({error})") from error


@cache
def _face(function: Callable[..., Any]) -> _Face:
    description, explained = read_docstring(inspect.getdoc(function) or "")
    hints = get_type_hints(inspect.unwrap(function), include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        where = f"tool '{function.__name__}': its parameter '{parameter.name}'"
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PluginError(f"{where} cannot be given by name, as a model gives it. Write an ordinary parameter.")
        if parameter.name not in hints:
            raise PluginError(f"{where} has no type, which the model must be told. Write, for example, `{parameter.name}: str`.")
        hint = hints[parameter.name]
        if parameter.name in explained:
            hint = Annotated[hint, Field(description=explained[parameter.name])]
        fields[parameter.name] = hint if parameter.default is parameter.empty else typing_extensions.NotRequired[hint]
    make_type: Any = typing_extensions.TypedDict  # its fields are known only now
    arguments = make_type("Arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(arguments)
        schema = adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
        raise PluginError(f"tool '{function.__name__}': a parameter's type cannot be told as JSON schema: {error}") from error
    return _Face(description, _without_titles(schema), adapter)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before `Args:` and `Options:`, and what `Args:` says of each parameter. Options are no business of the model's."""
    described = re.split(r"^(?:Args|Options):[ \t]*\n", text, maxsplit=1, flags=re.MULTILINE)[0]
    return described.strip(), explained_names(text, "Args")


def _without_titles(schema: Any, is_schema: bool = True) -> Any:
    """Without the titles that pydantic adds, which repeat the names. Keys of `properties` and `$defs` are names, not keywords."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, is_schema=not (is_schema and key in ("properties", "$defs")))
        for key, value in schema.items()
        if not (is_schema and key == "title")
    }
