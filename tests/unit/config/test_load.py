"""Reading, merging, overriding and checking configs; and what the user is told when something is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config.load import apply_override, check_config, load_config, merge, parse_yaml, resolved_yaml
from drumroll.config.models import PIPELINES, RlConfig
from drumroll.config.sections import keys_below
from drumroll.config.synonyms import SYNONYMS
from drumroll.errors import ConfigError


def minimal(**changes: Any) -> dict[str, Any]:
    return {
        "pipeline": "rl",
        "max_steps": 3,
        "model": {"path": "some/model"},
        "data": {"train": {"path": "train.jsonl"}},
        "rewards": [{"kind": "exact_match"}],
        **changes,
    }


def complaint(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(minimal(**changes))
    return str(caught.value)


def test_a_minimal_config_gets_every_default() -> None:
    cfg = check_config(minimal())
    assert isinstance(cfg, RlConfig)
    assert (cfg.trainer.kind, cfg.engine.kind, cfg.env.kind, cfg.algo.advantage.kind) == ("fsdp2", "native", "single_turn", "grpo")
    assert (cfg.rollout.sampling.temperature, cfg.rollout.sampling.top_p, cfg.rollout.sampling.top_k) == (1.0, 1.0, 0)


def test_the_resolved_config_loads_to_an_equal_one() -> None:
    cfg = check_config(minimal(trainer={"lr": "3e-4"}, devices={"actor_train": "0-1"}, algo={"kl": {"coef": 0.1}}))
    assert check_config(yaml.safe_load(resolved_yaml(cfg))) == cfg


def test_files_merge_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(minimal(trainer={"lr": 1e-3, "weight_decay": 0.1}, seed=1)))
    (tmp_path / "b.yaml").write_text("trainer: {lr: 2e-3}\nseed: 2\n")
    cfg = load_config(
        [tmp_path / "a.yaml", tmp_path / "b.yaml"],
        ["seed=3", "algo.advantage.kind=rloo", "rewards.0.weight=2", "rollout.sampling.stop=['x']", "run_dir=some/where"],
    )
    assert isinstance(cfg, RlConfig)
    assert (cfg.trainer.lr, cfg.trainer.weight_decay, cfg.seed) == (2e-3, 0.1, 3)
    assert (cfg.algo.advantage.kind, cfg.rewards[0].weight, cfg.rollout.sampling.stop, cfg.run_dir) == ("rloo", 2.0, ("x",), "some/where")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"max_stepz": 3}, ["`max_stepz`", "unknown key", "Did you mean 'max_steps'?"]),
        (
            {"trainer": {"learning_rate": 1}},
            ["`trainer.learning_rate`: unknown key. Did you mean `trainer.lr`? Known here: lr, schedule, "],
        ),
        ({"learning_rate": 1}, ["`learning_rate`", "Did you mean `trainer.lr`, `critic.lr` or `warmup.lr`?"]),
        ({"rollout": {"max_new_tokens": 9}}, ["Did you mean `rollout.sampling.max_new_tokens`?"]),
        ({"algo": {"beta": 0.1}}, ["Did you mean `algo.kl.coef`?"]),
        ({"num_generations": 9}, ["Did you mean `rollout.group_size`?"]),
        ({"parallel": {"actor_infer": {"tensor_parallel_size": 2}}}, ["Did you mean `parallel.actor_infer.tp`?"]),
        ({"domains": {"Sums": {"share": 1, "temperature": 0.5}}}, ["`domains.Sums.temperature`", "`domains.Sums.sampling.temperature`?"]),
        ({"heldout": {"path": "x"}}, ["`heldout`: unknown key. It belongs to `pipeline: sft`. Did you mean `data.heldout`?"]),
        ({"trainer": {"lr": "fast"}}, ["`trainer.lr`", "got 'fast' (str)", "a valid number"]),
        ({"rewards": [{"kind": "exact_match", "fild": "a"}]}, ["`rewards.0.fild`", "Did you mean 'field'?"]),
        ({"rewards": ["math", {"kind": "exact_match", "fild": "a"}]}, ["`rewards.1.fild`", "Did you mean 'field'?", "ignore_case"]),
        ({"rewards": "exact_match"}, ["`rewards`: got 'exact_match' (str), expected a list, such as `[exact_match]`."]),
        ({"rewards": {"kind": "math"}}, ["`rewards`: got {'kind': 'math'} (dict), expected a list, such as `[{kind: math}]`."]),
        ({"rewards": 3}, ["`rewards`: got 3 (int), expected a list."]),
        ({"model": "Qwen/x"}, ["`model`: got 'Qwen/x' (str), expected a section, such as `{path: Qwen/x}`. Its keys: path, revision, "]),
        ({"algo": {"kl": 0.1}}, ["`algo.kl`: got 0.1 (float), expected a section, such as `{coef: 0.1}`. Its keys: coef, estimator, "]),
        ({"data": "x.jsonl"}, ["`data`: got 'x.jsonl' (str), expected a section. Its keys: train, heldout."]),
        ({"checkpoint": True}, ["`checkpoint`: got True (bool), expected a section. Its keys: every, "]),
        ({"domains": 3}, ["`domains`: got 3 (int), expected a mapping."]),
        ({"rewards": [{"kind": "exact_mach"}]}, ["`rewards.0.kind`", "no reward named 'exact_mach'", "Did you mean 'exact_match'?"]),
        ({"rewards": []}, ["`rewards`", "`env.kind`"]),
        ({"algo": {"advantage": "grop"}}, ["`algo.advantage.kind`", "Did you mean 'grpo'?", "plugins"]),
        ({"algo": {"aggregation": "tokn_mean"}}, ["`algo.aggregation`", "Did you mean 'token_mean'?"]),
        ({"algo": {"updates_per_step": 9999}}, ["`algo.updates_per_step`", "`rollout.group_size`"]),
        ({"devices": {"actor_train": 2.5}}, ["`devices.actor_train`", "got 2.5 (float)"]),
        ({"devices": {"actr_train": "0"}}, ["`devices.actr_train`", "actor_train"]),
        ({"model": {}}, ["`model`", "`path`", "`scratch`"]),
        ({"eval": {"every": 5}}, ["`eval.every`", "`data.heldout`"]),
        ({"plugins": ["no_such_module_here"]}, ["`plugins`", "no_such_module_here", "cannot be imported"]),
        ({"rollout": {"sampling": {"top_p": 0.0}}}, ["`rollout.sampling.top_p`", "greater than 0"]),
        ({"pipeline": "rll"}, ["`pipeline`", "got 'rll'", "rl, sft", "Did you mean 'rl'?"]),
        ({"pipeline": "ppo"}, ["`pipeline`", "PPO, GRPO and the like by `algo` of `pipeline: rl`", "`preference.kind`"]),
        ({"pipeline": None}, ["`pipeline`: got nothing", "drumroll train BASE.yaml OVER.yaml"]),
    ],
)
def test_a_mistake_is_named_with_its_key_and_what_is_accepted(changes: dict[str, Any], parts: list[str]) -> None:
    text = complaint(**changes)
    for part in parts:
        assert part in text


def test_what_is_known_in_a_section_is_told_once() -> None:
    lines = complaint(pipeline="preference", preference={"kind": "dpo", "data": {"path": "x"}}, trainer={"a": 1, "b": 2}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["`trainer.a`", "`trainer.b`", "`max_steps`", "`data`", "`rewards`"]
    assert [line.partition(":")[0] for line in lines if "Known here" in line] == ["`trainer.b`", "`rewards`"]
    assert "`rewards`: unknown key. It belongs to `pipeline: rl`. Known here: name, seed, " in lines[-1]


def test_every_synonym_leads_somewhere() -> None:
    kinds = {"engine": "vllm", "preference": "dpo"}
    known = {f".{key}" for model in PIPELINES.values() for key in keys_below(model, kinds, "")}
    assert {key for keys in SYNONYMS.values() for key in keys if not any(place.endswith(f".{key}") for place in known)} == set()
    assert not {name for name in SYNONYMS if name != name.lower()}


def test_every_mistake_is_told_at_once() -> None:
    text = complaint(max_stepz=1, trainer={"lr": "x"}, algo={"loss": {"kind": "ppo"}})
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1, 2", "line"),
        ("a: 1\na: 2", "key 'a' appears twice"),
        ("- 1\n- 2", "expected a mapping"),
        ("just words", "expected a mapping"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml") as caught:
        load_config([tmp_path / "bad.yaml"])
    assert part in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"Did you mean 'quickstart\.yaml'"):
        load_config([tmp_path / "quikstart.yaml"])


def test_an_override_goes_into_what_is_given_by_its_name_alone() -> None:
    tree = minimal(rewards=["exact_match"], algo={"advantage": "gigpo"})
    apply_override(tree, "rewards.0.weight=2")
    apply_override(tree, "algo.advantage.discount=0.5")
    apply_override(tree, "algo.loss.clip_high=0.28")
    assert tree["rewards"] == [{"kind": "exact_match", "weight": 2}]
    assert tree["algo"] == {"advantage": {"kind": "gigpo", "discount": 0.5}, "loss": {"clip_high": 0.28}}
    cfg = check_config(tree)
    assert isinstance(cfg, RlConfig)
    assert cfg.algo.loss.kind == "ppo_clip"


@pytest.mark.parametrize("override", ["novalue", "=3", "a..b=1", "rewards.7.weight=1", "max_steps.deeper=1"])
def test_a_bad_override_is_refused(override: str) -> None:
    tree = minimal(max_steps=[1])
    with pytest.raises(ConfigError, match="override"):
        apply_override(tree, override)


trees = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.text(max_size=3)),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), trees), st.dictionaries(st.sampled_from("abc"), trees))
def test_merging_keeps_every_key_and_lets_the_right_side_win(left: dict[str, Any], right: dict[str, Any]) -> None:
    merged = merge(left, right)
    assert set(merged) == set(left) | set(right)
    assert merge(merged, right) == merged
    for key, value in right.items():
        if not isinstance(value, dict):
            assert merged[key] == value


def test_yaml_numbers_without_a_dot_become_floats_where_floats_are_meant() -> None:
    assert parse_yaml("3e-6", "here") == "3e-6"
    cfg = check_config(minimal(trainer={"lr": "3e-6"}))
    assert cfg.trainer.lr == 3e-6
