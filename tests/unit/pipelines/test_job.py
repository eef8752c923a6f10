"""What is found out before anything starts: tasks that no reward could judge, and models that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumroll.config.load import check_config
from drumroll.errors import DataError, ModelError
from drumroll.pipelines.job import RlJob, prepare


def job(folder: Path, rows: list[dict[str, Any]], *rewards: dict[str, Any]) -> RlJob:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "pipeline": "rl",
        "max_steps": 1,
        "model": {"scratch": {"characters": "01"}},
        "data": {"train": {"path": str(path)}},
        "rewards": list(rewards),
    }
    prepared = prepare(check_config(tree))
    assert isinstance(prepared, RlJob)
    return prepared


GOOD = {"prompt": "?", "tests": ["assert f(1) == 2"], "answer": "2", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.parametrize(
    ("reward", "broken", "said"),
    [
        ({"kind": "code"}, {"tests": ["assert f(1) =="]}, "reward 'code' cannot judge it"),
        ({"kind": "code"}, {"tests": 7}, "reward 'code' cannot judge it"),
        ({"kind": "numeric_match"}, {"answer": "two"}, "reward 'numeric_match' cannot judge it"),
        ({"kind": "math"}, {"answer": ""}, "reward 'math' cannot judge it"),
        ({"kind": "instructions"}, {"instruction_id_list": ["punctuation:no_coma"]}, "reward 'instructions' cannot judge it"),
    ],
)
def test_a_task_that_a_reward_cannot_judge_is_named(tmp_path: Path, reward: dict[str, Any], broken: dict[str, Any], said: str) -> None:
    assert len(job(tmp_path, [GOOD, GOOD], reward).tasks["*"]) == 2
    with pytest.raises(DataError, match="task 'train-1': ") as error:
        job(tmp_path, [GOOD, GOOD | broken], reward)
    assert said in str(error.value)


def test_the_reward_role_exists_where_a_reward_is_pooled(tmp_path: Path) -> None:
    assert "reward" not in job(tmp_path, [GOOD], {"kind": "exact_match"}).roles
    assert "reward" in job(tmp_path, [GOOD], {"kind": "exact_match", "pooled": True}).roles
    assert "reward" in job(tmp_path, [GOOD], {"kind": "code"}).roles
    assert "reward" not in job(tmp_path, [GOOD], {"kind": "math", "pooled": False}).roles


def test_a_reward_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        job(tmp_path, [GOOD], {"kind": "reward_model", "model": {"path": "./nowhere"}})
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        job(tmp_path, [GOOD], {"kind": "reward_model", "model": {"path": str(tmp_path / "model")}})


def test_demonstrations_with_nothing_to_imitate_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    tree = {
        "pipeline": "sft",
        "model": {"scratch": {"characters": "01"}},
        "sft": {"data": {"path": str(path)}, "steps": 1},
    }
    silent = {"turns": [{"prompt": "0"}, {"reply": "1", "imitate": False}]}
    masked = {"turns": [{"prompt": "0"}, {"reply": "1"}], "token_ids": [1, 2], "loss_mask": [0, 0]}
    path.write_text(json.dumps(silent) + "\n" + json.dumps(masked) + "\n")
    with pytest.raises(DataError, match=r"`sft\.data`: .* has nothing to learn from"):
        prepare(check_config(tree))
    path.write_text(json.dumps(silent) + "\n" + json.dumps({"prompt": "0", "completion": "1"}) + "\n")
    prepare(check_config(tree))
