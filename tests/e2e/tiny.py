"""A run small enough for a test: four-digit sorting, a model of a few thousand parameters, three steps."""

import json
import random
from pathlib import Path
from typing import Any

from drumroll.config.load import check_config, merge
from drumroll.pipelines.start import start
from drumroll.record.folder import RunFolder


def write_rows(path: Path, count: int, seed: int, *, demonstrations: bool = False) -> str:
    """Sorting tasks as JSON lines."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        digits = "".join(rng.choices("0123456789", k=4))
        answer = "".join(sorted(digits))
        rows.append({"prompt": f"{digits}=", "answer": answer} | ({"completion": answer} if demonstrations else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tiny_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config as plain data, with its tasks written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {
        "pipeline": "rl",
        "name": "tiny",
        "max_steps": 3,
        "seed": 11,
        "model": {
            "scratch": {
                "characters": "0123456789=",
                "config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 32,
                },
            }
        },
        "data": {
            "train": {"path": write_rows(folder / "train.jsonl", 40, 1)},
            "heldout": {"path": write_rows(folder / "heldout.jsonl", 20, 2)},
        },
        "warmup": {
            "data": {"path": write_rows(folder / "demos.jsonl", 40, 3, demonstrations=True)},
            "steps": 20,
            "batch_size": 16,
            "lr": 5e-3,
            "compare": True,
        },
        "rewards": [{"kind": "exact_match", "success_at": 1.0}, {"kind": "./tests/e2e/rewards.py:positions", "weight": 0.5}],
        "rollout": {"groups_per_step": 6, "group_size": 4, "sampling": {"max_new_tokens": 6}},
        "trainer": {"lr": 1e-3},
        "engine": {"num_slots": 16},
        "devices": {"actor_train": 0, "actor_infer": 0},
    }
    return merge(tree, changes)


def run_tiny(folder: Path, **changes: Any) -> RunFolder:
    """Run it to the end in this process."""
    return start(check_config(tiny_tree(folder, **{"run_dir": str(folder / "run"), **changes})))
