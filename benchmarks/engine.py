"""How fast the native engine generates, beside transformers' own ways, on one CPU thread each.

python benchmarks/engine.py [--sizes 1m 30m] [--repeats 3]

64 requests with prompts and replies of mixed lengths up to 128 tokens, sampled at temperature 1. Every side runs in a process of its own
with one thread, the sides in turn, as often as there are repeats; what counts is the median time from the first request to the last token,
after a round that warms up. Replies end only by their lengths, so that all sides generate the same number of tokens. transformers'
`generate` gets all requests as one padded batch, and stops when the longest reply is complete; its continuous batching gets them one by
one. Only the native engine returns log-probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_REQUESTS, LONGEST = 64, 128
SIZES: dict[str, dict[str, int]] = {
    "1m": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2048},
    "30m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192},
}
SIDES = ("native", "generate", "continuous batching")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help="Run this side alone, on the model in --folder.")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        print(f"{run(arguments.side, arguments.folder):.4f}")
        return
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            compare(size, Path(name), arguments.repeats)


def compare(size: str, folder: Path, repeats: int) -> None:
    num_parameters = make_model(size, folder)
    num_tokens = sum(length for _, length in workload(SIZES[size]["vocab_size"]))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"), "1")
    for _ in range(repeats):
        for side in SIDES:
            command = (sys.executable, __file__, "--side", side, "--folder", str(folder))
            done = subprocess.run(command, env={**os.environ, **threads}, check=True, capture_output=True, text=True)
            seconds[side].append(float(done.stdout.split()[-1]))
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    print(f"{num_parameters / 1e6:.1f} M parameters, {NUM_REQUESTS} requests, {num_tokens:,} new tokens, median of {repeats}")
    for side, median in medians.items():
        spread = f"{min(seconds[side]):.2f} to {max(seconds[side]):.2f} s"
        print(f"  {side:20} {num_tokens / median:8,.0f} tokens/s   {spread}   native is {median / medians['native']:.2f} x as fast")
    fastest = min(median for side, median in medians.items() if side != "native")
    print(f"  native against the fastest of the others: {fastest / medians['native']:.2f} x", flush=True)


def workload(vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts, and the lengths of their replies."""
    rng = random.Random(0)
    return [([rng.randrange(3, vocab_size) for _ in range(rng.randint(8, LONGEST))], rng.randint(8, LONGEST)) for _ in range(NUM_REQUESTS)]


def make_model(size: str, folder: Path) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=2 * LONGEST, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run(side: str, folder: Path) -> float:
    """Seconds of the second of two rounds."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return {"native": run_native, "generate": run_generate, "continuous batching": run_continuous}[side](folder)


def run_native(folder: Path) -> float:
    from transformers import AutoModelForCausalLM

    from drumroll.backends.infer.native import Native
    from drumroll.types import GenRequest, RankInfo, Sampling, Version

    source = AutoModelForCausalLM.from_pretrained(folder)
    requests = workload(source.config.vocab_size)

    async def rounds() -> float:
        engine = Native(Native.Config(num_slots=NUM_REQUESTS), folder, "float32")
        engine.setup(RankInfo("actor_infer", 0, 1, "cpu"))
        await engine.update(Version(0, 0), iter([[(name, tensor) for name, tensor in source.named_parameters()]]), "keep")
        await engine.resume()
        for number in range(2):
            started = time.perf_counter()
            engine.submit(
                [GenRequest(f"{number} {i}", prompt, Sampling(max_new_tokens=length), i) for i, (prompt, length) in enumerate(requests)]
            )
            num_open, num_tokens = len(requests), 0
            while num_open:
                for chunk in await engine.poll(5.0):
                    num_open -= chunk.finish is not None
                    num_tokens += len(chunk.token_ids)
            seconds = time.perf_counter() - started
            assert num_tokens == sum(length for _, length in requests)
        await engine.close()
        return seconds

    return asyncio.run(rounds())


def run_generate(folder: Path) -> float:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder)
    requests = workload(model.config.vocab_size)
    widest, longest = max(len(prompt) for prompt, _ in requests), max(length for _, length in requests)
    ids = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    config = GenerationConfig(max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0)
    for _ in range(2):
        started = time.perf_counter()
        model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        seconds = time.perf_counter() - started
    return seconds


def run_continuous(folder: Path) -> float:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    requests = workload(model.config.vocab_size)
    config = GenerationConfig(max_new_tokens=LONGEST, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, eos_token_id=-1)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for _ in range(2):
            started = time.perf_counter()
            for prompt, length in requests:
                manager.add_request(prompt, max_new_tokens=length)
            num_open, num_tokens = len(requests), 0
            while num_open:
                result = manager.get_result(timeout=60.0)
                assert result is not None, "continuous batching stopped"
                if result.is_finished():
                    num_open -= 1
                    num_tokens += len(result.generated_tokens)
            seconds = time.perf_counter() - started
            assert num_tokens == sum(length for _, length in requests)
    return seconds


if __name__ == "__main__":
    main()
