"""Four environments in one run, each with its share, through the whole pipeline: warm-up on their experts' episodes, then steps of RL."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drumroll.config.load import check_config
from drumroll.config.models import EnvConfig
from drumroll.envs.experts import expert_episode
from drumroll.envs.webshop import expert_episode as shopping_episode
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.play import play
from drumroll.record.store import Filter, Reader
from drumroll.registry import REGISTRY

pytestmark = pytest.mark.usefixtures("workers_in_this_process")

MOVES = {"chat": False, "rules": False, "tag": None, "moves": ["U", "D", "L", "R"], "max_moves": 6}
SHOP = {"chat": False, "rules": False, "tag": None, "page_size": 5, "num_products": 100}


def episodes(kind: str) -> list[Any]:
    if kind == "webshop":
        config = REGISTRY.lookup("env", kind).schema(EnvConfig).model_validate({"kind": kind, **SHOP})
        return [shopping_episode(config, seed) for seed in range(4)]
    return [expert_episode(kind, MOVES, seed) for seed in range(4)]


def test_four_environments_in_one_run(tmp_path: Path) -> None:
    played = [episode for kind in ("frozen_lake", "sokoban", "webshop") for episode in episodes(kind)]
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(episode.row) + "\n" for episode in played if episode))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+7=", "answer": str(n + 7)}) + "\n" for n in range(8)))
    config = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
    seeds = {"train": {"seeds": "0-40"}, "heldout": {"seeds": "50-51"}}
    tree = {
        "pipeline": "rl",
        "name": "environments",
        "max_steps": 2,
        "seed": 3,
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": {"characters": "".join(map(chr, range(32, 127))) + "\n", "config": config}},
        "warmup": {"data": {"path": str(tmp_path / "demonstrations.jsonl")}, "steps": 5, "batch_size": 8},
        "domains": {
            "lake": {"share": 0.25, "data": seeds, "env": {"kind": "frozen_lake", **MOVES}},
            "boxes": {"share": 0.25, "data": seeds, "env": {"kind": "sokoban", **MOVES}},
            "shop": {"share": 0.25, "data": seeds, "env": {"kind": "webshop", **SHOP}},
            "sums": {
                "share": 0.25,
                "data": {"train": {"path": str(tmp_path / "sums.jsonl")}},
                "env": {"kind": "tools", "tools": ["calculator"], "plain": {}},
                "rewards": [{"kind": "exact_match", "success_at": 1.0}],
                "sampling": {"stop": ["="]},
            },
        },
        "rollout": {"groups_per_step": 4, "group_size": 2, "max_turns": 4, "sampling": {"max_new_tokens": 4}},
        "algo": {"advantage": {"kind": "gigpo"}},
        "trainer": {"lr": 1e-4},
        "devices": {"actor_train": 0, "actor_infer": 0},
        "record": {"tensorboard": False},
    }
    run = start(check_config(tree))
    lines = [line for line in read_lines(run.metrics_file) if "weights" in line]
    assert [line[f"domain/{name}/share"] for line in lines for name in ("lake", "boxes", "shop", "sums")] == [0.25] * 8
    assert all("domain/lake/env/malformed_replies_mean" in line for line in lines)
    with Reader(run.store) as reader:
        samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train", state="consumed"))]
    assert len(samples) == 2 * 4 * 2
    assert max(sum(turn.author == "policy" for turn in sample.turns) for sample in samples) > 1
    assert {sample.task.data["seed"] for sample in samples if sample.task.domain == "lake"} <= set(range(41))
    last = read_lines(run.eval_file)[-1]
    assert {"sampled/lake", "sampled/boxes", "sampled/shop"} <= last.keys()
    screen = io.StringIO()
    assert play(run, Console(file=screen, width=100), Filter(phase="train"), env="frozen_lake", limit=9, delay_s=0) == 4
    shown = screen.getvalue()
    lakes = [sample for sample in samples if sample.task.domain == "lake"]
    assert all(row in shown for sample in lakes for turn in sample.turns if turn.author == "environment" for row in turn.text.split())
    assert "turn 2" in shown
    assert "reward" in shown
    assert not any(sample.sample_id in shown for sample in samples if sample.task.domain != "lake")
