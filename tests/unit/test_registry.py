"""Functions as entries of a config: where their options and help texts come from, and what is said when there is no such function."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from drumroll.errors import PluginError
from drumroll.registry import REGISTRY, Entry, Variant, explained_names


def reward(trajectory: Any, *, column: str, scale: Annotated[float, Field(gt=0, description="Factor.")] = 1.0, extra: int = 0) -> float:
    """A reward.

    Options:
        column: Where it stands,
            in words: any.
        scale (float): A factor.

    Returns:
        extra: not an option
    """
    return scale + extra


def test_options_are_explained_by_the_docstring() -> None:
    fields = Entry("reward", "reward", reward).schema(Variant).model_fields
    assert {name: field.description for name, field in fields.items() if name != "kind"} == {
        "column": "Where it stands, in words: any.",
        "scale": "A factor.",
        "extra": None,
    }
    assert fields["column"].is_required()
    assert (fields["scale"].default, fields["extra"].default) == (1.0, 0)


def test_options_may_be_explained_by_their_types() -> None:
    def plain(trajectory: Any, *, scale: Annotated[float, Field(gt=0, description="Factor.")] = 1.0) -> float:
        return scale

    assert Entry("reward", "plain", plain).schema(Variant).model_fields["scale"].description == "Factor."


def test_a_docstring_without_the_section() -> None:
    assert explained_names("A reward.", "Options") == explained_names("", "Options") == {}


def test_a_function_that_a_file_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def vowels(trajectory):\n    return 0.0\n")
    with pytest.raises(PluginError) as caught:
        REGISTRY.lookup("reward", f"{path}:vowel")
    assert str(caught.value) == f"'{path}:vowel': there is no function or class 'vowel'. Did you mean 'vowels'?"
