"""How long a whole step of GRPO takes, beside TRL's, on the same machine in one run.

python benchmarks/grpo_step.py [--shape 3m] [--prompts 8] [--samples 8] [--prompt-tokens 8] [--new-tokens 32] [--steps 20] [--repeats 3]
                               [--warm-up 2] [--tailed] [--staleness 1] [--trl-batch 64] [--dtype float32] [--set trainer.threads=2 ...]

Both sides train the same random weights by GRPO: generate every reply of a step, then one forward and backward pass over them and one
update, with no reference and nothing stale. Replies end only by their length, which with `--tailed` has a long tail: the same lengths on
both sides. With `--staleness` drumroll also runs asynchronously, with so many versions of staleness. A side runs in a process of its own,
the sides in turn, as often as there are repeats; of each, the median step after the first `--warm-up` ones counts. Whatever a side uses of
the machine's cores is its own choice. Both compute in the same dtype, on a GPU bfloat16 if nothing else is said; TRL with `--trl-batch`
sequences at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumroll.bench.rl import Workload

SETTINGS = ["trainer.threads=2"]
"""Of drumroll on two cores, where trainer and engines take turns: a thread in each of two engines, two in the trainer."""

ASYNCHRONOUS = ("algo.correction.kind=truncated_is", "rollout.max_staleness={}")
"""What makes a run asynchronous, for a number of versions."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="3m")
    parser.add_argument("--side", choices=["trl"], help="Run this side alone.")
    parser.add_argument("--set", nargs="*", default=SETTINGS, help="Settings of drumroll's side.")
    parser.add_argument("--tailed", action="store_true", help="Lengths with a long tail, cut at --new-tokens, the median a tenth of it.")
    parser.add_argument("--trl-batch", type=int, help="Sequences of one of TRL's passes; all of a step if not given.")
    parser.add_argument("--staleness", type=int, help="Drumroll also runs asynchronously, with so many versions of staleness.")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="Of both sides' passes.")
    sizes = {"prompts": 8, "samples": 8, "prompt-tokens": 8, "new-tokens": 32, "steps": 20, "warm-up": 2, "repeats": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run_trl(arguments)))
        return
    runs: dict[str, Callable[[], list[float]]] = {"drumroll": lambda: run_drumroll(arguments)}
    if arguments.staleness:
        settings = [setting.format(arguments.staleness) for setting in ASYNCHRONOUS]
        runs[f"drumroll, staleness {arguments.staleness}"] = lambda: run_drumroll(arguments, settings)
    runs["TRL"] = lambda: last_line(sys.executable, __file__, *sys.argv[1:], "--side", "trl")["seconds"]
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for name, run in runs.items():
            try:
                seconds.setdefault(name, []).append(statistics.median(run()))
            except subprocess.CalledProcessError as error:  # the others' figures are not lost for it
                print(f"{name}: failed with exit code {error.returncode}", flush=True)
                continue
            print(f"{name}: {seconds[name][-1]:.3f} s a step", flush=True)
    medians, num_samples = {name: statistics.median(values) for name, values in seconds.items()}, arguments.prompts * arguments.samples
    for name, median in medians.items():
        times = ", ".join(f"{value:.3f}" for value in seconds[name])
        ratio = f", {medians['TRL'] / median:.2f} x as fast as TRL" if name != "TRL" and "TRL" in medians else ""
        print(f"{name:22} {median:7.3f} s a step, {3600 * num_samples / median:12,.0f} samples an hour{ratio}   ({times})")


def last_line(*command: str) -> Any:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_drumroll(arguments: argparse.Namespace, settings: Sequence[str] = ()) -> list[float]:
    """Seconds of every step."""
    workload = ("--prompts", "--samples", "--prompt-tokens", "--new-tokens")
    sizes = [str(part) for name in workload for part in (name, getattr(arguments, name[2:].replace("-", "_")))]
    bench = (sys.executable, "-m", "drumroll", "bench", "rl", "--shape", arguments.shape, "--steps", str(arguments.steps))
    tailed = ["--tailed"] if arguments.tailed else []
    dtype = [f"model.dtype={arguments.dtype}"] if arguments.dtype else []
    figures = last_line(*bench, *sizes, *tailed, *arguments.set, *dtype, *settings)
    return figures["step_seconds"][arguments.warm_up - 1 :]  # `bench` leaves the first one out itself


def run_trl(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every step."""
    from datasets import Dataset
    from transformers.tokenization_utils_tokenizers import TokenizersBackend
    from trl import GRPOTrainer

    from drumroll.bench.rl import Workload, make_model

    workload = Workload(arguments.prompts, arguments.samples, arguments.prompt_tokens, arguments.new_tokens, arguments.tailed)
    prompts = workload.texts(arguments.steps + arguments.warm_up)
    clock = make_clock()

    def coin(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(ids[-1] % 2) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", arguments.shape, workload)
        trainer = GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=coin,
            args=trl_config(folder / "run", workload, arguments),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=TokenizersBackend.from_pretrained(folder / "model", eos_token="w0"),  # TRL asks for one
            callbacks=[clock],
        )
        if workload.tailed:
            trainer.model.generate = to_lengths(trainer.model.generate, prompts, workload)
        trainer.train()
    return {"seconds": [after - before for before, after in pairwise(clock.ends)][arguments.warm_up :]}


def trl_config(folder: Path, workload: Workload, arguments: argparse.Namespace) -> Any:
    import torch
    from trl import GRPOConfig

    on_gpu, num_samples = torch.cuda.is_available(), workload.prompts * workload.samples
    dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    batch = arguments.trl_batch or num_samples
    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=num_samples // batch,
        num_generations=workload.samples,
        max_completion_length=workload.new_tokens,
        max_steps=arguments.steps + arguments.warm_up,
        beta=0.0,
        learning_rate=1e-6,
        temperature=1.0,
        generation_kwargs={"min_new_tokens": workload.new_tokens},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        bf16=dtype == "bfloat16",
        model_init_kwargs={"dtype": dtype},
        use_cpu=not on_gpu,
        dataloader_num_workers=0,
        gradient_checkpointing=False,
    )


def make_clock() -> Any:
    """A callback of TRL's trainer: `ends` has when the first step began, and when each one ended."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not self.ends:
                self.ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    return Clock()


def to_lengths(generate: Callable[..., Any], prompts: Sequence[str], workload: Workload) -> Callable[..., Any]:
    """`generate`, where every reply ends at its own length: whatever comes after it is the end token."""
    import torch

    numbers = {text: number for number, text in enumerate(prompts)}

    def generate_to_lengths(**inputs: Any) -> Any:
        ids, seen = inputs["input_ids"], Counter[str]()
        lengths = []
        for row in ids.tolist():
            text = " ".join(f"w{token}" for token in row[-workload.prompt_tokens :])
            lengths.append(workload.length(numbers[text], seen[text]))
            seen[text] += 1
        ends = torch.tensor(lengths, device=ids.device) + ids.shape[1]
        return generate(**inputs, stopping_criteria=[lambda tokens, *_, **__: tokens.shape[1] >= ends])

    return generate_to_lengths


if __name__ == "__main__":
    main()
