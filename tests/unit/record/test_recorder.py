"""The controller's pen: figures of a set of samples, what compute is charged for, and when a run has nothing left to learn."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drumroll.config.load import check_config
from drumroll.errors import RolloutError
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.recorder import MAX_IDLE_STEPS, Recorder, sample_metrics, score
from drumroll.types import SampleInfo


def sample(reward: float | None = 1.0, success: bool | None = None, **changes: Any) -> SampleInfo:
    fields: dict[str, Any] = {
        "sample_id": "train/000001/0000/000",
        "group_id": "train/000001/0000",
        "task_id": "t",
        "domain": "default",
        "reward": reward,
        "success": success,
        "stop_reason": "stop",
        "num_prompt_tokens": 6,
        "num_new_tokens": 4,
        "oldest_version": 0,
        "newest_version": 0,
        "reward_parts": {},
        "metrics": {},
    }
    return SampleInfo(**{**fields, **changes})


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def build(**algo: Any) -> Recorder:
        tree = {
            "pipeline": "rl",
            "max_steps": 50,
            "model": {"path": "m"},
            "data": {"train": {"path": "t"}},
            "rewards": ["exact_match"],
            "algo": algo,
            "record": {"tensorboard": False},
        }
        cfg = check_config(tree)
        folder = RunFolder.create(tmp_path / f"run{len(list(tmp_path.iterdir()))}", "run", cfg.model_dump(mode="json"))
        return Recorder(cfg, folder, Console(file=io.StringIO()))

    return build


IDLE = {"batch/informative_token_ratio": 0.0}


def idle_steps(recorder: Recorder, samples: list[SampleInfo]) -> None:
    for step in range(1, MAX_IDLE_STEPS + 1):
        recorder.log_step(step, samples, IDLE, [], "")


def test_steps_without_anything_to_learn_from_stop_the_run(make: Any) -> None:
    with pytest.raises(RolloutError, match=f"{MAX_IDLE_STEPS} steps in a row had nothing to learn from"):
        idle_steps(make(), [sample(reward=0.0, success=False)])


def test_one_step_that_teaches_something_starts_the_count_anew(make: Any) -> None:
    recorder = make()
    for step in range(1, 3 * MAX_IDLE_STEPS):
        report = IDLE if step % (MAX_IDLE_STEPS - 1) else {"batch/informative_token_ratio": 0.5}
        recorder.log_step(step, [sample()], report, [], "")


def test_a_solved_task_and_a_pull_to_a_reference_are_no_reason_to_stop(make: Any) -> None:
    idle_steps(make(), [sample(reward=1.0, success=True)] * 4)
    idle_steps(make(kl={"coef": 0.1}), [sample(reward=0.0, success=False)])


def test_forward_passes_cost_a_third_of_training(make: Any) -> None:
    recorder = make()
    updates = [{"num_tokens": 30.0, "loss": 1.0}, {"num_tokens": 10.0, "loss": 2.0}]
    recorder.log_step(1, [sample(), sample()], {"batch/num_scored_tokens": 40.0}, updates, "")
    assert (recorder.compute.trained, recorder.compute.forwarded, recorder.compute.generated) == (40, 20 + 40, 8)
    assert recorder.compute.rl_tokens == 60.0
    recorder.log_imitation(0, [{"num_tokens": 12.0}, {"num_tokens": 18.0}])
    assert recorder.compute.equal_sft_updates == 4
    (line,) = (line for line in read_lines(recorder.folder.metrics_file) if "update/loss" in line)
    assert line["update/loss"] == 1.5


def test_figures_of_samples() -> None:
    samples = [
        sample(1.0, True, reward_parts={"match": 1.0}, metrics={"moves": 3.0}),
        sample(0.0, False, reward_parts={"match": 0.0}, stop_reason="length", num_new_tokens=8),
        sample(None, None),
    ]
    metrics = sample_metrics(samples)
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/success_mean"] == 0.5
    assert metrics["rollout/no_verdict_ratio"] == pytest.approx(1 / 3)
    assert metrics["rollout/stop_length_ratio"] == pytest.approx(1 / 3)
    assert metrics["reward/match_mean"] == 0.5
    assert metrics["env/moves_mean"] == 3.0
    assert metrics["rollout/new_tokens_max"] == 8.0


def test_a_score_is_success_where_known_and_reward_otherwise() -> None:
    assert score([sample(5.0, True), sample(5.0, False)]) == 0.5
    assert score([sample(0.25), sample(0.75), sample(None)]) == 0.5
    assert math.isnan(score([sample(None)]))


def test_a_growing_mismatch_is_told_once(make: Any) -> None:
    recorder = make()
    said: list[str] = []
    recorder.warn = said.append
    with recorder:
        for step, mean in enumerate([0.001] * 12 + [0.019, 0.03, 0.05], start=1):
            recorder.log_step(step, [sample(1.0), sample(0.0)], {}, [{"loss": 0.1, "mismatch/logp_mean": mean}, {"loss": 0.3}], "digest")
        state = recorder.state()
    lines = read_lines(recorder.folder.metrics_file)
    assert [line["mismatch/logp_mean"] for line in lines[-2:]] == [0.03, 0.05]
    assert lines[-1]["update/loss"] == pytest.approx(0.2)
    assert len(said) == 1
    assert said[0].startswith("step 14: the trainers' log-probabilities differ by 0.03 a token")
    again = make()
    again.load_state(state)
    with again:
        assert again.state()["first_mismatches"] == [0.001] * 10
