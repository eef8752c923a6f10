"""Training from Python, notebooks included: `drumroll.train(model=..., tasks=[...], reward=my_function)`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from drumroll.config.load import check_config, merge
from drumroll.config.models import RunConfig
from drumroll.errors import ConfigError
from drumroll.pipelines.start import evaluate as evaluate_model
from drumroll.pipelines.start import resume as resume_run
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary
from drumroll.record.store import Filter, Reader
from drumroll.registry import REGISTRY
from drumroll.types import Trajectory

Rows = Iterable[Mapping[str, Any]]
Reward = Callable[..., Any] | str | Mapping[str, Any]

Inputs = dict[str, tuple[dict[str, Any], Rows]]
"""Rows that are not in a file yet, by name, each with its section."""

NO_FILE = "given in Python"


@dataclass(frozen=True)
class Run:
    """A finished run, or an evaluation, and what it left behind."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures that the end prints, for example `run.summary["after"]["sampled"]`."""
        return read_summary(RunFolder.open(self.folder))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per step."""
        return read_lines(RunFolder.open(self.folder).metrics_file)

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return RunFolder.open(self.folder).final_model

    def trajectories(self, *, phase: str | None = None, limit: int | None = None) -> list[Trajectory]:
        """What the model did, oldest first."""
        with Reader(RunFolder.open(self.folder).store) as reader:
            return [reader.load(row.sample_id) for row in reader.query(Filter(phase=phase, state="consumed"), limit=limit)]


def train(
    *,
    model: str | Mapping[str, Any],
    tasks: str | Rows | None = None,
    reward: Reward | Sequence[Reward] = (),
    heldout: str | Rows | None = None,
    domains: Mapping[str, Mapping[str, Any]] | None = None,
    run_dir: str | Path | None = None,
    max_steps: int = 100,
    **sections: Any,
) -> Run:
    """Train a model by RL and return the run.

    `model` is a folder, a hub id, or a `model` section. `tasks` and `heldout` are rows with a `prompt` and any other columns, or
    a path. `reward` is a function of a trajectory, a registered name, a section with `kind`, or several of these. Everything
    else is a section of the config, as in YAML: `rollout={"group_size": 8}, trainer={"lr": 1e-4}`.

    With `domains`, each is a section as in YAML that may also have `tasks`, `heldout` and `reward`, as above:
    `domains={"sums": {"share": 0.5, "tasks": rows, "reward": right}, …}`.
    """
    return _run(*_rl(model, tasks, heldout, reward, domains, {"max_steps": max_steps, **sections}), run_dir)


def evaluate(
    *,
    model: str | Mapping[str, Any],
    tasks: str | Rows | None = None,
    reward: Reward | Sequence[Reward] = (),
    domains: Mapping[str, Mapping[str, Any]] | None = None,
    run_dir: str | Path | None = None,
    **sections: Any,
) -> Run:
    """Play tasks with a model as it is, sampled and greedy, and return what came of it: `evaluate(…).summary["evaluation"]["sampled"]`.

    Everything is given as to `train`; of `domains` those tasks count that are held out, or all where there are none such."""
    by_domain = None if domains is None else {name: {"heldout": domain.get("tasks"), **domain} for name, domain in domains.items()}
    tree, inputs = _rl(model, tasks, tasks, reward, by_domain, {"max_steps": 1, **sections})
    return _run(tree, inputs, run_dir, evaluate_model)


def _rl(
    model: str | Mapping[str, Any],
    tasks: str | Rows | None,
    heldout: str | Rows | None,
    reward: Reward | Sequence[Reward],
    domains: Mapping[str, Mapping[str, Any]] | None,
    sections: Mapping[str, Any],
) -> tuple[dict[str, Any], Inputs]:
    """A config of RL as plain data, and the rows in it that are in no file yet."""
    names: list[str] = []
    tree: dict[str, Any] = {
        "pipeline": "rl",
        "model": {"path": model} if isinstance(model, str) else dict(model),
        "rewards": _sections(_several(reward), names),
        **sections,
    }
    given = {"": (tree, {"train": tasks, "heldout": heldout})}
    if domains is not None:
        tree["domains"] = {}
        for name, domain in domains.items():
            own = {"tasks", "heldout", "reward"}
            section = tree["domains"][name] = {key: value for key, value in domain.items() if key not in own}
            if "reward" in domain:
                section["rewards"] = _sections(_several(domain["reward"]), names)
            given[name] = (section, {"train": domain.get("tasks"), "heldout": domain.get("heldout")})
    inputs: Inputs = {}
    for name, (section, sources) in given.items():
        paths = {split: _source(source) for split, source in sources.items() if source is not None}
        if paths:
            section["data"] = merge(paths, section.get("data", {}))
        for split, source in sources.items():
            if source is not None and not isinstance(source, str):
                inputs[f"{name}-{split}" if name else split] = (section["data"][split], source)
    return tree, inputs


def preference(
    *,
    model: str | Mapping[str, Any],
    data: str | Rows,
    kind: str = "dpo",
    heldout: str | Rows | None = None,
    options: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    **sections: Any,
) -> Run:
    """Train a model on preferences and return the run: `drumroll.preference(model="org/name", data=rows, options={"beta": 0.1})`.

    `model` is a folder, a hub id, or a `model` section. `data` and `heldout` are rows with `prompt`, `chosen` and `rejected` (for `kto`
    also `completion` and `label`), or a path. `kind` is dpo, ipo, kto, simpo, reward_model or your own; `options` are further keys of
    the section `preference`, and everything else is a section of the config, as in YAML."""
    sources = {"data": data, **({} if heldout is None else {"heldout": heldout})}
    section = merge({"kind": kind, **{name: _source(source) for name, source in sources.items()}}, options or {})
    tree: dict[str, Any] = {
        "pipeline": "preference",
        "model": {"path": model} if isinstance(model, str) else dict(model),
        "preference": section,
        **sections,
    }
    return _run(tree, {name: (section[name], rows) for name, rows in sources.items() if not isinstance(rows, str)}, run_dir)


def _source(source: str | Rows) -> dict[str, Any]:
    return {"path": source if isinstance(source, str) else NO_FILE}


def _run(
    tree: dict[str, Any], inputs: Inputs, run_dir: str | Path | None, action: Callable[[RunConfig, RunFolder], RunFolder] = start
) -> Run:
    """Check the config, claim the folder, and run."""
    folder = RunFolder.claim(run_dir, check_config(tree).name)
    try:
        for name, (section, rows) in inputs.items():
            section["path"] = str(_written(folder, name, rows))
        action(check_config({**tree, "run_dir": str(folder.root)}), folder)
    except BaseException:
        folder.give_up()
        raise
    return Run(folder.root)


def resume(run: str | Path, *overrides: str, reward: Callable[..., Any] | Sequence[Callable[..., Any]] = ()) -> Run:
    """Go on with a run that was cut off, from its newest good checkpoint: `drumroll.resume("runs/x", "trainer.lr=1e-4")`.

    `reward` gives again the functions that `train` was given, those of domains last, in the same order; rewards that have a name need
    not be."""
    _sections([reward] if callable(reward) else reward, [])
    return Run(resume_run(run, overrides).root)


def _several(reward: Reward | Sequence[Reward]) -> Sequence[Reward]:
    return [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else reward


def _sections(rewards: Sequence[Reward], names: list[str]) -> list[dict[str, Any]]:
    """Rewards as config sections; a function is registered under its own name and travels to the workers by value.

    `names` are those that other functions have; this one's are added."""
    sections: list[dict[str, Any]] = []
    for reward in rewards:
        if isinstance(reward, str | Mapping):
            sections.append({"kind": reward} if isinstance(reward, str) else dict(reward))
            continue
        name = getattr(reward, "__name__", None)
        if name is None or not (inspect.isfunction(reward) or inspect.isbuiltin(reward)):
            raise ConfigError(f"`reward`: expected a function, a registered name or a mapping with `kind`, got {reward!r}.")
        if name in names:  # two lambdas, for example
            name = f"{name}_{len(names) + 1}"
        names.append(name)
        REGISTRY.shipped[name] = reward
        sections.append({"kind": f"python:{name}"})
    return sections


def _written(folder: RunFolder, split: str, rows: Rows) -> Path:
    """Rows that were given in Python, kept in the run folder so that the run is complete."""
    path = folder.root / "inputs" / f"{split}.jsonl"
    path.parent.mkdir(exist_ok=True)
    try:
        path.write_text("".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`{split}`: every row must be a mapping of JSON values: {error}.") from error
    return path
