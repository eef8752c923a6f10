"""How much of a GPU's peak rate training reaches: full fine-tuning in bfloat16 on packed sequences, by the policy gradient loss.

python benchmarks/train_mfu.py [--shape qwen2.5-1.5b] [--length 8192] [--sequences 8] [--tokens-per-pass 16384] [--repeats 5]
                               [--set lora.rank=16] [--profile]

An update is `--sequences` sequences of `--length` tokens each, in passes of at most `--tokens-per-pass`, and one step of AdamW on float32
masters. MFU counts 6 × parameters per token and 6 × layers × width × length for causal attention; nothing that is computed twice counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from drumroll.algo.loss import ppo_clip
from drumroll.backends.train.fsdp2 import Fsdp2
from drumroll.bench.rl import PEAK_FLOPS, SHAPES, Workload, device_name, make_model
from drumroll.text.packing import pack_demonstrations
from drumroll.types import RankInfo


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=SHAPES)
    for name, default in (("length", 8192), ("sequences", 8), ("tokens-per-pass", 16384), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--set", nargs="*", default=[], help="Options of the trainer, such as gradient_checkpointing=true.")
    parser.add_argument("--profile", action="store_true", help="Print what one update spends its time on.")
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name:
        num_parameters = make_model(Path(name), arguments.shape, Workload(1, 1, 1, arguments.length))
        options = options_of(arguments.set)
        config = Fsdp2.Config.model_validate({"micro_batch_tokens": arguments.tokens_per_pass, "lr": 1e-6, **options})
        trainer = Fsdp2(config, Path(name), "bfloat16" if device != "cpu" else "float32", 0)
        trainer.setup(RankInfo("actor_train", 0, 1, device))
    trainer.begin(config.resolve_schedule(100))
    generator = torch.Generator().manual_seed(0)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    rows = torch.randint(vocab_size, (arguments.sequences, arguments.length), generator=generator).tolist()
    batch = pack_demonstrations([([row[0]], row[1:]) for row in rows])
    batch = batch.with_fields(
        weight=batch.loss_mask / batch.loss_mask.sum(), advantages=torch.randn(batch.num_tokens, generator=generator) * batch.loss_mask
    )
    seconds = []
    for _ in range(2 + arguments.repeats):
        started = time.perf_counter()
        trainer.train([batch], ppo_clip)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[2:])
    shape = SHAPES[arguments.shape]
    flops = batch.num_tokens * (6 * num_parameters + 6 * shape["num_hidden_layers"] * shape["hidden_size"] * arguments.length)
    peak = next((rate for part, rate in PEAK_FLOPS.items() if part in device_name()), None)
    print(
        f"{arguments.shape}, {num_parameters / 1e6:,.0f} M parameters, {arguments.sequences} x {arguments.length} tokens, {device_name()}"
    )
    print(f"  {median:.3f} s an update, {batch.num_tokens / median:,.0f} tokens/s, {flops / median / 1e12:,.1f} TFLOP/s", end="")
    print(f", MFU {flops / median / peak:.3f}" if peak else "")
    if device != "cpu":
        print(f"  {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak")
    if arguments.profile:
        profile(trainer, batch)


def options_of(overrides: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for override in overrides:
        path, _, value = override.partition("=")
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = yaml.safe_load(value)
    return tree


def profile(trainer: Fsdp2, batch: Any) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with record(activities=kinds) as recorded:
        trainer.train([batch], ppo_clip)
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=70))


if __name__ == "__main__":
    main()
