"""docs/config.md is what the config says of itself."""

from pathlib import Path

from drumroll.config.reference import reference

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make docs`"


def test_every_key_says_what_it_does() -> None:
    rows = [line for line in reference().splitlines() if line.startswith(("| `", "| (`"))]
    own = [row for row in rows if not row.startswith("| (`")]  # a function's options are explained by its docstring
    assert len(rows) > 80
    assert [row for row in own if row.endswith("|  |")] == []
    assert any("(`fsdp2`) `trainer.reshard_after_forward`" in row for row in rows)
