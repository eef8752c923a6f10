"""What it saves to keep an episode's keys and values from turn to turn: the native engine with and without sessions, in one run.

python benchmarks/turns.py [--episodes 256] [--turns 10] [--shown 22] [--repeats 3]

Every turn shows `--shown` new tokens and samples two. The model has the shape of recipes/frozen_lake.yaml; one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from drumroll.backends.infer.base import InferBackend
from drumroll.config.models import EngineConfig, ModelConfig
from drumroll.models.prepare import prepare_model
from drumroll.registry import REGISTRY
from drumroll.types import GenRequest, RankInfo, Sampling, Version

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("episodes", 256), ("turns", 10), ("shown", 22), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    context = arguments.turns * (arguments.shown + 2) + 8
    with tempfile.TemporaryDirectory() as folder:
        scratch = {"characters": "abcdefghijklmnop", "config": {**SHAPE, "max_position_embeddings": context}}
        model = prepare_model(ModelConfig.model_validate({"scratch": scratch}), Path(folder) / "model", seed=0)
        seconds = asyncio.run(measure(model, arguments))
    for name, values in seconds.items():
        print(f"{name:10} {statistics.median(values):6.2f} s  ({', '.join(f'{value:.2f}' for value in values)})")
    ratios = [alone / kept for alone, kept in zip(*seconds.values(), strict=True)]
    print(f"kept between turns: {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")


async def measure(model: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    entry = REGISTRY.lookup("infer_backend", "native")
    engine: InferBackend = entry.target(
        entry.schema(EngineConfig).model_validate({"kind": "native", "num_slots": arguments.episodes}), model, "float32"
    )
    engine.setup(RankInfo("actor_infer", 0, 1, "cpu"))
    await engine.update(Version(0, 0), iter([list(load_file(model / "model.safetensors").items())]), "keep")
    await engine.resume()
    seconds: dict[str, list[float]] = {"anew": [], "kept": []}
    for repeat in range(arguments.repeats):
        for name in seconds:
            seconds[name].append(await play(engine, arguments, f"{name} {repeat}", in_sessions=name == "kept"))
    await engine.close()
    return seconds


async def play(engine: InferBackend, arguments: argparse.Namespace, label: str, *, in_sessions: bool) -> float:
    """Seconds for all turns of all episodes, the same ones whatever the label."""
    rng = random.Random(0)
    tokens: list[list[int]] = [[] for _ in range(arguments.episodes)]
    started = time.perf_counter()
    for turn in range(arguments.turns):
        for episode in tokens:
            episode += [rng.randrange(3, 19) for _ in range(arguments.shown)]
        engine.submit(
            [
                GenRequest(f"{label}/{n}/{turn}", ids, Sampling(max_new_tokens=2), n, session=f"{label}/{n}" if in_sessions else "")
                for n, ids in enumerate(tokens)
            ]
        )
        left = len(tokens)
        while left:
            for chunk in await engine.poll(1.0):
                tokens[int(chunk.id.split("/")[1])] += chunk.token_ids
                left -= chunk.finish is not None
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
