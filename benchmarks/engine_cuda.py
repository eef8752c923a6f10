"""How fast engines generate on one GPU, beside bare vLLM, in one run.

python benchmarks/engine_cuda.py [--shape qwen2.5-0.5b] [--prompts 64] [--samples 8] [--prompt-tokens 128] [--new-tokens 512] [--repeats 3]
                                 [--sides native vllm "vllm without log-probabilities" "vllm in drumroll"] [--set trainer.offload=true ...]

Random weights in bfloat16; every prompt is asked for several replies, all of full length, sampled at temperature 1 with the
log-probability of every token. Each side runs in processes of its own that have the GPU to themselves, and warms up with one round; the
best of the repeats counts. vLLM has its graphs, prefix caching and room for all requests at once; it is left out where it is not installed.
"vllm in drumroll" are the rollouts of whole training steps: scheduler, environment workers and the backend `vllm`, beside a trainer on the
same GPU; what such a run prints about its steps follows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from drumroll.bench.rl import SHAPES, Workload, make_model

IN_DRUMROLL = "vllm in drumroll"
SIDES = ("native", "vllm", "vllm without log-probabilities", IN_DRUMROLL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    for name, default in (("prompts", 64), ("samples", 8), ("prompt-tokens", 128), ("new-tokens", 512), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES)
    parser.add_argument("--set", nargs="*", default=[], help="Settings of whole training steps.")
    parser.add_argument("--side", choices=SIDES, help="Run this side alone, on the model in --folder.")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    workload = Workload(arguments.prompts, arguments.samples, arguments.prompt_tokens, arguments.new_tokens)
    if arguments.side:
        run = {"native": run_native, IN_DRUMROLL: run_in_drumroll}.get(arguments.side, run_vllm)
        print(json.dumps(run(arguments.folder, workload, arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        num_parameters = make_model(Path(name), arguments.shape, workload)
        print(f"{arguments.shape}, {num_parameters / 1e6:,.0f} M parameters, {workload}")
        best: dict[str, float] = {}
        for side in arguments.sides:
            command = (sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", name)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(f"  {side}: failed")
                continue
            seconds = json.loads(done.stdout.strip().splitlines()[-1])
            best[side] = min(seconds)
            times = ", ".join(f"{value:.3f}" for value in seconds)
            print(f"  {side:32} {workload.num_new_tokens / best[side]:10,.0f} tokens/s   {times} s", flush=True)
        for ours in ("native", IN_DRUMROLL):
            for side in best:
                if side not in ("native", IN_DRUMROLL) and ours in best:
                    print(f"  {ours} is {best[side] / best[ours]:.2f} x as fast as {side}")


def prompts_of(workload: Workload) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(500) for _ in range(workload.prompt_tokens)] for _ in range(workload.prompts)]


def run_native(folder: Path, workload: Workload, arguments: argparse.Namespace) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    from drumroll.backends.infer.native import Native
    from drumroll.types import GenRequest, RankInfo, Sampling, Version

    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    context = workload.prompt_tokens + workload.new_tokens + 8

    async def rounds() -> list[float]:
        engine = Native(Native.Config(num_slots=workload.prompts * workload.samples, context_tokens=context), folder, "bfloat16")
        engine.setup(RankInfo("actor_infer", 0, 1, "cuda:0"))
        await engine.update(Version(0, 0), iter([list(source.named_parameters())]), "keep")
        await engine.resume()
        sampling, seconds = Sampling(max_new_tokens=workload.new_tokens), []
        for number in range(1 + arguments.repeats):
            # New weights, as in training: no prompt is known from the round before.
            await engine.update(Version(0, number + 1), iter([list(source.named_parameters())]), "recompute")
            started = time.perf_counter()
            asked = [
                GenRequest(f"{number} {p} {s}", prompt, sampling, 1000 * p + s)
                for p, prompt in enumerate(prompts_of(workload))
                for s in range(workload.samples)
            ]
            engine.submit(asked)
            num_open, num_tokens = len(asked), 0
            while num_open:
                for chunk in await engine.poll(1.0):
                    num_open -= chunk.finish is not None
                    num_tokens += len(chunk.token_ids)
            seconds.append(time.perf_counter() - started)
            assert num_tokens == workload.num_new_tokens
        await engine.close()
        return seconds[1:]

    return asyncio.run(rounds())


def run_vllm(folder: Path, workload: Workload, arguments: argparse.Namespace) -> list[float]:
    from vllm import LLM, SamplingParams

    context = workload.prompt_tokens + workload.new_tokens + 8
    llm = LLM(str(folder), dtype="bfloat16", max_model_len=context, max_num_seqs=512, gpu_memory_utilization=0.8)
    logprobs = 0 if arguments.side == "vllm" else None
    sampling = SamplingParams(n=workload.samples, temperature=1.0, max_tokens=workload.new_tokens, ignore_eos=True, logprobs=logprobs)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(workload)]
    seconds = []
    for _ in range(1 + arguments.repeats):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        assert sum(len(reply.token_ids) for output in outputs for reply in output.outputs) == workload.num_new_tokens
    return seconds[1:]


def run_in_drumroll(folder: Path, workload: Workload, arguments: argparse.Namespace) -> list[float]:
    names = ("prompts", "samples", "prompt_tokens", "new_tokens")
    sizes = [str(part) for name in names for part in (f"--{name.replace('_', '-')}", getattr(workload, name))]
    context = workload.prompt_tokens + workload.new_tokens + 8
    room = ("engine.memory_share=0.5", f"engine.cache_tokens={workload.prompts * workload.samples * context}")
    bench = (sys.executable, "-m", "drumroll", "bench", "rl", "--shape", arguments.shape, "--steps", str(arguments.repeats))
    figures = ""
    model = f"model.path={folder}"
    with subprocess.Popen((*bench, *sizes, model, "engine.kind=vllm", *room, *arguments.set), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            figures = line if line.startswith("{") else figures
            print(line, end="", file=sys.stderr, flush=True)
    return list(json.loads(figures)["rollout_seconds"])


if __name__ == "__main__":
    main()
