"""`drumroll bench rl`: whole training steps of a model's shape, through the same pipeline as any run, broken into their phases.

Weights are random, and so are prompts; replies never end before their time, so that every step has the same tokens; or their lengths have a
long tail. The first step warms everything up and does not count.

What is reported. *Generation* is new tokens over the time of rollouts. *MFU* is what training would take at the device's peak rate over
what it took: 6 × parameters for every token, plus 6 × layers × query width × length for causal attention; nothing that is computed a
second time counts. Memory is the peak of each role's process on its device, by stage, beside what the plan said.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from drumroll.config.load import apply_override, check_config
from drumroll.config.models import RunConfig
from drumroll.envs.base import Step
from drumroll.envs.single_turn import SingleTurn
from drumroll.errors import ConfigError
from drumroll.pipelines.job import plan_for
from drumroll.pipelines.start import start
from drumroll.plan.cost import GIB, parameter_count
from drumroll.record.files import read_lines
from drumroll.registry import nearest
from drumroll.types import Task, Trajectory

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": 512, "tie_word_embeddings": True},
    "3m": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 683, "num_attention_heads": 8, "num_key_value_heads": 8,
           "vocab_size": 512, "tie_word_embeddings": True},
    "qwen2.5-0.5b": {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
                     "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-1.5b": {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                     "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2.5-7b": {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                   "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
"""Fields of Qwen2's config."""

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40": 181e12, "B200": 2250e12}
"""Dense bfloat16 rates, by a part of the device's name."""

PHASES = ("rollout", "score", "update", "sync")


@dataclass(frozen=True)
class Workload:
    """What a step consists of."""

    prompts: int = 64
    samples: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 512
    tailed: bool = False
    """Whether `new_tokens` is only where the longest replies end: lengths are lognormal then, their 99th percentile `new_tokens`, and ten
    times the median."""

    def length(self, prompt: int, sample: int) -> int:
        """Of one reply, the same whoever asks."""
        if not self.tailed:
            return self.new_tokens
        drawn = random.Random(f"{prompt} {sample}").lognormvariate(math.log(self.new_tokens / 10), math.log(10) / 2.326)
        return min(self.new_tokens, max(1, round(drawn)))

    def texts(self, num_steps: int) -> list[str]:
        """The prompts of so many steps."""
        rng = random.Random(0)
        return [" ".join(f"w{rng.randrange(500)}" for _ in range(self.prompt_tokens)) for _ in range(num_steps * self.prompts)]

    @property
    def num_new_tokens(self) -> int:
        """Of a step whose replies are all of full length."""
        return self.prompts * self.samples * self.new_tokens


def bench(shape: str, workload: Workload, num_steps: int, overrides: Sequence[str] = (), out: Path | None = None) -> dict[str, Any]:
    """Run `num_steps` steps and one before them; print a table and one line of JSON, and return what that says."""
    if shape not in SHAPES:
        raise ConfigError(f"no shape named '{shape}'.{nearest(shape, SHAPES)} Known: {', '.join(SHAPES)}.")
    with tempfile.TemporaryDirectory(prefix="drumroll-bench-") as name:
        folder = Path(name)
        tree = config_of(folder, workload, num_steps + 1)
        own_model = Path(tree["model"]["path"])
        for override in overrides:
            apply_override(tree, override)
        cfg = check_config(tree)
        if Path(str(cfg.model.path)) == own_model:
            make_model(own_model, shape, workload)
        facts = json.loads((Path(str(cfg.model.path)) / "config.json").read_text(encoding="utf-8"))
        num_parameters = parameter_count(facts)
        assert num_parameters is not None, "a model of one of the shapes"
        planned = planned_memory(cfg)
        run = start(cfg)
        lines = [line for line in read_lines(run.metrics_file) if "weights" in line]
    figures = {
        "shape": shape,
        **asdict(workload),
        "num_parameters": num_parameters,
        "device": device_name(),
        **summarise(lines[1:], SHAPES[shape], num_parameters, workload),
        **planned,
    }
    _show(figures)
    if out is not None:
        out.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return figures


