"""The `domains` section: what each domain takes from the rest, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from drumroll.config.load import check_config, merge, resolved_yaml
from drumroll.config.models import ANY, RlConfig
from drumroll.errors import ConfigError

TREE: dict[str, Any] = {
    "pipeline": "rl",
    "max_steps": 1,
    "model": {"scratch": {"characters": "01"}},
    "data": {"train": {"path": "mixed.jsonl"}},
    "rewards": ["exact_match"],
    "rollout": {"filters": ["all_equal"], "sampling": {"temperature": 0.7, "max_new_tokens": 8}},
    "domains": {
        "sums": {"share": 0.75},
        "words": {
            "share": 0.25,
            "data": {"train": {"path": "words.jsonl"}},
            "rewards": [{"kind": "contains_word", "word": "yes", "weight": 2}],
            "sampling": {"max_new_tokens": 32},
            "filters": [],
            "curriculum": {"target": 0.3},
        },
    },
}


REPEATABLE = {"deterministic": True, "model": {"dtype": "float32"}}
JUDGE = {"kind": "judge", "url": "http://localhost/v1", "model": "m", "rubric": "?"}


def config(**changes: Any) -> RlConfig:
    checked = check_config(merge(TREE, changes))
    assert isinstance(checked, RlConfig)
    return checked


def complaint(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    return str(caught.value)


def test_a_domain_has_its_own_settings_and_the_runs_otherwise() -> None:
    sums, words = config().mixture.values()
    assert (sums.name, sums.share, sums.data) == ("sums", 0.75, None)
    assert [reward.kind for reward in sums.rewards] == ["exact_match"]
    assert [filter_.kind for filter_ in sums.filters] == ["all_equal"]
    assert (sums.sampling.temperature, sums.sampling.max_new_tokens, sums.curriculum) == (0.7, 8, None)
    assert [(reward.kind, reward.weight) for reward in words.rewards] == [("contains_word", 2.0)]
    assert words.filters == ()
    assert (words.sampling.temperature, words.sampling.max_new_tokens) == (0.7, 32)
    assert words.curriculum is not None
    assert words.curriculum.target == 0.3


def test_a_run_without_domains_is_one_domain() -> None:
    checked = check_config({key: value for key, value in TREE.items() if key != "domains"})
    assert isinstance(checked, RlConfig)
    (only,) = checked.mixture.values()
    assert (only.name, only.share, [reward.kind for reward in only.rewards]) == (ANY, 1.0, ["exact_match"])


def test_what_is_written_into_the_run_reads_back_the_same() -> None:
    assert check_config(yaml.safe_load(resolved_yaml(config()))) == config()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"domains": {"words": {"share": 0.5}}}, ["the shares of `domains` sum to 1.25 (0.75 + 0.5); 1 was expected"]),
        ({"domains": {"words": {"share": 1.5}}}, ["`domains.words.share`", "less than or equal to 1"]),
        ({"domains": {"words": {"share": None}}}, ["`domains.words.share`"]),
        ({"rewards": []}, ["domain 'sums' has no reward", "`domains.sums.rewards`", "single_turn"]),
        ({"domains": {"words": {"rewards": []}}}, ["domain 'words' has no reward"]),
        ({"data": None}, ["`domains.sums.data` is missing", "column `domain` says sums"]),
        ({"domains": {"words": {"data": {"train": None}}}}, ["`domains.words.share` is 0.25, but `domains.words.data.train`"]),
        ({"domains": {"a b": {"share": 0.0}}}, ["'a b' is no name for a domain"]),
        ({"domains": {"words": {"shar": 1}}}, ["`domains.words.shar`", "Did you mean 'share'?"]),
        ({"domains": {"words": {"rewards": ["exact_mach"]}}}, ["`domains.words.rewards.0.kind`", "Did you mean 'exact_match'?"]),
        ({"domains": {"words": {"sampling": {"temprature": 1}}}}, ["Did you mean 'temperature'?"]),
        ({**REPEATABLE, "domains": {"words": {"filters": ["all_equal"]}}}, ["`curriculum`", "filters"]),
        ({**REPEATABLE, "rewards": [JUDGE]}, ["`deterministic`", "'judge'"]),
        ({**REPEATABLE, "engine": {"threads": 2}}, ["`deterministic`", "`engine.threads: 1`"]),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], parts: list[str]) -> None:
    text = complaint(**changes)
    for part in parts:
        assert part in text
