"""Measures what checkpoints cost: the stall of training against a save's own time, side by side in one run.

    python benchmarks/checkpoint.py --hidden 512 --layers 8 --repeats 5 --out /tmp/checkpoints

One trainer on Ray makes updates, alone and while a checkpoint of it is written. The stall is the copy to memory plus what the
updates beside the write take longer than alone. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from drumroll.cluster.cluster import Cluster
from drumroll.cluster.session import Session
from drumroll.config.models import ModelConfig, RayConfig, ScratchConfig, TrainerConfig
from drumroll.models.prepare import prepare_model
from drumroll.plan import Placement
from drumroll.record.checkpoint import CheckpointStore, Saved
from drumroll.text.packing import pack_demonstrations
from drumroll.types import Batch, Schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="where checkpoints go; a temporary folder otherwise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Session(RayConfig()) as session:
        root = arguments.out or Path(scratch) / "checkpoints"
        trainers = _trainers(session, _model(Path(scratch) / "model", arguments.hidden, arguments.layers))
        batch = _batch()
        _update(trainers, batch)  # the first one makes the optimizer's state
        rows = [_measure(trainers, batch, CheckpointStore(root), number) for number in range(arguments.repeats)]
    _print(rows)


def _model(folder: Path, hidden: int, layers: int) -> Path:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": 8}
    config = ModelConfig(scratch=ScratchConfig(characters="0123456789=", config={**sizes, "num_key_value_heads": 8}))
    return prepare_model(config, folder, seed=1)


def _trainers(session: Session, model: Path) -> Cluster:
    kwargs = {"trainer": TrainerConfig(kind="fsdp2").model_dump(mode="json"), "model_folder": str(model), "dtype": "float32", "seed": 1}
    placement = Placement("actor_train", 0, "local", (), "cpu")
    trainers = Cluster.launch(session, [placement], "drumroll.workers.trainer:TrainWorker", kwargs=kwargs)
    trainers.all("begin", Schedule(1e-4, 10**6))
    return trainers


def _batch() -> Batch:
    batch = pack_demonstrations([([1, 2, 3, 4], [5, 6, 7, 8]) for _ in range(16)])
    return batch.with_fields(weight=batch.loss_mask / batch.loss_mask.sum())


def _update(trainers: Cluster, batch: Batch) -> float:
    started = time.perf_counter()
    trainers.shards("imitate", [[batch]])
    return time.perf_counter() - started


def _measure(trainers: Cluster, batch: Batch, store: CheckpointStore, number: int) -> dict[str, float]:
    alone = statistics.median(_update(trainers, batch) for _ in range(5))
    started = time.perf_counter()
    trainers.all("snapshot")
    copy_s = time.perf_counter() - started
    store.write_async(f"step-{number:06d}", lambda draft: trainers.all("save", str(draft / "trainer")) and None, {})  # type: ignore[func-returns-value]
    beside = []
    while store.is_writing:
        beside.append(_update(trainers, batch))
    saved = store.wait()
    assert isinstance(saved, Saved)
    extra_s = sum(beside) - len(beside) * alone
    return {
        "MiB": saved.num_bytes / 2**20,
        "copy_s": copy_s,
        "save_s": copy_s + saved.seconds,
        "updates_beside": float(len(beside)),
        "slower_s": extra_s,
        "copy_share": copy_s / (copy_s + saved.seconds),
        "stall_share": (copy_s + max(0.0, extra_s)) / (copy_s + saved.seconds),
    }


def _print(rows: list[dict[str, float]]) -> None:
    median: dict[str, Any] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(
        "| MiB | copy, s | save, s | copy / save | updates beside the write | slower by, s | stall / save |\n|---|---|---|---|---|---|---|"
    )
    for row in [*rows, median]:
        print(
            f"| {row['MiB']:.0f} | {row['copy_s']:.3f} | {row['save_s']:.3f} | {row['copy_share']:.1%} | {row['updates_beside']:.0f} "
            f"| {row['slower_s']:.3f} | {row['stall_share']:.1%} |"
        )
    print(json.dumps({"torch": torch.__version__, "median": median, "rows": rows}))


if __name__ == "__main__":
    main()
