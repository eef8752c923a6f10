"""docs/config.md is what the config says of itself."""

import inspect
import re
from itertools import pairwise
from pathlib import Path

import pytest

from drumroll.config.reference import reference
from drumroll.errors import PluginError
from drumroll.registry import FAMILIES, REGISTRY, explained_names

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def cells(row: str) -> list[str]:
    """As GitHub reads it: a pipe divides cells unless there is a backslash before it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    return [cells(line) for line in reference().splitlines() if line.startswith(("| `", "| (`"))]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make docs`"


def test_every_table_is_whole() -> None:
    lines = reference().splitlines()
    assert {len(cells(line)) for line in lines if line.startswith("|")} == {4}
    assert all(line.endswith("|") for line in lines if line.startswith("|"))
    ends = [after for before, after in pairwise(lines) if before.startswith("|") and not after.startswith("|")]
    begins = [before for before, after in pairwise(lines) if after.startswith("|") and not before.startswith("|")]
    num_tables = lines.count("| key | type | default | what it does |")
    assert ends == [""] * (num_tables - 1)  # the last one ends the page
    assert begins == [""] * num_tables


def test_every_key_says_what_it_does(rows: list[list[str]]) -> None:
    assert len(rows) > 80
    assert [key for key, *_, what in rows if not what or what.startswith("Base of")] == []
    assert any(key == "(`fsdp2`) `trainer.reshard_after_forward`" for key, *_ in rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_options_that_there_are_are_explained(family: str) -> None:
    for name in REGISTRY.built_in(family):
        try:
            function = REGISTRY.lookup(family, name).target
        except PluginError:  # a package that it needs
            continue
        options = {
            parameter.name for parameter in inspect.signature(function).parameters.values() if parameter.kind is parameter.KEYWORD_ONLY
        }
        assert set(explained_names(inspect.getdoc(function) or "", "Options")) <= options, name


@pytest.mark.parametrize(
    ("key", "type_", "default"),
    [
        ("`parallel`", "mapping of sections", ""),
        ("`domains`", "mapping of sections", ""),
        ("`rewards`", "list of sections", "`[]`"),
        ("`domains.<name>.rewards`", "list of sections", ""),
        ("(`agent`) `env.variables`", "mapping", ""),
        ("`model.scratch.config`", "mapping", ""),
        ("`algo.advantage.kind`", "name", "`grpo`"),
        ("`algo.loss.kind`", "name", "`ppo_clip`"),
        ("`algo.correction.kind`", "name", "required"),
        ("(`sokoban`) `env.prompt_end`", "text", r'`"\n>"`'),
        ("(`sokoban`) `env.separator`", "text", r"`\|\|`"),
        ("(`sokoban`) `env.moves`", "list", "`[Up, Down, Left, Right]`"),
        ("`trainer.offload`", "true, false", "`false`"),
    ],
)
def test_types_and_defaults(rows: list[list[str]], key: str, type_: str, default: str) -> None:
    assert {(row[1], row[2]) for row in rows if row[0] == key} == {(type_, default)}
