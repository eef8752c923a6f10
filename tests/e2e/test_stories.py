"""The stories recipe, cut down to three steps, on a real pretrained model and with a reference model beside the policy."""

import json
import math
import re
from pathlib import Path

import pytest

from drumroll.config.load import load_config
from drumroll.pipelines.job import prepare
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader

RECIPE = "recipes/stories_dog_grpo.yaml"
MODEL = Path("../shared/models/stories260K")
SMALL = [
    "max_steps=3",
    "rollout.groups_per_step=6",
    "rollout.group_size=8",
    "rollout.sampling.max_new_tokens=32",
    "eval.every=0",
    "eval.num_tasks=4",
    "eval.samples_per_task=2",
    "devices={actor_train: 0, actor_infer: 0, reference: 0}",
]

pytestmark = pytest.mark.timeout(120)
needs_model = pytest.mark.skipif(not MODEL.is_dir(), reason=f"the pretrained model {MODEL} is not on this machine")


def openings(name: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in Path(f"recipes/stories/{name}.jsonl").read_text().splitlines()]


def test_held_out_openings_are_new_and_no_opening_gives_the_word_away() -> None:
    train, heldout = openings("train"), openings("heldout")
    assert len({*train, *heldout}) == len(train) + len(heldout)
    assert not [prompt for prompt in train + heldout if re.search("dog", prompt, re.IGNORECASE)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return start(load_config([RECIPE], [*SMALL, f"run_dir={tmp_path_factory.mktemp('stories') / 'run'}"]))


@needs_model
def test_the_kl_term_brings_a_reference_model() -> None:
    assert "reference" in prepare(load_config([RECIPE])).roles


@needs_model
def test_steps_measure_the_distance_to_the_reference(run: RunFolder) -> None:
    steps = [line for line in read_lines(run.metrics_file) if "batch/ref_logp_mean" in line]
    assert len(steps) == 3
    for step in steps:
        assert math.isfinite(step["update/kl"])
        assert step["update/skipped"] == 0.0
        assert -2.5 < step["batch/ref_logp_mean"] < -0.5, "English stories are likely to a model of English stories"
        assert step["batch/num_scored_tokens"] == step["batch/num_tokens"]
    assert steps[0]["update/kl"] == pytest.approx(0.0, abs=1e-5), "the policy starts as the reference"
    assert steps[-1]["update/kl"] > 1e-4, "the policy has moved and the reference has not"


@needs_model
def test_the_first_steps_reference_log_probability_is_the_policys_own(run: RunFolder) -> None:
    """Engine, trainer and reference hold the same weights then, so the mean over the sampled tokens must be the same."""
    first = next(line for line in read_lines(run.metrics_file) if "batch/ref_logp_mean" in line)
    with Reader(run.store) as reader:
        sampled = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train")) if row.step == 1]
    num_tokens = sum(trajectory.num_new_tokens for trajectory in sampled)
    mean = sum(float(trajectory.logp.sum(dtype="float64")) for trajectory in sampled) / num_tokens
    assert num_tokens == first["batch/num_new_tokens"]
    assert first["batch/ref_logp_mean"] == pytest.approx(mean, abs=1e-4)
