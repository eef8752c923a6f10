"""Faults with real signals, through real Ray: what a run survives, and that it ends as if nothing had happened. `chaos.py`: long forms."""

from __future__ import annotations

import inspect
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sabotage import Outcome, Scene, sabotaged

from drumroll.backends.infer.native import Native
from drumroll.cluster.transport import SendsWeights
from drumroll.config.load import check_config
from drumroll.errors import RoleLost, WeightSyncError
from drumroll.pipelines.start import start
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary
from drumroll.workers.engine import EngineWorker

from links import cut_links  # isort: skip
from local_cluster import local_cluster  # isort: skip
from tiny import tiny_tree  # isort: skip

SILENCE_S = 3.0
STEPS = 6


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """The tiny run without warm-up and evaluation, repeatable to the last bit."""
    changes = {
        "run_dir": str(folder / "run"),
        "deterministic": True,
        "model": {"dtype": "float32"},
        "warmup": None,
        "data": {"heldout": None},
        "max_steps": STEPS,
        "supervision": {"silence_s": SILENCE_S},
        **changes,
    }
    return tiny_tree(folder, **changes)


def clean(folder: Path, **changes: Any) -> Outcome:
    """The same without faults, with its workers in this process."""
    config = tree(folder, **changes)
    with local_cluster():
        run = start(check_config(config))
    return Outcome(run, [], 0.0)


def poisoned(folder: Path) -> dict[str, Any]:
    """The tiny run's tasks, two of which are poison, in an environment that finds out."""
    plain = Path(tiny_tree(folder)["data"]["train"]["path"]).read_text().splitlines()
    rows = [{**json.loads(line), "poison": number in (3, 11)} for number, line in enumerate(plain)]
    path = folder / "poisoned.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data": {"train": {"path": str(path)}, "heldout": None},
        "plugins": ["./tests/faults/moody.py"],
        "env": {"kind": "moody"},
        "rewards": [
            {"kind": "exact_match", "success_at": 1.0, "pooled": True},
            {"kind": "./tests/e2e/rewards.py:positions", "weight": 0.5},
        ],
        "max_steps": 10,  # all tasks come up
    }


def test_frozen_workers_are_replaced_and_poison_is_quarantined(tmp_path: Path) -> None:
    """One of each kind, so that the run cannot go on before it is replaced."""

    def plan(scene: Scene) -> None:
        for step, cluster in ((1, "engines"), (3, "environments"), (5, "rewards")):
            scene.await_step(step)
            scene.strike(cluster, 0, signal.SIGSTOP)
            scene.await_incident("worker replaced", len(scene.blows))

    changes = poisoned(tmp_path)
    expected = clean(tmp_path / "clean", **changes)
    outcome = sabotaged(tree(tmp_path / "faults", **changes), plan)
    assert len(outcome.blows) == 3
    for blow in outcome.blows:
        assert outcome.first(blow, "worker lost") < SILENCE_S + 5.0
    outcome.check_samples(6, 4)
    assert outcome.weights == expected.weights, "bit for bit as if nothing had happened"
    quarantined = read_summary(outcome.run)["quarantined"]
    assert sorted(quarantined) == ["train-11", "train-3"]
    assert all("is poison" in reason for reason in quarantined.values())
    assert outcome.most_leases(quarantined) <= 2 + 1, "two attempts, and one that the frozen environment worker took along"


TWO_RANKS = {"devices": {"actor_train": [0, 1], "actor_infer": [0, 1]}, "ray": {"cpu_slots": 2}}


@pytest.fixture(scope="module")
def with_a_trainer_killed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One of two ranks dies in the middle of an update."""

    def plan(scene: Scene) -> None:
        scene.await_step(2)
        scene.await_phase("update")
        scene.strike("trainers", 1)

    return sabotaged(tree(tmp_path_factory.mktemp("trainer"), **TWO_RANKS), plan)


@pytest.fixture(scope="module")
def with_links_cut(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The line between the environment worker and one engine is cut for a while, then slow."""

    def plan(scene: Scene) -> None:
        scene.await_step(2)
        links.hold(engine=0, seconds=5.0)
        scene.await_step(4)
        links.delay(engine=0, seconds=0.2)

    with cut_links() as links:
        return sabotaged(tree(tmp_path_factory.mktemp("links"), **TWO_RANKS), plan)


def test_a_trainer_rank_that_is_killed_comes_back_and_its_step_is_redone(with_a_trainer_killed: Outcome, with_links_cut: Outcome) -> None:
    kinds = [line["kind"] for line in with_a_trainer_killed.incidents]
    assert kinds.count("role lost") == 1
    assert "redone" in kinds
    assert "went back" not in kinds, "there was a copy in memory"
    with_a_trainer_killed.check_samples(6, 4)
    assert with_a_trainer_killed.weights == with_links_cut.weights, "both faults left no trace"


