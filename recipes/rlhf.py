"""RLHF from end to end: from pairs of names, one of which was preferred, to a policy that invents preferred ones.

    python recipes/rlhf.py ppo      sft → reward_model → ppo
    python recipes/rlhf.py dpo      sft → dpo

Each stage is a config in recipes/rlhf and a run folder in runs/rlhf; `drumroll train recipes/rlhf/sft.yaml` runs one by itself. A stage
that is finished is not run again, and one that was cut off goes on from its last checkpoint. What follows the method changes a key of a
stage that is not finished: `python recipes/rlhf.py ppo --out runs/loose ppo.algo.kl.coef=0.01`.

At the end stands a table of every policy that is there, on prompts that no stage has seen: the hidden quality of its names, the reward
model's score, and the KL to the imitator that all of them begin with. Quality that falls while the score rises is over-optimisation.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

import drumroll
from drumroll.config.load import load_config
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines, write_json

FOLDER = Path("recipes/rlhf")
STAGES = {"ppo": ("sft", "reward_model", "ppo"), "dpo": ("sft", "dpo")}
SAMPLES_PER_PROMPT, MAX_NEW_TOKENS = 4, 13

quality = runpy.run_path(str(FOLDER / "quality.py"))["quality"]


@dataclass(frozen=True)
class Figures:
    """What a policy writes for the held-out prompts; means over the names, sampled at temperature 1 unless said otherwise."""

    gold: float
    """Hidden quality."""
    greedy_gold: float
    """Hidden quality of the names of likeliest letters."""
    score: float | None
    """Of the reward model, where there is one."""
    kl: float
    """To the imitator, per token: the mean of exp(d) - 1 - d over sampled tokens, with d = log p_ref - log p."""


def run_stage(name: str, out: Path, overrides: Sequence[str]) -> None:
    """Bring the stage's run to its end, from wherever it stands."""
    folder = out / name
    own = [override.removeprefix(f"{name}.") for override in overrides if override.startswith(f"{name}.")]
    if is_complete(folder):
        if own:
            raise SystemExit(f"'{folder}' is finished, so that {own[0]} comes too late. Choose another folder with --out.")
        return
    if (folder / "config.yaml").exists():
        drumroll.resume(folder, *own)
        return
    scorer = f"path={out}/reward_model/model/final"
    links = {
        "sft": [],
        "reward_model": [f"model.path={out}/sft/model/final"],
        "ppo": [f"model.path={out}/sft/model/final", f"rewards.0.model.{scorer}", f"critic.{scorer}"],
        "dpo": [f"model.path={out}/sft/model/final"],
    }
    start(load_config([FOLDER / f"{name}.yaml"], [f"run_dir={folder}", *links[name], *own]))


def report(out: Path) -> dict[str, Figures]:
    """The figures of every policy whose run is complete, by plain transformers."""
    prompts = [row["prompt"] for row in read_lines(FOLDER / "heldout.jsonl") for _ in range(SAMPLES_PER_PROMPT)]
    tokenizer = AutoTokenizer.from_pretrained(out / "sft/model/final")
    reference = AutoModelForCausalLM.from_pretrained(out / "sft/model/final", dtype=torch.float32)
    scorer = None
    if is_complete(out / "reward_model"):
        scorer = AutoModelForSequenceClassification.from_pretrained(out / "reward_model/model/final", dtype=torch.float32)
    figures = {}
    for name in ("sft", "ppo", "dpo"):
        if is_complete(out / name):
            policy = AutoModelForCausalLM.from_pretrained(out / name / "model/final", dtype=torch.float32)
            figures[name] = judge(policy, reference, scorer, tokenizer, prompts)
    return figures


@torch.no_grad()
def judge(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    scorer: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
) -> Figures:
    """Sample a name for every prompt, with the same random numbers for every policy; all prompts have as many tokens."""
    given = torch.tensor(tokenizer(prompts)["input_ids"])
    torch.manual_seed(0)
    ids = policy.generate(given, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    greedy = policy.generate(given, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    replies = ids[:, given.shape[1] :]
    is_sampled = (replies == tokenizer.eos_token_id).cumsum(1) - (replies == tokenizer.eos_token_id).long() == 0
    names = tokenizer.batch_decode(replies, skip_special_tokens=True)
    greedy_names = tokenizer.batch_decode(greedy[:, given.shape[1] :], skip_special_tokens=True)
    difference = (logp(reference, ids) - logp(policy, ids))[:, -replies.shape[1] :][is_sampled]
    score = None
    if scorer is not None:
        texts = tokenizer([prompt + name for prompt, name in zip(prompts, names, strict=True)], padding=True, return_tensors="pt")
        score = float(scorer(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"]).logits.mean())
    return Figures(
        gold=fmean(map(quality, prompts, names)),
        greedy_gold=fmean(map(quality, prompts, greedy_names)),
        score=score,
        kl=float((difference.exp() - 1.0 - difference).mean()),
    )


def logp(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of every token but the first."""
    return model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def is_complete(folder: Path) -> bool:
    return (folder / "summary.json").exists()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=STAGES)
    parser.add_argument("--out", type=Path, default=Path("runs/rlhf"))
    parser.add_argument("overrides", nargs="*", metavar="STAGE.KEY=VALUE")
    given = parser.parse_intermixed_args(arguments)
    disable_progress_bar()
    unknown = [override for override in given.overrides if override.partition(".")[0] not in STAGES[given.method]]
    if unknown:
        parser.error(f"'{unknown[0]}' changes no stage of {given.method}; it was expected to begin with one of {STAGES[given.method]}.")
    for stage in STAGES[given.method]:
        run_stage(stage, given.out, given.overrides)
    figures = report(given.out)
    accuracy = {
        name: drumroll.Run(given.out / name).summary["after"]["heldout_accuracy"]
        for name in ("reward_model", "dpo")
        if is_complete(given.out / name)
    }
    write_json(given.out / "report.json", {"heldout_accuracy": accuracy, **{name: asdict(each) for name, each in figures.items()}})
    print("\n| policy | quality, sampled | greedy | reward model's score, sampled | KL to the imitator, per token |\n|---|---|---|---|---|")
    for name, each in figures.items():
        score = "-" if each.score is None else f"{each.score:.3f}"
        print(f"| {name} | {each.gold:.3f} | {each.greedy_gold:.3f} | {score} | {each.kl:.4f} |")
    print("\n" + ", ".join(f"held-out accuracy of {name}: {value:.3f}" for name, value in accuracy.items()))


if __name__ == "__main__":
    main()
