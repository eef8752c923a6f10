"""docs/algorithms.md: every config on the page is accepted, and every built-in function is on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumroll.algo.algorithm import build_algorithm
from drumroll.config.load import check_config
from drumroll.config.models import RlConfig
from drumroll.registry import REGISTRY

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
TABLE = dict(re.findall(r"^\| ([^|]+) \| `(\{algo: .*\})` \|$", PAGE, re.MULTILINE))
BLOCKS = [text for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if text.startswith("algo:")]


def config(sections: dict[str, Any]) -> RlConfig:
    rest = {"model": {"path": "some/model"}, "data": {"train": {"path": "x.jsonl"}}, "rewards": ["exact_match"]}
    cfg = check_config({"pipeline": "rl", "max_steps": 100, **rest, **sections})
    assert isinstance(cfg, RlConfig)
    return cfg


@pytest.mark.parametrize("text", [*TABLE.values(), *BLOCKS], ids=[*TABLE, *(f"block {n}" for n in range(len(BLOCKS)))])
def test_every_config_is_accepted(text: str) -> None:
    build_algorithm(config(yaml.safe_load(text)).algo)


def test_the_table_has_the_common_ones() -> None:
    names = {
        "PPO",
        "GRPO",
        "Dr. GRPO",
        "DAPO",
        "RLOO",
        "REINFORCE++",
        "GSPO",
        "CISPO",
        "TOPR",
        "Kimi k1.5",
        "ReMax",
        "GiGPO",
        "decoupled PPO",
    }
    assert names <= set(TABLE)


@pytest.mark.parametrize("family", ["advantage", "loss", "correction"])
def test_every_function_is_explained(family: str) -> None:
    assert [name for name in REGISTRY.built_in(family) if f"| `{name}` |" not in PAGE] == []
