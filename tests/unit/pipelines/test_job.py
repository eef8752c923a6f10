"""What is found out before anything starts: tasks that no reward could judge, and models that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumroll.config.load import check_config
from drumroll.config.models import RlConfig
from drumroll.errors import ConfigError, DataError, ModelError
from drumroll.pipelines.job import RlJob, _check_engine, _check_parallel, prepare


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


def test_who_wants_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no column 'anser'.* Name the right one by `rewards\.0\.field`\.$"):
        job(tmp_path, [GOOD], {"kind": "exact_match", "field": "anser"})
    (tmp_path / "lake.jsonl").write_text('{"seed": 1}\n')
    lake: dict[str, Any] = {"share": 1, "data": {"train": {"path": str(tmp_path / "lake.jsonl")}}, "env": {"kind": "frozen_lake"}}
    with pytest.raises(DataError, match=r"by `rewards\.0\.field`, or give domain 'lake' its own `rewards`\."):
        prepare(checked({"scratch": {"characters": "01"}}, domains={"lake": lake}))
    own = [{"kind": "format", "pattern": "x"}, {"kind": "exact_match"}]
    with pytest.raises(DataError, match=r"by `domains\.lake\.rewards\.1\.field`\."):
        prepare(checked({"scratch": {"characters": "01"}}, domains={"lake": {**lake, "rewards": own}}))


def test_replies_that_are_longer_than_the_model_reads_are_noted(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(GOOD) + "\n")
    model = {"scratch": {"characters": "01", "config": {"max_position_embeddings": 64}}}
    data = {"train": {"path": str(tmp_path / "tasks.jsonl")}}
    (note,) = prepare(checked(model, data=data, rollout={"sampling": {"max_new_tokens": 65}})).notes
    assert note.startswith("`rollout.sampling.max_new_tokens` is 65, but the model has positions for 64 tokens")
    domains = {"default": {"share": 1, "sampling": {"max_new_tokens": 65}}}
    (note,) = prepare(checked(model, data=data, rollout={"sampling": {"max_new_tokens": 9}}, domains=domains)).notes
    assert note.startswith("`domains.default.sampling.max_new_tokens` is 65")
    assert prepare(checked(model, data=data, rollout={"sampling": {"max_new_tokens": 64}})).notes == ()


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


FACTS = {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 8, "max_position_embeddings": 4096}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM and SGLang were here, in versions that are supported."""
    versions = {"vllm": "0.26.0", "sglang": "0.5.23"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)


def checked(model: dict[str, Any], **sections: Any) -> RlConfig:
    tree = {
        "pipeline": "rl",
        "max_steps": 1,
        "model": model,
        "data": {"train": {"path": "tasks.jsonl"}},
        "rewards": [{"kind": "exact_match"}],
    }
    config = check_config({**tree, "rewards": [{"kind": "exact_match"}], **sections})
    assert isinstance(config, RlConfig)
    return config


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("tp", "said"),
    [(2, ""), (4, ""), (12, ""), (5, "does not divide the model's 12 attention heads"), (6, "4 key-value heads")],
)
def test_engines_span_as_many_devices_as_divide_their_heads(tp: int, said: str) -> None:
    scratch = {"characters": "01", "config": {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48}}
    config = checked({"scratch": scratch}, engine={"kind": "sglang"}, parallel={"actor_infer": {"tp": tp}})
    if not said:
        return _check_parallel(config)
    with pytest.raises(ConfigError, match=said):
        _check_parallel(config)
    return None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("kind", "changes", "engine", "said"),
    [
        ("vllm", {"model_type": "mixtral", "num_local_experts": 8}, {}, "it has experts"),
        ("vllm", {"model_type": "qwen3_moe", "num_experts": 8}, {}, ""),
        ("sglang", {"model_type": "mixtral", "num_local_experts": 8}, {}, "of qwen3_moe"),
        ("sglang", {"model_type": "qwen3_moe", "num_experts": 8}, {}, ""),
        ("sglang", {"model_type": "mistral", "sliding_window": 1024}, {}, "made to see 1024 of them"),
        ("sglang", {"model_type": "mistral", "sliding_window": 1024}, {"context_tokens": 1024}, ""),
        ("sglang", {"model_type": "mistral", "sliding_window": None}, {}, ""),
        ("native", {"model_type": "mixtral", "num_local_experts": 8}, {}, ""),
    ],
)
def test_a_model_that_an_engine_does_not_serve_is_refused_before_it_starts(
    tmp_path: Path, kind: str, changes: dict[str, Any], engine: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FACTS, **changes}))
    config = checked({"path": str(tmp_path)}, engine={"kind": kind, **engine})
    if not said:
        return _check_engine(config)
    with pytest.raises(ModelError, match=rf"`engine\.kind: {kind}` cannot serve this model: .*{said}"):
        _check_engine(config)
    return None
