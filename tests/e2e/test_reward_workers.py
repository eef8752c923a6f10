"""Rewards in workers of their own: through Ray, with functions that hang and workers that die; and models that they serve."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import run_tiny
from transformers import LlamaConfig, LlamaForSequenceClassification

from drumroll.errors import RolloutError
from drumroll.models.scratch import scratch_tokenizer
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader

pytestmark = pytest.mark.usefixtures("workers_in_this_process")

TROUBLE = '''
"""Rewards that get into trouble once each, at the first sample whose reply begins with a certain digit."""

import os, signal, time
from pathlib import Path


HERE = Path(__file__).parent


def once(name, text=""):
    try:
        with HERE.joinpath(name).open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def worker():
    """The process that this one was made for, by way of another one or not."""
    process = os.getpid()
    while not Path(f"/proc/{process}/cmdline").read_text().startswith("ray::"):
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def trouble(trajectory):
    if trajectory.group_id.startswith("train"):
        if once("hang", trajectory.sample_id):
            time.sleep(1000)
        if once("die"):
            os._exit(1)
        hung_before = HERE.joinpath("hang").read_text() == trajectory.sample_id
        if os.environ.get("RAY_JOB_ID") and hung_before and once("take the worker along"):
            os.kill(worker(), signal.SIGKILL)
    return 0.0


def always_hangs(trajectory):
    time.sleep(1000)
'''


def short(folder: Path, rewards: list[dict[str, Any]], **changes: Any) -> RunFolder:
    folder.mkdir(parents=True, exist_ok=True)
    exact = {"kind": "exact_match", "success_at": 1.0}
    changes = {"warmup": None, "data": {"heldout": None}, "max_steps": 2, "rewards": [exact, *rewards], **changes}
    return run_tiny(folder, **changes)


def write_trouble(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trouble.py"
    path.write_text(TROUBLE)
    return str(path)


@pytest.mark.real_ray
def test_functions_that_hang_and_workers_that_die_cost_no_sample(tmp_path: Path) -> None:
    """One reward hangs, one kills its process, one takes its worker along; the mathematics of every sample is checked all the same."""
    kind = write_trouble(tmp_path / "plugin") + ":trouble"
    rewards = [{"kind": kind, "pooled": True, "deadline_s": 1.0, "retries": 3}, {"kind": "math", "weight": 0.5}]
    run = short(tmp_path, rewards, reward_workers=2)
    assert {path.name for path in (tmp_path / "plugin").iterdir()} >= {"hang", "die", "take the worker along"}
    with Reader(run.store) as reader:
        samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train"))]
    assert len(samples) == 2 * 6 * 4
    for sample in samples:
        assert sample.reward_parts["exact_match"] <= sample.reward_parts["math"], "what is equal to the character is equal"
        assert sample.reward == sample.reward_parts["exact_match"] + 0.5 * sample.reward_parts["math"]
    steps = [line for line in read_lines(run.metrics_file) if "weights" in line]
    assert sum(line.get("reward/trouble_failures", 0) for line in steps) >= 2, "a worker that is lost is no failure of the reward"
    assert all(line["time/reward_math_s_mean"] > 0 for line in steps)
    assert all(line["rollout/num_failed_reward"] == 0 for line in steps)


def test_a_reward_that_always_hangs_stops_the_run_by_name(tmp_path: Path) -> None:
    kind = write_trouble(tmp_path / "plugin") + ":always_hangs"
    rewards = [{"kind": kind, "pooled": True, "deadline_s": 0.05, "retries": 1}]
    rollout = {"max_attempts": 2, "groups_per_step": 1, "group_size": 2}
    with pytest.raises(RolloutError, match=r"RewardError: reward 'always_hangs' on task 'train-\d+' took longer than 0.05 s"):
        short(tmp_path, rewards, rollout=rollout)


def make_reward_model(folder: Path, characters: str) -> Path:
    tokenizer = scratch_tokenizer(characters)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_model_is_served_by_reward_workers(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "0123456789=")
    run = short(tmp_path, [{"kind": "reward_model", "model": {"path": str(folder)}, "squash": True}])
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = scratch_tokenizer("0123456789=")
    with Reader(run.store) as reader:
        samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train", state="consumed"), limit=8)]
    for sample in samples:
        ids = tokenizer(sample.text, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected = torch.sigmoid(model(ids).logits[0, 0]).item()
        assert sample.reward_parts["reward_model"] == pytest.approx(expected, abs=1e-5)


def test_a_judge_on_an_engine_of_the_plan_is_asked(tmp_path: Path) -> None:
    """A judge with random weights never gives a verdict in the right form: no sample is trained on, and the error says why."""
    from drumroll.config.models import ScratchConfig
    from drumroll.models.scratch import make_scratch

    characters = "".join(map(chr, range(32, 127))) + "\n"
    config = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    folder = tmp_path / "judge"
    make_scratch(ScratchConfig(characters=characters, config=config), folder, 0)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    judge = {
        "kind": "judge",
        "local": {"path": str(folder), "engine": {"num_slots": 4, "context_tokens": 4096}},
        "rubric": "Are the digits in order?",
        "max_new_tokens": 8,
        "attempts": 1,
        "retries": 0,
    }
    rollout = {"max_attempts": 1, "groups_per_step": 1, "group_size": 2}
    with pytest.raises(RolloutError, match="the judge gave no valid verdict in 1 attempts"):
        short(tmp_path, [judge], rollout=rollout)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not any("weights" in row for row in rows)


def test_a_judge_behind_a_url_is_asked_once_for_equal_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "unit" / "rewards"))
    from scripted_judge import serve

    def sorted_digits(ask: Any) -> str:
        reply = ask.section("reply")
        return f"VERDICT {ask.seal} {10 if list(reply) == sorted(reply) else 2}"

    with serve(sorted_digits) as server:
        judge = {"kind": "judge", "url": server.url, "model": "m", "rubric": "Are the digits in order?", "success_at": 1.0}
        run = short(tmp_path, [judge])
    with Reader(run.store) as reader:
        samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train", state="consumed"))]
    for sample in samples:
        in_order = list(sample.last_reply) == sorted(sample.last_reply)
        expected = 0.0 if not sample.last_reply else 1.0 if in_order else 0.2
        assert sample.reward_parts["judge"] == expected
    assert len(server.asks) == len({(sample.task.id, sample.last_reply) for sample in samples if sample.last_reply})
