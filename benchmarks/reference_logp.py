"""How likely a run's held-out replies are to its initial model, before and after training.

    python benchmarks/reference_logp.py RUN [RUN...]

The replies sampled at the training temperature by the first and the last evaluation come from each run's store; plain
transformers scores their tokens with the model that the run started from. Prints a table and one JSON line. A policy that
games its reward writes text that its initial model finds unlikely, or repeats itself: the share of distinct words tells.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drumroll.config.load import load_config
from drumroll.models.prepare import prepare_model
from drumroll.record.folder import RunFolder
from drumroll.record.store import Bounds, Filter, Reader
from drumroll.types import Trajectory


@dataclass(frozen=True)
class Replies:
    """One evaluation's sampled replies."""

    reward: float
    ref_logp: float
    """Mean over the replies' tokens of the initial model's log-probability."""
    distinct_words: float
    """Mean over the replies of different words per word."""


def sampled_replies(reader: Reader, step: int) -> list[Trajectory]:
    """What an evaluation sampled at the training temperature."""
    rows = reader.query(Filter(phase="eval", step=Bounds.at(step)))
    return [reader.load(row.sample_id) for row in rows if row.temperature > 0]


@torch.no_grad()
def reply_logp(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """The model's log-probability of every token that the policy sampled, at temperature 1."""
    ids = torch.tensor(trajectory.token_ids, dtype=torch.long)
    logp: torch.Tensor = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return logp[:-1].gather(1, ids[1:, None])[:, 0][torch.tensor(trajectory.loss_mask[1:])]


def judge(model: PreTrainedModel, replies: Sequence[Trajectory]) -> Replies:
    words = [reply.last_reply.lower().split() for reply in replies]
    return Replies(
        reward=fmean(reply.reward for reply in replies if reply.reward is not None),
        ref_logp=float(torch.cat([reply_logp(model, reply) for reply in replies]).mean()),
        distinct_words=fmean(len(set(said)) / len(said) for said in words if said),
    )


def compare(run: Path) -> tuple[Replies, Replies]:
    """The first and the last evaluation of a run, judged by the model that it started from."""
    folder = RunFolder.open(run)
    cfg = load_config([folder.config_file])
    initial = folder.initial_model if cfg.model.scratch else prepare_model(cfg.model, folder.initial_model, cfg.seed)
    model = AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32).eval()
    with Reader(folder.store) as reader:
        last = max(row.step for row in reader.query(Filter(phase="eval")))
        return judge(model, sampled_replies(reader, 0)), judge(model, sampled_replies(reader, last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+")
    torch.set_num_threads(1)
    results = []
    print(f"{'run':<24} {'':<11} {'reward':>8} {'ref logp/token':>15} {'distinct words':>15}")
    for run in parser.parse_args().runs:
        before, after = compare(run)
        change = Replies(**{name: value - asdict(before)[name] for name, value in asdict(after).items()})
        for label, figures, sign in (("before", before, ""), ("after", after, ""), ("difference", change, "+")):
            row = f"{figures.reward:>{sign}8.3f} {figures.ref_logp:>{sign}15.3f} {figures.distinct_words:>{sign}15.3f}"
            print(f"{run.name if label == 'before' else '':<24} {label:<11} {row}")
        results.append({"run": run.name, "before": asdict(before), "after": asdict(after), "difference": asdict(change)})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