def make_model(folder: Path, shape: str, workload: Workload) -> int:
    """Write a model of the shape with random weights, and a tokenizer with a word for each of its tokens; returns its parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    context = workload.prompt_tokens + workload.new_tokens + 8
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=context, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    num_parameters = sum(int(parameter.numel()) for parameter in model.parameters())
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    TokenizersBackend(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return num_parameters


def config_of(folder: Path, workload: Workload, num_steps: int) -> dict[str, Any]:
    """A run of GRPO on random prompts."""
    import torch

    tasks = [
        {"prompt": text, "lengths": [workload.length(number, sample) for sample in range(workload.samples)]}
        for number, text in enumerate(workload.texts(num_steps))
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    context = workload.prompt_tokens + workload.new_tokens + 8
    return {
        "pipeline": "rl",
        "name": "bench",
        "run_dir": str(folder / "run"),
        "max_steps": num_steps,
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if torch.cuda.is_available() else "float32"},
        "data": {"train": {"path": str(folder / "tasks.jsonl")}},
        "env": {"kind": "drumroll.bench.rl:LengthsGiven"},
        "rewards": [{"kind": "drumroll.bench.rl:coin"}],
        "rollout": {
            "groups_per_step": workload.prompts,
            "group_size": workload.samples,
            "sampling": {"max_new_tokens": workload.new_tokens},
        },
        "algo": {"advantage": {"kind": "grpo"}, "loss": {"kind": "ppo_clip"}},
        "trainer": {"lr": 1e-6},
        "checkpoint": {"to_disk": False},
        "engine": {"num_slots": min(512, workload.prompts * workload.samples), "context_tokens": context},
    }


class LengthsGiven(SingleTurn):
    """Replies that end where their task says: the first episode of a task at the first of its lengths, and so on."""

    _num_begun: ClassVar[Counter[str]] = Counter()

    async def start(self, task: Task) -> Step:
        lengths = task.data["lengths"]
        number = self._num_begun[task.id]
        self._num_begun[task.id] += 1
        return replace(await super().start(task), max_new_tokens=lengths[number % len(lengths)])


def coin(trajectory: Trajectory) -> float:
    """A reward that differs within groups and costs nothing."""
    return float(trajectory.token_ids[-1] % 2)


def summarise(lines: Sequence[Mapping[str, Any]], shape: Mapping[str, Any], num_parameters: int, workload: Workload) -> dict[str, Any]:
    """Medians over the steps."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    phases = {name: median([line[f"time/{name}_s"] for line in lines]) for name in PHASES}
    step_s = median([sum(line[f"time/{name}_s"] for name in PHASES) for line in lines])
    num_tokens, num_new_tokens = (median([line[f"batch/{name}"] for line in lines]) for name in ("num_tokens", "num_new_tokens"))
    num_samples = workload.prompts * workload.samples
    per_token = 6 * num_parameters + 6 * shape["num_hidden_layers"] * shape["hidden_size"] * num_tokens / num_samples
    peak = next((rate for part, rate in PEAK_FLOPS.items() if part in device_name()), None)
    memory = {name: median([line[name] for line in lines]) for name in lines[-1] if name.startswith("memory/")}
    return {
        "step_s": step_s,
        "step_seconds": [sum(line[f"time/{name}_s"] for name in PHASES) for line in lines],
        "rollout_seconds": [line["time/rollout_s"] for line in lines],
        **{f"{name}_s": value for name, value in phases.items()},
        "samples_per_hour": 3600 * num_samples / step_s,
        "tokens_per_s": num_tokens / step_s,
        "generated_per_s": num_new_tokens / phases["rollout"],
        "trained_per_s": num_tokens / phases["update"],
        "mfu": None if peak is None else per_token * num_tokens / phases["update"] / peak,
        "sync_mib": median([line["sync/bytes"] for line in lines]) / 2**20,
        **memory,
    }


def planned_memory(cfg: RunConfig) -> dict[str, float]:
    """What `drumroll plan` says of GPUs, by the names that the measured peaks have; nothing without GPUs."""
    plan, _ = plan_for(cfg)
    on_gpu = [role for role in plan.stage_memory if any(device.kind == "gpu" for device in plan.devices(role))]
    return {f"planned/{role}_{stage}_gib": use.total / GIB for role in on_gpu for stage, use in plan.stage_memory[role].items()}


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _show(figures: Mapping[str, Any]) -> None:
    table = Table("phase", "seconds", "share", box=None)
    for name in PHASES:
        table.add_row(name, f"{figures[f'{name}_s']:.3f}", f"{figures[f'{name}_s'] / figures['step_s']:.0%}")
    table.add_row("step", f"{figures['step_s']:.3f}", "")
    console = Console()
    console.print(table)
    mfu = "" if figures["mfu"] is None else f", MFU {figures['mfu']:.2f}"
    console.print(
        f"{figures['shape']}, {figures['num_parameters'] / 1e6:,.1f} M parameters, {figures['device']}: "
        f"{figures['samples_per_hour']:,.0f} samples an hour, {figures['tokens_per_s']:,.0f} tokens/s, "
        f"generation {figures['generated_per_s']:,.0f}/s, "
        f"training {figures['trained_per_s']:,.0f}/s{mfu}, "
        f"sync of {figures['sync_mib']:,.0f} MiB in {figures['sync_s']:.3f} s"
    )
    for name, value in figures.items():
        if name.startswith("memory/"):
            own = name.removeprefix("memory/")
            planned = f", {figures[f'planned/{own}']:,.1f} in the plan" if f"planned/{own}" in figures else ""
            console.print(f"{own}: {value:,.1f} GiB at its peak{planned}")
