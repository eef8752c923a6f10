"""Columns of a dataset row: prompts, replies, messages, or an error that says what was expected where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumroll.data.rows import Row
from drumroll.errors import DataError
from drumroll.registry import nearest
from drumroll.types import Message


def reply_of(value: Any, where: str) -> str:
    """A reply's text, which must not be empty."""
    if not isinstance(value, str) or not value:
        raise DataError(f"{where} holds {short(value)}; the text of a reply was expected.")
    return value


def require_columns(row: Row, columns: Mapping[str, str], place: str) -> None:
    """Every column must be there; `columns` maps each to the config key that names it, as a message says it."""
    for column, key in columns.items():
        if column not in row:
            known = ", ".join(row) or "none"
            raise DataError(f"{place}: there is no column '{column}'.{nearest(column, row)} Columns: {known}. Name the right one by {key}.")


def prompt_of(value: Any, column: str, place: str) -> tuple[str | None, tuple[Message, ...] | None]:
    """A prompt as text, or as chat messages; the other one of the two is None."""
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: column '{column}' holds {short(value)}; a prompt is text or a list of chat messages.")
    return None, tuple(_message(message, f"{place}: column '{column}', message {index}") for index, message in enumerate(value))


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f'{place} is {short(message)}; an object such as {{"role": "user", "content": "2+2?"}} was expected.')
    said = {str(key): value for key, value in message.items() if value is not None}  # Parquet gives every message every key
    if not isinstance(said.get("role"), str) or not said["role"]:
        raise DataError(f"{place} has no `role`, for example 'user'. Its keys: {', '.join(said) or 'none'}.")
    if not isinstance(said.get("content"), str | list) and "tool_calls" not in said:
        raise DataError(f"{place} has no `content`. Its keys: {', '.join(said)}.")
    return said


def short(value: Any) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return f"{text[:60]}…" if len(text) > 60 else text
