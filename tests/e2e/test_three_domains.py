"""examples/three_domains.yaml on the real files of GSM8K, MBPP and IFEval, with a real pretrained model, judged by the real rewards."""

from pathlib import Path

import pytest
import yaml

from drumroll.config.load import check_config, merge
from drumroll.pipelines.job import prepare
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.store import Filter, Reader

pytestmark = pytest.mark.usefixtures("workers_in_this_process")

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"


def tree() -> dict:
    if not (SHARED / "data" / "mbpp.jsonl").exists():
        pytest.skip("needs ../shared/data and ../shared/models")
    text = (ROOT / "examples" / "three_domains.yaml").read_text()
    return merge(yaml.safe_load(text.replace("data/", f"{SHARED}/data/")), {"model": {"path": str(SHARED / "models" / "stories260K")}})


def test_every_task_can_be_judged() -> None:
    job = prepare(check_config(tree()))
    assert {name: len(tasks) for name, tasks in job.tasks.items()} == {"mathematics": 7473, "code": 974, "instructions": 541}
    assert len(job.heldout["mathematics"]) == 200
    assert job.roles == ("actor_train", "actor_infer", "reward", "environment")


@pytest.mark.real_ray
def test_a_step_on_all_three(tmp_path: Path) -> None:
    short = {
        "max_steps": 1,
        "run_dir": str(tmp_path / "run"),
        "seed": 1,
        "devices": {"actor_train": 0, "actor_infer": 0},
        "engine": {"num_slots": 16},
        "rollout": {"groups_per_step": 10, "group_size": 2, "sampling": {"max_new_tokens": 16}, "max_tokens": 512},
        "domains": {
            "mathematics": {"data": {"heldout": {"limit": 3}, "train": {"limit": 20}}},
            "code": {"filters": [], "data": {"train": {"limit": 20}}},
            "instructions": {"sampling": {"max_new_tokens": 80}, "data": {"train": {"limit": 20}}},
        },
        "eval": {"every": 0},
        "record": {"tensorboard": False},
    }
    run = start(check_config(merge(tree(), short)))
    (line,) = [line for line in read_lines(run.metrics_file) if "weights" in line]
    assert [line[f"domain/{name}/share"] for name in ("mathematics", "code", "instructions")] == pytest.approx([0.4, 0.3, 0.3])
    assert line["domain/code/reward/code_mean"] == 0.0, "a model of children's stories writes no Python"
    assert line["domain/mathematics/time/reward_math_s_mean"] > 0
    assert line["rollout/num_failed_reward"] == 0
    with Reader(run.store) as reader:
        parts = {row.domain: set(row.reward_parts) for row in reader.query(Filter(phase="train", state="consumed"))}
    assert parts == {"mathematics": {"math"}, "code": {"code"}, "instructions": {"instructions", "overlong"}}