def test_a_rank_that_hangs_though_it_answers_is_named_by_those_who_wait_for_it(tmp_path: Path, with_links_cut: Outcome) -> None:
    changes = {
        **TWO_RANKS,
        "plugins": ["./tests/faults/hanging.py"],
        "algo": {"loss": {"kind": "hangs_once", "marker": str(tmp_path / "has_hung")}},
        "trainer": {"timeout_s": 8.0},
    }
    outcome = sabotaged(tree(tmp_path, **changes), lambda scene: None)
    (lost,) = [line["reason"] for line in outcome.incidents if line["kind"] == "role lost"]
    assert "actor_train rank 0 on node" in lost.partition("has waited for other ranks in train(), in vain")[0]
    late = lost.partition("Those who have not arrived:")[2]
    assert re.search(r"^\s+actor_train rank 1 on node \w+ computes, in train\(\) for \d+ s \(hanging\.py, line \d+, in hangs_once\)", late)
    assert outcome.weights == with_links_cut.weights, "done again with the same result"


def test_a_line_that_is_cut_or_slow_costs_no_sample(with_links_cut: Outcome) -> None:
    with_links_cut.check_samples(6, 4)
    assert with_links_cut.incidents == [], "nobody was taken for lost"


def test_when_every_engine_is_dead_and_none_may_be_replaced_the_run_ends(tmp_path: Path) -> None:
    struck: list[float] = []

    def plan(scene: Scene) -> None:
        scene.await_step(1)
        scene.strike("engines", 1)
        scene.await_incident("worker given up")
        step = scene.step
        scene.await_step(step + 2)  # the other engine does the work alone
        scene.strike("engines", 0)
        struck.append(time.monotonic())

    changes = {"devices": {"actor_train": 0, "actor_infer": [0, 1]}, "ray": {"cpu_slots": 2}, "max_steps": 10_000}
    with pytest.raises(RoleLost) as error:
        sabotaged(tree(tmp_path, **changes, supervision={"max_restarts": 0}), plan)
    assert time.monotonic() - struck[0] < 60
    message = str(error.value)
    for part in ("actor_infer: nobody is left", "supervision.max_restarts", "actor_infer rank 0 on node", "drumroll resume"):
        assert part in message


Once = Callable[..., Any]


def once(function: Once, error: Exception) -> Once:
    """The function, which fails the third time that it is called."""
    calls: list[None] = []

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise error
        return function(*args, **kwargs)

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise error
        return await function(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(function) else sometimes


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return clean(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("engine", [0, 1], ids=["shares", "apart"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(SendsWeights, "open_weights"), (SendsWeights, "send_weights"), (EngineWorker, "receive_weights")],
    ids=["open", "send", "receive"],
)
def test_a_failure_in_any_phase_of_a_sync_leaves_no_engine_with_wrong_weights_and_none_idle(
    owner: type, method: str, engine: int, tmp_path: Path, plain: Outcome
) -> None:
    """Also where the engine has a device of its own, which nobody asks it to come back to. That the run ends shows that no lock is held."""
    failing = once(getattr(owner, method), WeightSyncError("injected"))
    with patch.object(owner, method, failing):
        outcome = clean(tmp_path, devices={"actor_train": 0, "actor_infer": engine}, ray={"cpu_slots": 2})
    assert outcome.weights == plain.weights
    outcome.check_samples(6, 4)
    assert {line["kind"] for line in outcome.incidents} & {"sync failed", "worker replaced"}


def test_weights_that_arrive_damaged_are_not_served(tmp_path: Path, plain: Outcome) -> None:
    update = Native.update
    updates: list[None] = []

    async def damaged(self: Native, *args: Any) -> Any:
        sums = await update(self, *args)
        updates.append(None)
        return {name: total + (len(updates) == 3) for name, total in sums.items()}

    with patch.object(Native, "update", damaged):
        outcome = clean(tmp_path)
    assert outcome.weights == plain.weights
    assert "arrived damaged" in next(line["reason"] for line in outcome.incidents if line["kind"] == "worker lost")


def test_the_run_folder_names_what_happened(with_a_trainer_killed: Outcome) -> None:
    run: RunFolder = with_a_trainer_killed.run
    (lost,) = [line for line in with_a_trainer_killed.incidents if line["kind"] == "role lost"]
    assert lost["reason"].startswith("actor_train rank 1 on node")
    assert run.summary_file.exists()
