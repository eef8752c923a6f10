"""The recipes: every one is a config that can be read, and what Sokoban's is evaluated on is new to it."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from drumroll.config.load import load_config
from drumroll.envs.sokoban import Sokoban

RECIPES = sorted(Path("recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_read_as_its_head_says(path: Path) -> None:
    commands = re.findall(r"^#   drumroll train (.*\.yaml)", path.read_text(), re.MULTILINE)
    files = next(files for command in commands if (files := command.split())[-1] == str(path))
    assert load_config(files).name == yaml.safe_load(path.read_text())["name"]


def test_no_held_out_level_of_sokoban_is_trained_on() -> None:
    folder = Path("recipes/sokoban")
    env = load_config(["recipes/sokoban.yaml"]).env
    assert isinstance(env, Sokoban.Config)

    def boards(name: str) -> list[str]:
        seeds = [json.loads(line)["seed"] for line in (folder / name).read_text().splitlines()]
        return [Sokoban(env).begin(seed).prompt or "" for seed in seeds]

    heldout, train = boards("heldout.jsonl"), set(boards("train.jsonl"))
    shown = {turns[0]["prompt"] for turns in pq.read_table(folder / "demonstrations.parquet")["turns"].to_pylist()}
    assert len(set(heldout)) == len(heldout) == 256
    assert not set(heldout) & train
    assert shown <= train
