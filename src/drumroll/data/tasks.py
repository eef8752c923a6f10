"""Dataset rows as tasks and demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumroll.config.models import ANY, SourceConfig
from drumroll.data.rows import Row, read_rows
from drumroll.errors import DataError
from drumroll.registry import nearest
from drumroll.types import Message, Task


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt, as text or as chat messages, with the reply to imitate."""

    completion: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What the rows of a domain must hold."""

    columns: tuple[str, ...] = ()
    """That something will read, for example a reward."""
    prompt: bool = True
    """False where the environment makes its prompts itself: the prompt column may then be missing."""


def load_tasks(source: SourceConfig, *, split_label: str, needs: Mapping[str, Needs] | None = None) -> list[Task]:
    """Every row of a source as a task, named by its id column or `<split label>-<row number>`, from 0.

    `needs` says of each domain what its rows must hold; `*` stands for every other domain, and without it there must not be any."""
    needs = {ANY: Needs()} if needs is None else needs
    tasks: dict[str, tuple[str, Task]] = {}
    for number, (where, row) in enumerate(read_rows(source)):
        place = f"'{source.path}', {where}"
        domain = _domain(row, source.domain, needs, place)
        needed = needs.get(domain, needs.get(ANY, Needs()))
        _require(row, dict.fromkeys(needed.columns, ""), place)
        if source.id_field is not None:
            _require(row, {source.id_field: "id_field"}, place)
        if needed.prompt:
            _require(row, {source.prompt_field: "prompt_field"}, place)
        task_id = f"{split_label}-{number}" if source.id_field is None else _id(row[source.id_field], source.id_field, place)
        if task_id in tasks:
            raise DataError(
                f"{place}: id '{task_id}' was already used in {tasks[task_id][0]}; column '{source.id_field}' must name each row."
            )
        shown = row.get(source.prompt_field)
        prompt, messages = _prompt(shown, source.prompt_field, place) if needed.prompt or shown is not None else (None, None)
        tasks[task_id] = where, Task(task_id, prompt, messages, domain, row)
    return [task for _, task in tasks.values()]


def load_demonstrations(source: SourceConfig, completion_field: str = "completion") -> list[Demonstration]:
    """Every row of a source as a prompt with the reply to imitate."""
    demonstrations = []
    for where, row in read_rows(source):
        place = f"'{source.path}', {where}"
        _require(row, {source.prompt_field: "prompt_field", completion_field: "completion_field"}, place)
        completion = row[completion_field]
        if not isinstance(completion, str) or not completion:
            raise DataError(f"{place}: column '{completion_field}' holds {_short(completion)}; the text of a reply was expected.")
        prompt, messages = _prompt(row[source.prompt_field], source.prompt_field, place)
        demonstrations.append(Demonstration(completion, prompt, messages))
    return demonstrations


def _require(row: Row, columns: Mapping[str, str], place: str) -> None:
    """Every column must be there; `columns` maps each to the config key that names it, or to nothing."""
    for column, key in columns.items():
        if column not in row:
            advice = f" Name the right one by `{key}`." if key else ""
            raise DataError(f"{place}: there is no column '{column}'.{nearest(column, row)} Columns: {', '.join(row) or 'none'}.{advice}")


def _id(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str | int) or value == "":
        raise DataError(f"{place}: column '{column}' holds {_short(value)}; an id is text or a whole number.")
    return str(value)


def _domain(row: Row, default: str, needs: Mapping[str, Needs], place: str) -> str:
    domain = row.get("domain")
    if domain is None:
        domain = default
    if not isinstance(domain, str) or not domain:
        raise DataError(f"{place}: column 'domain' holds {_short(domain)}; a name was expected.")
    if domain not in needs and ANY not in needs:
        raise DataError(
            f"{place}: its domain is '{domain}'; {' or '.join(needs)} was expected.{nearest(domain, needs)} A column `domain` in the "
            f"row, or `domain` beside the path, says which it is; `domains` names those that there are."
        )
    return domain


def _prompt(value: Any, column: str, place: str) -> tuple[str | None, tuple[Message, ...] | None]:
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: column '{column}' holds {_short(value)}; a prompt is text or a list of chat messages.")
    return None, tuple(_message(message, f"{place}: column '{column}', message {index}") for index, message in enumerate(value))


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f'{place} is {_short(message)}; an object such as {{"role": "user", "content": "2+2?"}} was expected.')
    said = {str(key): value for key, value in message.items() if value is not None}  # Parquet gives every message every key
    if not isinstance(said.get("role"), str) or not said["role"]:
        raise DataError(f"{place} has no `role`, for example 'user'. Its keys: {', '.join(said) or 'none'}.")
    if not isinstance(said.get("content"), str | list) and "tool_calls" not in said:
        raise DataError(f"{place} has no `content`. Its keys: {', '.join(said)}.")
    return said


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}…" if len(text) > 60 else text
