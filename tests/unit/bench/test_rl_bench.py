"""`drumroll bench rl`: a model of the shape that was asked for, and figures that follow from the steps' times."""

import json
from pathlib import Path

import pytest

from drumroll.bench.rl import SHAPES, Workload, bench, config_of, make_model, summarise
from drumroll.config.load import check_config
from drumroll.errors import ConfigError

WORKLOAD = Workload(prompts=2, samples=4, prompt_tokens=3, new_tokens=5)


def test_the_model_has_the_shape_and_a_word_for_each_token(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from drumroll.text.tokenizer import Tokenizer

    num_parameters = make_model(tmp_path / "model", "tiny", WORKLOAD)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert {name: getattr(config, name) for name in SHAPES["tiny"]} == SHAPES["tiny"]
    assert config.eos_token_id is None
    assert num_parameters == 131_648
    tokenizer = Tokenizer(tmp_path / "model")
    assert list(tokenizer.encode("w3 w511 w0")) == [3, 511, 0]
    cfg = check_config(config_of(tmp_path, WORKLOAD, 2))
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 4
    assert cfg.model_dump()["rollout"]["group_size"] == 4


def test_figures_follow_from_the_times() -> None:
    line = {
        "time/rollout_s": 2.0,
        "time/score_s": 0.5,
        "time/update_s": 1.0,
        "time/sync_s": 0.5,
        "sync/bytes": 2**20,
        "batch/num_tokens": 2 * 4 * 8,
        "batch/num_new_tokens": 2 * 4 * 5,
        "memory/trainer": 3.0,
    }
    figures = summarise([line, {**line, "time/rollout_s": 4.0}, line], SHAPES["tiny"], 1000, WORKLOAD)
    assert figures["step_s"] == 4.0
    assert figures["step_seconds"] == [4.0, 6.0, 4.0]
    assert figures["generated_per_s"] == 2 * 4 * 5 / 2.0
    assert figures["tokens_per_s"] == 2 * 4 * 8 / 4.0
    assert figures["samples_per_hour"] == 3600 * 2 * 4 / 4.0
    assert figures["sync_mib"] == 1.0
    assert figures["memory/trainer"] == 3.0
    assert json.dumps(figures)


def test_lengths_with_a_long_tail() -> None:
    workload = Workload(new_tokens=2000, tailed=True)
    lengths = sorted(workload.length(prompt, sample) for prompt in range(500) for sample in range(8))
    assert lengths[2000] == pytest.approx(200, rel=0.1)
    assert lengths[3900] < 2000 == lengths[-1]
    assert 0.005 < lengths.count(2000) / len(lengths) < 0.02
    assert [workload.length(3, sample) for sample in range(8)] == [workload.length(3, sample) for sample in range(8)]
    assert {WORKLOAD.length(prompt, 0) for prompt in range(9)} == {5}


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no shape named 'tinny'\. Did you mean 'tiny'\?"):
        bench("tinny", WORKLOAD, 1)
