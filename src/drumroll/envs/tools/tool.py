"""What a tool is: a name, a description and a JSON schema for the model to see, and a function of the arguments.

A tool of one's own is a plain function (see `function`). A `ToolBox` is for what has several tools or state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from pydantic import SerializeAsAny
from referencing import Registry

from drumroll.config.models import VariantOf
from drumroll.registry import Variant

SHOWN_CHARS = 300
"""Of what is wrong with arguments."""


class ToolError(Exception):
    """Raised by a tool to tell the model what is wrong with its call; every other exception is a failure of the infrastructure.

    Example: `raise ToolError("there is no city of that name")`.
    """


class ToolConfig(Variant):
    """Base of every tool's options."""


ToolChoice = Annotated[SerializeAsAny[ToolConfig], VariantOf("tool")]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. Example: `Tool("now", "The time of day.", {"type": "object", "properties": {}}, tell_time)`."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    call: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Arguments that fit the schema → the result as text; a `ToolError` is told to the model."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI's API describe a tool."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def text_argument(self) -> str | None:
        """The argument that a plain call fills: the only one that is required, or the only one. None where it is not a text."""
        properties = self.parameters.get("properties", {})
        required = self.parameters.get("required", [])
        names = required if len(required) == 1 else list(properties)
        is_text = len(names) == 1 and properties.get(names[0], {}).get("type") == "string"
        return str(names[0]) if is_text else None

    def check_schema(self) -> None:
        """A `ValueError` where `parameters` is no JSON schema."""
        try:
            validator_for(self.parameters, Draft202012Validator).check_schema(self.parameters)
        except SchemaError as error:
            raise ValueError(f"the schema of the tool '{self.name}' is no JSON schema: {error.message[:SHOWN_CHARS]}") from error

    def problem_with(self, arguments: Mapping[str, Any]) -> str:
        """Why the arguments do not fit the schema; empty where they do."""
        validator = validator_for(self.parameters, Draft202012Validator)(self.parameters, registry=Registry())
        error = best_match(validator.iter_errors(dict(arguments)))
        if error is None:
            return ""
        where = ".".join(map(str, error.absolute_path))
        return f"{where}: {error.message}"[:SHOWN_CHARS] if where else error.message[:SHOWN_CHARS]


class ToolBox(ABC):
    """Several tools, or tools with state. Registered by `@register.tool("name")`; its nested `Config` holds its options.

    A box is made anew for every episode; what is expensive is shared between boxes (see `shared`).
    """

    class Config(ToolConfig):
        """Options of a box without any."""

    # Any: the nested Config of each box, which a base class cannot name.
    config: Any

    def __init__(self, config: ToolConfig) -> None:
        self.config = config

    @abstractmethod
    async def tools(self) -> Sequence[Tool]:
        """What is in the box. An exception is a failure of the infrastructure."""
