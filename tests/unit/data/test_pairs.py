"""Preferences from every form of row, and what is said when one is not as it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from drumroll.config.models import PreferenceConfig, SourceConfig
from drumroll.data.pairs import Judgement, Pair, load_judgements, load_pairs
from drumroll.errors import DataError
from drumroll.registry import REGISTRY
from drumroll.types import Exchange

USER = {"role": "user", "content": "2+2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
CHAT_PAIR = Pair(Exchange(None, (USER,), "4"), Exchange(None, (USER,), "5"))


def section(path: Path, kind: str = "dpo", **options: Any) -> PreferenceConfig:
    schema = REGISTRY.lookup("preference_loss", kind).schema(PreferenceConfig)
    return schema.model_validate({"kind": kind, "data": {"path": str(path)}, **options})


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(path: Path, **options: Any) -> list[Pair]:
    cfg = section(path, **options)
    return load_pairs(cfg, cfg.data)


def judgements(path: Path, **options: Any) -> list[Judgement]:
    cfg = section(path, "kto", **options)
    return load_judgements(cfg, cfg.data)


def test_text(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    assert pairs(path) == [Pair(Exchange("2+2=", None, "4"), Exchange("2+2=", None, "5"))]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2+2?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["text replies", "replies as messages", "whole beside prompt", "whole beside text", "text prompt", "null prompt", "whole"],
)
def test_every_form_of_conversation_is_the_same_pair(tmp_path: Path, row: dict[str, Any]) -> None:
    assert pairs(write(tmp_path / "rows.jsonl", row)) == [CHAT_PAIR]


def test_earlier_replies_belong_to_the_prompt(tmp_path: Path) -> None:
    before = [USER, BAD, {"role": "user", "content": "Sure?"}]
    (pair,) = pairs(write(tmp_path / "rows.jsonl", {"chosen": [*before, GOOD], "rejected": [*before, BAD]}))
    assert pair == Pair(Exchange(None, tuple(before), "4"), Exchange(None, tuple(before), "5"))


def test_whole_texts_are_cut_at_the_last_space_that_they_share(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        {"chosen": "Human: Hi!\n\nAssistant: Hello there", "rejected": "Human: Hi!\n\nAssistant: Help"},
        {"chosen": "ask: yes", "rejected": "ask: yes indeed"},
    )
    first, second = pairs(path)
    assert first == Pair(Exchange("Human: Hi!\n\nAssistant:", None, " Hello there"), Exchange("Human: Hi!\n\nAssistant:", None, " Help"))
    assert second == Pair(Exchange("ask:", None, " yes"), Exchange("ask:", None, " yes indeed"))


def test_parquet_other_columns_and_margins(tmp_path: Path) -> None:
    rows = [{"question": [USER], "better": [GOOD], "worse": [BAD], "by": 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    cfg = section(tmp_path / "rows.parquet", chosen_field="better", rejected_field="worse", margin_field="by")
    source = SourceConfig(path=str(tmp_path / "rows.parquet"), prompt_field="question")
    assert load_pairs(cfg, source) == [Pair(CHAT_PAIR.chosen, CHAT_PAIR.rejected, 2.0)]


def test_judged_replies_and_pairs_that_become_two(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        {"prompt": "2+2=", "completion": "4", "label": True},
        {"prompt": [USER], "completion": [BAD], "label": 0},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    )
    assert judgements(path) == [
        Judgement(Exchange("2+2=", None, "4"), True),
        Judgement(Exchange(None, (USER,), "5"), False),
        Judgement(Exchange("1+1=", None, "2"), True),
        Judgement(Exchange("1+1=", None, "3"), False),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2=", "completion": "4", "label": True}, "line 2: there is no column 'chosen'.*`chosen_field`"),
        ({"prompt": "2+2=", "chosen": "4"}, "line 2: there is no column 'rejected'"),
        ({"prompt": "2+2=", "chosen": "4", "rejected": ""}, "line 2: column 'rejected' holds ''; the text of a reply was expected"),
        ({"prompt": "2+2=", "chosen": 4, "rejected": "5"}, "line 2: column 'chosen' holds 4; a reply is text or a list of chat messages"),
        ({"prompt": 7, "chosen": "4", "rejected": "5"}, "line 2: column 'prompt' holds 7"),
        ({"chosen": "4", "rejected": "5"}, "line 2: there is no column 'prompt', and the two texts have no beginning in common"),
        ({"chosen": "4", "rejected": [BAD]}, "line 2: there is no column 'prompt'"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "line 2: column 'chosen' is a reply without a prompt"),
        ({"chosen": [USER], "rejected": [USER]}, "line 2: column 'chosen': its last message is of 'user'"),
        (
            {"chosen": [USER, {"role": "assistant", "content": [{"type": "text"}]}], "rejected": [USER, BAD]},
            "line 2: column 'chosen', last",
        ),
        ({"chosen": [USER, {"content": "4"}], "rejected": [USER, BAD]}, "line 2: column 'chosen', message 1 has no `role`"),
        ({"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "3+3?"}, BAD]}, "line 2: .*differ before their last messages"),
    ],
)
def test_a_malformed_pair_is_refused_by_file_and_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, row)
    with pytest.raises(DataError, match=message) as error:
        pairs(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "line 1: there is no column 'label'.*`label_field`"),
        ({"prompt": "2+2=", "completion": "4", "label": "yes"}, "line 1: column 'label' holds 'yes'; true or false was expected"),
        ({"prompt": "2+2=", "completion": "4", "label": 2}, "line 1: column 'label' holds 2"),
        ({"completion": "4", "label": True}, "line 1: there is no column 'prompt'"),
    ],
)
def test_a_malformed_judgement_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        judgements(write(tmp_path / "rows.jsonl", row))


@pytest.mark.parametrize("margin", [True, "2", None, float("inf")])
def test_a_margin_is_a_number(tmp_path: Path, margin: Any) -> None:
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5", "by": margin}
    with pytest.raises(DataError, match=r"column 'by' holds .*a number was expected"):
        pairs(write(tmp_path / "rows.jsonl", row), margin_field="by")
