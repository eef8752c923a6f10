"""Settings of an algorithm that cannot work are refused when the config is read, by their dotted keys."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from drumroll.config.load import check_config, resolved_yaml
from drumroll.config.models import RlConfig
from drumroll.errors import ConfigError


def config(algo: Any = None, **sections: Any) -> RlConfig:
    tree = {
        "pipeline": "rl",
        "max_steps": 3,
        "model": {"path": "some/model"},
        "data": {"train": {"path": "train.jsonl"}},
        "rewards": ["exact_match"],
        "algo": algo or {},
        **sections,
    }
    cfg = check_config(tree)
    assert isinstance(cfg, RlConfig)
    return cfg


@pytest.mark.parametrize(
    ("algo", "keys"),
    [
        ({"loss": {"kind": "ppo_clip", "clip_low": 1.0}}, ["`algo.loss.clip_low`", "less than 1"]),
        ({"loss": {"kind": "ppo_clip", "clip_low": -0.1}}, ["`algo.loss.clip_low`"]),
        ({"loss": {"kind": "gspo", "clip_high": -0.1}}, ["`algo.loss.clip_high`"]),
        ({"loss": {"kind": "ppo_clip", "clip_high": float("inf")}}, ["`algo.loss.clip_high`", "finite"]),
        ({"loss": {"kind": "ppo_clip", "dual_clip": 1.0}}, ["`algo.loss.dual_clip`", "greater than 1"]),
        ({"loss": {"kind": "cispo", "cap": 0.5}}, ["`algo.loss.cap`"]),
        ({"loss": {"kind": "cispo", "floor": 1.5}}, ["`algo.loss.floor`"]),
        ({"loss": {"kind": "kimi", "tau": 0}}, ["`algo.loss.tau`"]),
        ({"loss": {"kind": "ppo_clip", "dual_clp": 3}}, ["`algo.loss.dual_clp`", "Did you mean 'dual_clip'?"]),
        ({"advantage": {"kind": "gigpo", "discount": 1.5}}, ["`algo.advantage.discount`"]),
        ({"advantage": {"kind": "grpo", "eps": 0}}, ["`algo.advantage.eps`"]),
        ({"correction": {"kind": "truncated_is", "cap": 0.5}}, ["`algo.correction.cap`"]),
        ({"correction": {"kind": "masked_is", "level": "sequnce"}}, ["`algo.correction.level`", "Did you mean 'sequence'?"]),
        ({"correction": {"kind": "masked_is", "bounds": [2, 0.5]}}, ["`algo.correction.bounds`", "[2, 0.5]", "smaller bound first"]),
        ({"correction": {"kind": "masked_is", "bounds": [1.5, 2]}}, ["`algo.correction.bounds`", "around 1"]),
        ({"loss": "topr", "correction": "decoupled"}, ["`algo.loss.kind` topr", "`algo.correction.kind` decoupled"]),
        ({"kl": {"coef": 0}}, ["`algo.kl.coef`"]),
        ({"kl": {"coef": 0.1, "applied_to": "rewards"}}, ["`algo.kl.applied_to`", "Did you mean 'reward'?"]),
        ({"kl": {"coef": 0.1, "adaptive": {"target": -1}}}, ["`algo.kl.adaptive.target`"]),
        ({"entropy_coef": -0.1}, ["`algo.entropy_coef`"]),
        ({"reward_scaling": {}}, ["`algo.reward_scaling`", "nothing is scaled"]),
        ({"advantage_scaling": {"clip": [1, -1]}}, ["`algo.advantage_scaling.clip`", "[1, -1]"]),
        ({"masks": {"success_rate": [0.9, 0.1]}}, ["`algo.masks.success_rate`", "smaller bound first"]),
        ({"masks": {"success_rate": [0.5, 1.5]}}, ["`algo.masks.success_rate.1`"]),
        ({"masks": {"sequence_ratio": [2, 3]}}, ["`algo.masks.sequence_ratio`", "around 1"]),
        ({"masks": {"longer_than": 0}}, ["`algo.masks.longer_than`"]),
        ({"masks": {"token_staleness": 2}}, ["`algo.masks.token_staleness`", "`rollout.max_staleness`"]),
        ({"aggregation": "groups_mean"}, ["`algo.aggregation`", "Did you mean 'group_mean'?"]),
    ],
)
def test_bad_options_are_named(algo: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(algo)
    for key in keys:
        assert key in str(caught.value)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "remax", "gigpo"])
def test_groups_of_one_are_refused_where_members_are_compared(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"`algo\.advantage\.kind` {kind} compares .* `rollout\.group_size` is 1"):
        config({"advantage": kind}, rollout={"group_size": 1})
    assert config({"advantage": kind}, rollout={"group_size": 2}).algo.advantage.kind == kind


@pytest.mark.parametrize("kind", ["reinforce", "reinforce_pp", "step_level"])
def test_groups_of_one_are_fine_where_the_batch_is_compared(kind: str) -> None:
    assert config({"advantage": kind}, rollout={"group_size": 1}).rollout.group_size == 1
    with pytest.raises(ConfigError, match=r"`algo\.reward_scaling\.normalise` is group, and with `rollout\.group_size` 1"):
        config({"advantage": kind, "reward_scaling": {"normalise": "group"}}, rollout={"group_size": 1})


def test_remax_needs_samples_that_are_not_greedy_and_one_that_is() -> None:
    with pytest.raises(ConfigError, match=r"`algo\.advantage\.kind` remax .* `rollout\.sampling\.temperature` 0 .* no token"):
        config({"advantage": "remax"}, rollout={"sampling": {"temperature": 0}})
    domains = {"a": {"share": 0.5, "sampling": {"temperature": 0}}, "b": {"share": 0.5}}
    with pytest.raises(ConfigError, match=r"`domains\.a\.sampling\.temperature` 0"):
        config({"advantage": "remax"}, domains=domains)
    with pytest.raises(ConfigError, match=r"`rollout\.extra_samples`"):
        config({"advantage": "remax"}, rollout={"extra_samples": 1})


def test_a_section_with_everything_survives_its_own_dump() -> None:
    cfg = config(
        {
            "advantage": "reinforce_pp",
            "loss": {"kind": "ppo_clip", "clip_high": 0.28, "dual_clip": 3},
            "aggregation": "group_mean",
            "kl": {"coef": 0.05, "estimator": "k1", "applied_to": "reward", "adaptive": {"target": 0.02}},
            "entropy_coef": 1e-3,
            "correction": {"kind": "masked_is", "bounds": [0.5, 5], "level": "sequence"},
            "reward_scaling": {"normalise": "running", "clip": [-5, 5]},
            "advantage_scaling": {"normalise": "batch"},
            "masks": {
                "cut_off": True,
                "longer_than": 100,
                "success_rate": [0.1, 0.9],
                "token_staleness": 1,
                "trajectory_staleness": 2,
                "sequence_ratio": [0.9, 1.1],
            },
        },
        rollout={"max_staleness": 3},
    )
    assert check_config(yaml.safe_load(resolved_yaml(cfg))) == cfg
