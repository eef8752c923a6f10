"""Dataset rows as tasks and demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from drumroll.config.models import ANY, SourceConfig
from drumroll.data.columns import prompt_of, reply_of, require_columns, short
from drumroll.data.rows import Row, read_rows
from drumroll.errors import DataError
from drumroll.registry import nearest
from drumroll.types import Exchange, Message, Task


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode to imitate, of one turn or several. Example: `Demonstration((Exchange("2+2=", None, "4"),))`."""

    exchanges: tuple[Exchange, ...]
    tokens: tuple[tuple[int, ...], tuple[bool, ...]] | None = None
    """Token ids and loss mask as they were sampled, where the row has them."""
    tokenizer: str = ""
    """Whose tokens these are."""

    @property
    def teaches(self) -> bool:
        """Whether there is anything in it to imitate."""
        return any(self.tokens[1]) if self.tokens else any(exchange.is_imitated for exchange in self.exchanges)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the rows of a domain must hold."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """That something will read, for example a reward, each with the config key that names it: `{"answer": "`rewards.0.field`"}`."""
    prompt: bool = True
    """False where the environment makes its prompts itself: the prompt column may then be missing."""


def load_tasks(source: SourceConfig, *, split_label: str, needs: Mapping[str, Needs] | None = None) -> list[Task]:
    """Every row of a source as a task, named by its id column or `<split label>-<row number>`, from 0.

    `needs` says of each domain what its rows must hold; `*` stands for every other domain, and without it there must not be any."""
    needs = {ANY: Needs()} if needs is None else needs
    tasks: dict[str, tuple[str, Task]] = {}
    for number, (where, row) in enumerate(read_rows(source)):
        place = f"'{source.path}', {where}" if source.path else where
        domain = _domain(row, source.domain, needs, place)
        needed = needs.get(domain, needs.get(ANY, Needs()))
        require_columns(row, needed.columns, place)
        if source.id_field is not None:
            require_columns(row, {source.id_field: "`id_field`"}, place)
        if needed.prompt:
            require_columns(row, {source.prompt_field: "`prompt_field`"}, place)
        default_id = f"{split_label}-{number if source.seeds is None else row['seed']}"
        task_id = default_id if source.id_field is None else _id(row[source.id_field], source.id_field, place)
        if task_id in tasks:
            raise DataError(
                f"{place}: id '{task_id}' was already used in {tasks[task_id][0]}; column '{source.id_field}' must name each row."
            )
        shown = row.get(source.prompt_field)
        prompt, messages = prompt_of(shown, source.prompt_field, place) if needed.prompt or shown is not None else (None, None)
        tasks[task_id] = where, Task(task_id, prompt, messages, domain, row)
    return [task for _, task in tasks.values()]


def load_demonstrations(source: SourceConfig, completion_field: str = "completion") -> list[Demonstration]:
    """Every row of a source as an episode to imitate. A row holds one of these:

    - a prompt (text or chat messages) and a completion;
    - `turns`: a list such as `[{"prompt": "2+2="}, {"reply": "4"}, {"messages": [...]}, {"reply": "5", "imitate": false}]`;
    - `messages`: a conversation, whose every message of the assistant is imitated.
    """
    return [_demonstration(row, source, completion_field, f"'{source.path}', {where}") for where, row in read_rows(source)]


def _demonstration(row: Row, source: SourceConfig, completion_field: str, place: str) -> Demonstration:
    if "turns" in row and source.prompt_field not in row:
        tokens = (tuple(row["token_ids"]), tuple(map(bool, row["loss_mask"]))) if {"token_ids", "loss_mask"} <= row.keys() else None
        return Demonstration(tuple(_exchanges(row["turns"], place)), tokens, str(row.get("tokenizer", "")))
    if "messages" in row and source.prompt_field not in row:
        return Demonstration(tuple(_conversation(row["messages"], place)))
    require_columns(row, {source.prompt_field: "`prompt_field`", completion_field: "`completion_field`"}, place)
    prompt, messages = prompt_of(row[source.prompt_field], source.prompt_field, place)
    return Demonstration((Exchange(prompt, messages, reply_of(row[completion_field], f"{place}: column '{completion_field}'")),))


def _exchanges(turns: Any, place: str) -> Iterator[Exchange]:
    """What is shown and what is replied, in turns."""
    if not isinstance(turns, list) or not turns or len(turns) % 2:
        raise DataError(f"{place}: column 'turns' holds {short(turns)}; what is shown and replies in turns were expected.")
    for number in range(0, len(turns), 2):
        shown, replied = (_present(entry) for entry in turns[number : number + 2])
        where = f"{place}: column 'turns', entry {number}"
        if not isinstance(shown, dict) or len({"prompt", "messages"} & shown.keys()) != 1:
            raise DataError(f"{where} is {short(shown)}; what is shown was expected: `prompt` (text) or `messages`.")
        if not isinstance(replied, dict) or not isinstance(replied.get("reply"), str):  # it may be empty: nothing but the end token
            raise DataError(f"{place}: column 'turns', entry {number + 1} is {short(replied)}; a `reply` was expected.")
        prompt, messages = prompt_of(shown.get("prompt", shown.get("messages")), "turns", where)
        yield Exchange(prompt, messages, replied["reply"], bool(replied.get("imitate", True)))


def _present(entry: Any) -> Any:
    """An entry without its empty fields: in Parquet, every entry has those of all the others."""
    return {name: value for name, value in entry.items() if value is not None} if isinstance(entry, dict) else entry


def _conversation(messages: Any, place: str) -> Iterator[Exchange]:
    """A conversation, cut before every message of the assistant."""
    _, said = prompt_of(messages, "messages", place)
    shown: list[Message] = []
    num_replies = 0
    for message in said or ():
        if message["role"] == "assistant":
            if not shown:
                raise DataError(f"{place}: column 'messages': two messages of the assistant in a row, or one at the beginning.")
            yield Exchange(None, tuple(shown), reply_of(message.get("content"), f"{place}: column 'messages'"))
            shown, num_replies = [], num_replies + 1
        else:
            shown.append(message)
    if not num_replies:
        raise DataError(f"{place}: column 'messages' has no message of the assistant: there is nothing to imitate.")


def _id(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str | int) or value == "":
        raise DataError(f"{place}: column '{column}' holds {short(value)}; an id is text or a whole number.")
    return str(value)


def _domain(row: Row, default: str, needs: Mapping[str, Needs], place: str) -> str:
    domain = row.get("domain")
    if domain is None:
        domain = default
    if not isinstance(domain, str) or not domain:
        raise DataError(f"{place}: column 'domain' holds {short(domain)}; a name was expected.")
    if domain not in needs and ANY not in needs:
        raise DataError(
            f"{place}: its domain is '{domain}'; {' or '.join(needs)} was expected.{nearest(domain, needs)} A column `domain` in the "
            f"row, or `domain` beside the path, says which it is; `domains` names those that there are."
        )
    return domain
