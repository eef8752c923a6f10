"""The controller's pen: every number of a run passes through here, to the files, the terminal and the final report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import ceil, nan
from statistics import fmean, median, pstdev
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console

from drumroll.config.models import RlConfig, RunConfig
from drumroll.errors import RolloutError
from drumroll.life import Span
from drumroll.record.folder import RunFolder
from drumroll.record.live import LiveView
from drumroll.record.metrics import REWARD, SUCCESS, TOKENS_PER_S, EvalStage, MetricsLog, rewind
from drumroll.record.phases import PhaseTimer
from drumroll.record.report import Scores, Summary, pick_transcripts, print_report, write_summary
from drumroll.record.store import Reader
from drumroll.types import Quarantined, SampleInfo

MAX_IDLE_STEPS = 10
"""Steps in a row without anything to learn from, after which a run stops."""

TRAINING = frozenset({"score", "update", "sync", "warmup", "comparison"})
"""Phases in which the trainers work."""

MISMATCH = "mismatch/logp_mean"
MISMATCH_STEPS = 10
"""Steps at the beginning that say what is usual."""
MISMATCH_GROWTH = 5.0
MISMATCH_ROUNDING = 0.02
"""A mean difference of log-probabilities that bfloat16 alone can make."""

MAX_NONFINITE = 3
"""Updates in a row with a loss or gradient that is not finite, after which a run goes back or stops."""


@dataclass
class Compute:
    """What training has cost, in tokens. A token that is only passed forward costs a third of one that is trained on."""

    trained: int = 0
    forwarded: int = 0
    """Prompt and new tokens of rollouts, and tokens scored before the update."""
    imitated: int = 0
    imitation_updates: int = 0
    generated: int = 0

    @property
    def rl_tokens(self) -> float:
        """Cost of RL so far, in trained tokens."""
        return self.trained + self.forwarded / 3

    @property
    def equal_sft_updates(self) -> int:
        """Updates of supervised fine-tuning, as they have been so far, that cost as much as RL has."""
        return ceil(self.rl_tokens / max(1.0, self.imitated / max(1, self.imitation_updates)))


class Recorder:
    """A context manager around a run. A run that ends well gets a summary, a curve and a report; one that fails keeps its files."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, console: Console | None = None) -> None:
        self.folder = folder
        self.compute = Compute()
        self.num_nonfinite = 0
        """Updates in a row, up to now, that were skipped because of their numbers."""
        self._cfg = cfg
        self._steps = cfg.max_steps if isinstance(cfg, RlConfig) else 0
        self._console = console or Console()
        self._view = LiveView(self._steps, cfg.name, self._console)
        self._metrics = MetricsLog(folder, cfg.record, cfg.model_dump(mode="json"))
        self._timer = PhaseTimer(on_change=self._view.phase)
        self._exit = ExitStack()
        self._idle_steps = 0
        self._is_asynchronous = isinstance(cfg, RlConfig) and cfg.rollout.max_staleness > 0
        self._domains = tuple(cfg.domains) if isinstance(cfg, RlConfig) else ()
        self._pulled = isinstance(cfg, RlConfig) and cfg.algo.kl is not None
        """Whether a reference gives every token a gradient, also where rewards say nothing."""
        self._first_mismatches: list[float] = []
        self._warned_of_mismatch = False
        self._quarantined: dict[str, str] = {}
        """Task → why it is not drawn any more."""
        self._scores: dict[EvalStage, Scores] = {}
        self._last_score: float | None = None
        self._last_step = 0

    def __enter__(self) -> Self:
        self._exit.enter_context(self._metrics)
        self._exit.enter_context(self._view)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()
        if kind is None:
            self._report()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Charge the block's time to a phase."""
        return self._timer.phase(name)

    def take_spans(self, step: int) -> list[Span]:
        """When each phase since the last call began and ended, and who worked in it."""
        spans = self._timer.take_spans()
        return [Span("actor_train" if name in TRAINING else "controller", name, step, start, end) for name, start, end in spans]

    @contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[None]:
        """Show that something other than a step of RL goes on; its time belongs to no step."""
        self._view.stage(text, total)
        yield
        self._timer.take()

    def log_step(
        self,
        step: int,
        samples: Sequence[SampleInfo],
        batch: Mapping[str, float],
        updates: Sequence[Mapping[str, float]],
        weights: str,
        critic: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """One step of RL: its samples, its batch, the mean over its updates, its time, and the digest of the weights it led to. `critic`
        are the updates of the critic that go with those of the policy, or the only ones."""
        times = self._timer.take()
        wasted_tokens = int(batch.get("rollout/wasted_tokens", 0.0))
        new_tokens = sum(sample.num_new_tokens for sample in samples) + wasted_tokens
        training_s = sum(times.get(f"time/{name}_s", 0.0) for name in TRAINING)
        generating_s = sum(times.values()) if self._is_asynchronous else times.get("time/rollout_s", 0.0)
        metrics = {
            **sample_metrics(samples),
            **reward_costs(samples),
            **domain_metrics(samples, self._domains),
            TOKENS_PER_S: new_tokens / max(1e-9, generating_s),
            **{name: value for name, value in batch.items() if self._domains or not name.startswith("domain/")},
            **mean_of_updates(updates),
            **mean_of_updates(critic, "critic"),
            **times,
            "utilisation/actor_train": training_s / max(1e-9, sum(times.values())),
        }
        self._metrics.log(step, metrics, weights=weights)
        self._view.step(step, metrics)
        self._watch_mismatch(step, metrics.get(MISMATCH))
        self._last_step = step
        self.compute.generated += new_tokens
        self.compute.forwarded += sum(sample.num_prompt_tokens + sample.num_new_tokens for sample in samples) + wasted_tokens
        self.compute.forwarded += int(batch.get("batch/num_scored_tokens", 0.0))
        self.compute.trained += int(sum(update.get("num_tokens", 0.0) for update in [*updates, *critic]))
        self._watch_numbers(f"step {step}", _gravest(updates, critic), [sample.sample_id for sample in samples])
        solved = bool(samples) and all(sample.success for sample in samples)
        idle = batch.get("batch/informative_token_ratio") == 0.0 and not solved and not self._pulled
        self._idle_steps = self._idle_steps + 1 if idle else 0
        if self._idle_steps >= MAX_IDLE_STEPS:
            raise RolloutError(
                f"{MAX_IDLE_STEPS} steps in a row had nothing to learn from: within every group all rewards were equal, or none came. "
                f"Make the task easier or warm up first (`warmup`), raise `rollout.group_size`, or look at the samples with "
                f"`drumroll show {self.folder.root}`."
            )

    def log_imitation(self, first_update: int, updates: Sequence[Mapping[str, float]]) -> None:
        """Updates of supervised fine-tuning, the first of which has number `first_update`."""
        self._log_updates("sft", "demonstrations", first_update, updates)
        self.compute.imitated += int(sum(update.get("num_tokens", 0.0) for update in updates))
        self.compute.imitation_updates += len(updates)

    def log_preferences(self, first_update: int, updates: Sequence[Mapping[str, float]]) -> None:
        """Updates of preference learning, the first of which has number `first_update`."""
        self._log_updates("preference", "preferences", first_update, updates)
        self.compute.trained += int(sum(update.get("num_tokens", 0.0) for update in updates))
        self._last_step = first_update + len(updates)

    def _log_updates(self, prefix: str, rows: str, first_update: int, updates: Sequence[Mapping[str, float]]) -> None:
        for offset, update in enumerate(updates):
            self._metrics.log(first_update + offset, {f"{prefix}/{name}": value for name, value in update.items()})
        self._view.advance(len(updates))
        self._watch_numbers(f"update {first_update} on {rows}", updates)

    def log_evaluation(self, step: int, samples: Mapping[str, Sequence[SampleInfo]], *, stage: EvalStage | None = None) -> None:
        """Results on the held-out tasks by mode; as success where the task knows it, as mean reward otherwise. Before, during or after RL
        unless `stage` says something else."""
        scores = {
            name: value for mode, of_mode in samples.items() for name, value in scores_by_domain(mode, of_mode, self._domains).items()
        }
        if stage is None:
            stage = "before" if step == 0 else "after" if step == self._steps else "during"
        extra = {f"{mode}_{name}": value for mode, of_mode in samples.items() for name, value in sample_metrics(of_mode).items()}
        self._scores[stage] = scores
        self._last_score = scores.get("sampled")
        self._metrics.log_evaluation(stage, step, {**scores, **extra})
        if stage != "comparison":
            self._view.evaluation(step, scores.get("sampled"), scores.get("greedy"))

    def log_heldout(self, step: int, scores: Scores, details: Mapping[str, float] | None = None, *, last: bool) -> None:
        """Figures of held-out demonstrations or preferences, where there are some, before, during and after training on others. `details`
        are not in the summary."""
        if scores:
            stage: EvalStage = "after" if last else "before" if step == 0 else "during"
            self._scores[stage] = scores
            self._metrics.log_evaluation(stage, step, {**(details or {}), **scores})

    def _watch_mismatch(self, step: int, mean: float | None) -> None:
        """Say it once when trainers and engines drift apart: several times as far as in the run's first steps, and more than rounding."""
        if mean is None:
            return
        if len(self._first_mismatches) < MISMATCH_STEPS:
            self._first_mismatches.append(mean)
        usual = median(self._first_mismatches)
        if mean > max(MISMATCH_ROUNDING, MISMATCH_GROWTH * usual) and not self._warned_of_mismatch:
            self._warned_of_mismatch = True
            self.warn(
                f"step {step}: the trainers' log-probabilities differ by {mean:.3g} a token from those that the engines sampled at "
                f"({MISMATCH}), where {usual:.2g} was usual. Less staleness, a wider `model.dtype`, or "
                f"`algo.correction` (docs/algorithms.md) keeps that from spoiling the gradient."
            )

    def _watch_numbers(self, where: str, updates: Sequence[Mapping[str, float]], sample_ids: Sequence[str] = ()) -> None:
        for number, update in enumerate(updates):
            if not update.get("nonfinite"):
                if self.num_nonfinite < MAX_NONFINITE:  # too many stay too many, whatever came after them in the same call
                    self.num_nonfinite = 0
                continue
            self.num_nonfinite += 1
            facts = {name: repr(update[name]) for name in ("loss", "grad_norm")}
            self.folder.incident("nonfinite", where=where, update=number, **facts, samples=list(sample_ids))
            self.warn(f"{where}: update {number} was skipped, its loss or gradient is not finite (incidents.jsonl).")

    def note_quarantined(self, tasks: Sequence[Quarantined]) -> None:
        """Tasks that always fail: they are not drawn again, and the report names them."""
        for task in tasks:
            self._quarantined[task.task_id] = task.reason
            self.folder.incident("quarantined", **asdict(task))
            self.warn(f"task '{task.task_id}' failed {task.attempts} times by itself and is quarantined; last: {task.reason}")

    def warn(self, text: str) -> None:
        """Tell the user something that does not stop the run."""
        self._view.note(text)

    # What a checkpoint keeps.

    def state(self) -> dict[str, Any]:
        return {
            "compute": asdict(self.compute),
            "scores": {stage: dict(scores) for stage, scores in self._scores.items()},
            "idle_steps": self._idle_steps,
            "first_mismatches": list(self._first_mismatches),
            "quarantined": dict(self._quarantined),
            "num_nonfinite": self.num_nonfinite,
            "last_step": self._last_step,
            "seconds": self._timer.totals(),
            "sizes": self._metrics.sizes(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.compute = Compute(**state["compute"])
        self._scores = {stage: dict(scores) for stage, scores in state["scores"].items()}
        self._idle_steps = state["idle_steps"]
        self._first_mismatches = list(state.get("first_mismatches", ()))
        self._quarantined = dict(state.get("quarantined", {}))
        self.num_nonfinite = state["num_nonfinite"]
        self._last_step = state["last_step"]
        self._timer.restore(state["seconds"])

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Take the files back to where they were when `state` was made."""
        rewind(self.folder, state["sizes"])

    def sync(self) -> None:
        """Bring every line so far down to the disk."""
        self._metrics.sync()

    def stand_at(self, done: int) -> None:
        """The stage has come this far already."""
        self._view.advance(done)

    @property
    def last_score(self) -> float | None:
        """Of the latest evaluation at the training temperature."""
        return self._last_score

    def _report(self) -> None:
        compute = self.compute
        tokens = {"generated": compute.generated, "trained": compute.trained, "imitated": compute.imitated}
        summary = Summary(
            name=self._cfg.name,
            steps=self._last_step,
            seconds=self._timer.totals(),
            tokens={name: number for name, number in tokens.items() if number},
            before=self._scores.get("before", {}),
            after=self._scores.get("after", {}),
            comparison=self._scores.get("comparison", {}),
            evaluation=self._scores.get("evaluation", {}),
            quarantined=self._quarantined,
            details={"seed": self._cfg.seed},
        )
        write_summary(self.folder, summary)
        if not summary.evaluation:
            from drumroll.record.curve import draw_curve  # matplotlib, which nothing needs before the end

            draw_curve(self.folder)
        transcripts = []
        if "sampled" in summary.before and "sampled" in summary.after:
            with Reader(self.folder.store) as reader:
                transcripts = pick_transcripts(reader, before=0, after=self._steps)
        print_report(self._console, self.folder, summary, transcripts)


def mean_of_updates(updates: Sequence[Mapping[str, float]], whose: Literal["update", "critic"] = "update") -> dict[str, float]:
    """What the updates of a step report, on average. What only one of them reports has a full name of its own."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name if "/" in name else f"{whose}/{name}": fmean(update[name] for update in updates if name in update) for name in names}


def _gravest(updates: Sequence[Mapping[str, float]], critic: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """One report for each part of a step: the critic's where there is no other, or where only its numbers are not finite."""
    if not updates or not critic:
        return updates or critic
    return [beside if beside.get("nonfinite") and not own.get("nonfinite") else own for own, beside in zip(updates, critic, strict=True)]


def score(samples: Sequence[SampleInfo]) -> float:
    """Share of successes where the task knows success, mean reward otherwise; not a number where there is no verdict at all."""
    successes = [float(sample.success) for sample in samples if sample.success is not None]
    return fmean(successes or [sample.reward for sample in samples if sample.reward is not None] or [nan])


def scores_by_domain(mode: str, samples: Sequence[SampleInfo], domains: Sequence[str]) -> dict[str, float]:
    """The score of a mode, and of each domain as `mode/domain`; of several domains it is the mean of theirs, whatever their sizes."""
    by_domain = {name: [sample for sample in samples if sample.domain == name] for name in domains}
    scores = {f"{mode}/{name}": score(of_domain) for name, of_domain in by_domain.items() if of_domain}
    return {mode: fmean(scores.values()) if scores else score(samples), **scores}


def domain_metrics(samples: Sequence[SampleInfo], domains: Sequence[str]) -> dict[str, float]:
    """What the samples of each domain look like: the same names, as `domain/<domain>/…`."""
    metrics: dict[str, float] = {}
    for domain in domains:
        of_domain = [sample for sample in samples if sample.domain == domain]
        metrics[f"domain/{domain}/share"] = len(of_domain) / max(1, len(samples))
        if of_domain:
            values = {**sample_metrics(of_domain), **reward_costs(of_domain)}
            metrics |= {f"domain/{domain}/{name.removeprefix('rollout/')}": value for name, value in values.items()}
    return metrics


def reward_costs(samples: Sequence[SampleInfo]) -> dict[str, float]:
    """How long each reward took, and how often it failed before it answered. The seconds depend on timing."""
    metrics: dict[str, float] = {}
    for name in sorted({name for sample in samples for name in sample.reward_stats}):
        values = [sample.reward_stats[name] for sample in samples if name in sample.reward_stats]
        if name.endswith("_s"):
            metrics |= {f"time/reward_{name}_mean": fmean(values), f"time/reward_{name}_max": max(values)}
        else:
            metrics[f"reward/{name}"] = sum(values)
    return metrics


def sample_metrics(samples: Sequence[SampleInfo]) -> dict[str, float]:
    """What a set of samples looks like: rewards, their parts, success, lengths, how they ended."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    successes = [float(sample.success) for sample in samples if sample.success is not None]
    lengths = [float(sample.num_new_tokens) for sample in samples]
    metrics = {"rollout/num_samples": float(len(samples)), "rollout/no_verdict_ratio": 1.0 - len(rewards) / max(1, len(samples))}
    if rewards:
        metrics |= {REWARD: fmean(rewards), "rollout/reward_std": pstdev(rewards)}
    if successes:
        metrics[SUCCESS] = fmean(successes)
    if lengths:
        metrics |= {"rollout/new_tokens_mean": fmean(lengths), "rollout/new_tokens_max": max(lengths)}
    for name in sorted({name for sample in samples for name in sample.reward_parts}):
        metrics[f"reward/{name}_mean"] = fmean(sample.reward_parts[name] for sample in samples if name in sample.reward_parts)
    for name in sorted({name for sample in samples for name in sample.metrics}):
        metrics[f"env/{name}_mean"] = fmean(sample.metrics[name] for sample in samples if name in sample.metrics)
    for reason, count in sorted(Counter(sample.stop_reason for sample in samples).items()):
        metrics[f"rollout/stop_{reason}_ratio"] = count / len(samples)
    return metrics
