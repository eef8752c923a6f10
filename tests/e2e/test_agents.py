"""An agent in its own process, written with the official `openai` client, trains like any other environment."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drumroll.config.load import check_config
from drumroll.config.models import ScratchConfig
from drumroll.errors import RolloutError
from drumroll.models.scratch import make_scratch
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.store import Filter, Reader

pytestmark = pytest.mark.usefixtures("workers_in_this_process")

AGENT = """
import json, os, sys, urllib.request
from openai import OpenAI

client, task = OpenAI(), json.loads(os.environ["DRUMROLL_TASK"])
mood = sys.argv[1]
if mood == "crash":
    sys.exit(3)

def say(messages):
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""

talk = [{"role": "user", "content": task["prompt"]}]
for _ in range(2):
    talk.append({"role": "assistant", "content": say(talk)})
    talk.append({"role": "user", "content": "again"})
aside = say([{"role": "user", "content": "a second conversation"}])
text = "".join(message["content"] for message in talk if message["role"] == "assistant")
reward = text.count("a") / 10
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/reward",
    json.dumps({"reward": reward, "success": reward > 0}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
urllib.request.urlopen(request).read()
"""

BAD_AGENT = """
import json, os, socket, urllib.error, urllib.request
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
key, mood = os.environ["OPENAI_API_KEY"], json.loads(os.environ["DRUMROLL_TASK"])["prompt"]

def send(path, body, key=key):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, headers)
    return urllib.request.urlopen(request).read()

question = json.dumps({"messages": [{"role": "user", "content": mood}]}).encode()
send("/chat/completions", question)
try:
    if mood == "leaves":
        with socket.create_connection((host, int(port))) as line:
            head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Length: 9999"]
            line.sendall("\\r\\n".join([*head, "", "{"]).encode())
        os._exit(0)
    if mood == "garbage":
        send("/chat/completions", bytes(range(256)))
    if mood == "foreign key":
        send("/reward", b'{"reward": 1}', key[::-1])
    if mood == "too much":
        send("/chat/completions", b"x" * 100_000_000)
except (urllib.error.HTTPError, ConnectionError) as error:
    print("was told:", error)
    raise
send("/reward", b'{"reward": 1, "success": true}')
"""


def run(folder: Path, mood: str, agent: str = AGENT, prompts: Sequence[str] = ("question a", "question b"), **changes: Any) -> RunFolder:
    folder.mkdir(exist_ok=True)
    (folder / "agent.py").write_text(agent)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    config = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    model = folder / "model"
    make_scratch(ScratchConfig(characters="abcdefghijklmnopqrstuvwxyz =\n", config=config), model, 0)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}={{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
    )
    tree = {
        "pipeline": "rl",
        "name": "agent",
        "max_steps": 1,
        "run_dir": str(folder / "run"),
        "model": {"path": str(model)},
        "data": {"train": {"path": str(tasks)}},
        "env": {"kind": "agent", "command": [sys.executable, str(folder / "agent.py"), mood]},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_turns": 8, "sampling": {"max_new_tokens": 6}, "max_attempts": 1},
        "devices": {"actor_train": 0, "actor_infer": 0},
        "record": {"tensorboard": False},
        **changes,
    }
    return start(check_config(tree))


def test_an_agent_trains_and_every_sampled_token_counts_once(tmp_path: Path) -> None:
    folder = run(tmp_path, "work")
    with Reader(folder.store) as reader:
        samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train", state="consumed"))]
    assert len(samples) == 4
    for sample in samples:
        text = "".join(turn.text for turn in sample.turns if turn.author == "policy")
        assert sample.reward == pytest.approx(text.count("a") / 10)
        assert sample.success is (sample.reward > 0)
        (aside,) = sample.branches
        assert aside.reward == sample.reward
        assert "second conversation" in aside.turns[0].text
        for part in (sample, aside):
            assert all(part.loss_mask[turn.start : turn.end].all() == (turn.author == "policy") for turn in part.turns)
    (line,) = [line for line in read_lines(folder.metrics_file) if "weights" in line]
    assert line["batch/num_trajectories"] == 8
    assert line["batch/num_new_tokens"] == sum(part.num_new_tokens for sample in samples for part in (sample, *sample.branches))


def test_an_agent_that_crashes_never_trains(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="the agent ended with exit code 3"):
        run(tmp_path, "crash")
    assert not [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "weights" in line]


def test_agents_that_misbehave_fail_with_the_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    reasons = {
        "leaves": "without posting a reward",
        "garbage": "400",
        "foreign key": "401",
        "too much": "exit code 1",  # it may see the refusal, or that nobody listens to the rest
    }
    good = [f"question {letter}" for letter in "abcdefghij"]
    rollout = {"groups_per_step": 5, "group_size": 2, "max_turns": 8, "sampling": {"max_new_tokens": 6}, "max_attempts": 1}
    folder = run(tmp_path, "", BAD_AGENT, [*reasons, *good], max_steps=2, rollout=rollout)
    with Reader(folder.store) as reader:
        rows = list(reader.query(Filter(phase="train")))
        samples = [reader.load(row.sample_id) for row in rows]
    trained = [sample for row, sample in zip(rows, samples, strict=True) if row.state == "consumed"]
    assert [(sample.reward, sample.error) for sample in trained] == [(1.0, "")] * 2 * 5 * 2
    assert not {sample.task.prompt for sample in trained} & set(reasons)
    failed = {sample.task.prompt: sample for sample in samples if sample.stop_reason == "failed"}
    assert failed.keys() == set(reasons)
    for mood, reason in reasons.items():
        assert failed[mood].reward is None
        assert reason in failed[mood].error
    lines = [line for line in read_lines(folder.metrics_file) if "weights" in line]
    assert sum(line["rollout/num_failed_environment"] for line in lines) >= len(reasons)
