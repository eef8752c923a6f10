"""Dataset rows as preferences: two replies to one prompt, or one reply that is wanted or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from drumroll.config.models import PreferenceConfig, SourceConfig
from drumroll.data.columns import prompt_of, reply_of, require_columns, short
from drumroll.data.rows import Row, read_rows
from drumroll.errors import DataError
from drumroll.types import Exchange, Message


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replies to the same prompt. Example: `Pair(Exchange("2+2=", None, "4"), Exchange("2+2=", None, "5"))`."""

    chosen: Exchange
    rejected: Exchange
    margin: float = 0.0
    """By how much more than usual the chosen one is to be ahead."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A reply and whether it is wanted. Example: `Judgement(Exchange("2+2=", None, "5"), False)`."""

    exchange: Exchange
    is_wanted: bool


def load_pairs(cfg: PreferenceConfig, source: SourceConfig) -> list[Pair]:
    """Every row of a source as a pair. A row holds one of these:

    - a prompt (text or chat messages), and two replies (text, or a list with one message of the assistant);
    - two conversations as chat messages that differ in their last message, which is the assistant's; a prompt may stand beside them;
    - two texts without a prompt. It is what both begin with, as far as the last space or line break.
    """
    return [_pair(row, cfg, source, f"'{source.path}', {where}") for where, row in read_rows(source)]


def load_judgements(cfg: PreferenceConfig, source: SourceConfig) -> list[Judgement]:
    """Every row of a source as a reply with its label: a prompt, a completion (as `chosen` in `load_pairs`) and a label, true or false.
    A row with a pair is two: its chosen reply is wanted, its rejected one is not."""
    return [each for where, row in read_rows(source) for each in _judgements(row, cfg, source, f"'{source.path}', {where}")]


def _pair(row: Row, cfg: PreferenceConfig, source: SourceConfig, place: str) -> Pair:
    columns = {cfg.chosen_field: "`chosen_field`", cfg.rejected_field: "`rejected_field`"}
    require_columns(row, columns, place)
    values = [row[column] for column in columns]
    if row.get(source.prompt_field) is None and all(isinstance(value, str) for value in values):
        chosen, rejected = _split_texts(values[0], values[1], source.prompt_field, place)
    else:
        chosen, rejected = (_exchange(row, column, source.prompt_field, place) for column in columns)
    if (chosen.prompt, chosen.messages) != (rejected.prompt, rejected.messages):
        raise DataError(
            f"{place}: columns '{cfg.chosen_field}' and '{cfg.rejected_field}' differ before their last messages; two replies to the same "
            f"prompt were expected."
        )
    return Pair(chosen, rejected, _margin(row, cfg.margin_field, place))


def _judgements(row: Row, cfg: PreferenceConfig, source: SourceConfig, place: str) -> Iterator[Judgement]:
    if {cfg.chosen_field, cfg.rejected_field} <= row.keys():
        pair = _pair(row, cfg, source, place)
        yield Judgement(pair.chosen, True)
        yield Judgement(pair.rejected, False)
        return
    require_columns(row, {cfg.completion_field: "`completion_field`", cfg.label_field: "`label_field`"}, place)
    label = row[cfg.label_field]
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise DataError(f"{place}: column '{cfg.label_field}' holds {short(label)}; true or false was expected.")
    yield Judgement(_exchange(row, cfg.completion_field, source.prompt_field, place), bool(label))


def _exchange(row: Row, column: str, prompt_column: str, place: str) -> Exchange:
    """A reply, as text behind its prompt or as the last message of a conversation."""
    value, where = row[column], f"{place}: column '{column}'"
    if isinstance(value, str):
        require_columns(row, {prompt_column: "`prompt_field`"}, place)
        text, messages = prompt_of(row[prompt_column], prompt_column, place)
        return Exchange(text, messages, reply_of(value, where))
    if not isinstance(value, list):
        raise DataError(f"{where} holds {short(value)}; a reply is text or a list of chat messages.")
    *shown, last = _conversation(value, row.get(prompt_column), column, prompt_column, place)
    if last["role"] != "assistant":
        raise DataError(f"{where}: its last message is of '{last['role']}'; a reply of the assistant was expected.")
    if not shown:
        raise DataError(f"{where} is a reply without a prompt: there is neither a column '{prompt_column}' nor a message before it.")
    return Exchange(None, tuple(shown), reply_of(last.get("content"), f"{where}, last message"))


def _conversation(value: list[Any], prompt: Any, column: str, prompt_column: str, place: str) -> tuple[Message, ...]:
    """Prompt and reply as messages. The column may hold the prompt, too."""
    _, said = prompt_of(value, column, place)
    assert said is not None, "a list is no text"
    if prompt is None:
        return said
    text, before = prompt_of(prompt, prompt_column, place)
    if before is None:
        return said if said[0]["role"] != "assistant" else ({"role": "user", "content": text}, *said)
    return said if said[: len(before)] == before else (*before, *said)


def _split_texts(chosen: str, rejected: str, prompt_column: str, place: str) -> tuple[Exchange, Exchange]:
    """Two texts that begin alike: the replies start at the last white space of what they have in common."""
    common = "".join(one for one, _ in takewhile(lambda letters: letters[0] == letters[1], zip(chosen, rejected, strict=False)))
    cut = max((index for index, letter in enumerate(common) if letter.isspace()), default=0)
    prompt = common[:cut]
    if not prompt.strip():
        raise DataError(
            f"{place}: there is no column '{prompt_column}', and the two texts have no beginning in common that could be the prompt. "
            f"Name the right column by `prompt_field`."
        )
    return Exchange(prompt, None, chosen[cut:]), Exchange(prompt, None, rejected[cut:])


def _margin(row: Row, column: str | None, place: str) -> float:
    if column is None:
        return 0.0
    require_columns(row, {column: "`margin_field`"}, place)
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{place}: column '{column}' holds {short(value)}; a number was expected.")
    return float(value)
