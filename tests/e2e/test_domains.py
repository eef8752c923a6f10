"""Several domains in one run: each with its own tasks, rewards, sampling and share."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny import run_tiny, write_rows

import drumroll
from drumroll.config.load import check_config
from drumroll.errors import DataError
from drumroll.pipelines import rl
from drumroll.pipelines.job import prepare
from drumroll.pipelines.start import resume
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary
from drumroll.record.store import Filter, Reader

pytestmark = pytest.mark.usefixtures("workers_in_this_process")


def write_copies(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{n % 10}=", "target": str(n % 10)}) + "\n" for n in range(count)))
    return str(path)


def mixed(folder: Path, **changes: Any) -> dict[str, Any]:
    """Half sorting, a third and a sixth of copying a digit in two manners."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = {
        "train": {"path": write_copies(folder / "copy.jsonl", 30)},
        "heldout": {"path": write_copies(folder / "copy_heldout.jsonl", 5)},
    }
    exact = {"kind": "exact_match", "field": "target", "success_at": 1.0}
    return {
        "data": None,
        "domains": {
            "sorting": {
                "share": 0.5,
                "data": {
                    "train": {"path": write_rows(folder / "sort.jsonl", 40, 1)},
                    "heldout": {"path": write_rows(folder / "sort_heldout.jsonl", 6, 2)},
                },
                "filters": ["./tests/e2e/rewards.py:odd_places"],
            },
            "copying": {"share": 1 / 3, "data": copies, "rewards": [exact], "sampling": {"max_new_tokens": 2}},
            "pooled-copying": {
                "share": 1 / 6,
                "data": copies,
                "rewards": [{**exact, "pooled": True}, {"kind": "./tests/e2e/rewards.py:brevity", "pooled": True}],
                "sampling": {"max_new_tokens": 3, "temperature": 0.5},
            },
        },
        **changes,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    from local_cluster import local_cluster

    folder = tmp_path_factory.mktemp("mixed")
    with local_cluster():
        return run_tiny(folder, **mixed(folder))


def test_every_domain_has_its_share_of_the_training_also_where_filters_reject(run: RunFolder) -> None:
    with Reader(run.store) as reader:
        consumed = Counter(row.domain for row in reader.query(Filter(phase="train", state="consumed")))
        filtered = Counter(row.domain for row in reader.query(Filter(phase="train", state="filtered")))
    assert consumed == {"sorting": 3 * 3 * 4, "copying": 3 * 2 * 4, "pooled-copying": 3 * 1 * 4}
    assert set(filtered) == {"sorting"}


def test_each_domain_is_judged_and_sampled_in_its_own_way(run: RunFolder) -> None:
    with Reader(run.store) as reader:
        samples = [reader.load(row.sample_id) for row in reader.query(Filter(phase="train", state="consumed"))]
    parts = {sample.task.domain: set(sample.reward_parts) for sample in samples}
    assert parts == {"sorting": {"exact_match", "positions"}, "copying": {"exact_match"}, "pooled-copying": {"exact_match", "brevity"}}
    sampling = {sample.task.domain: (sample.sampling.max_new_tokens, sample.sampling.temperature) for sample in samples}
    assert sampling == {"sorting": (6, 1.0), "copying": (2, 1.0), "pooled-copying": (3, 0.5)}
    assert {sample.task.domain for sample in samples if sample.num_new_tokens > 3} == {"sorting"}


def test_metrics_and_evaluations_are_by_domain(run: RunFolder) -> None:
    steps = [line for line in read_lines(run.metrics_file) if "weights" in line]
    for line in steps:
        assert [line[f"domain/{name}/share"] for name in ("sorting", "copying", "pooled-copying")] == pytest.approx([1 / 2, 1 / 3, 1 / 6])
        assert line["domain/pooled-copying/time/reward_brevity_s_mean"] > 0
        assert line["domain/copying/new_tokens_max"] <= 2
        assert line["rollout/num_failed_reward"] == 0
    assert sum(line.get("domain/sorting/num_rejected", 0) for line in steps) > 0
    after = read_summary(run)["after"]
    domains = [after[f"sampled/{name}"] for name in ("sorting", "copying", "pooled-copying")]
    assert after["sampled"] == pytest.approx(sum(domains) / 3)
    last = read_lines(run.eval_file)[-1]
    assert {"sampled/copying", "greedy/pooled-copying"} <= last.keys()


def test_the_same_mixture_gives_the_same_weights(run: RunFolder, tmp_path: Path) -> None:
    again = run_tiny(tmp_path, **mixed(tmp_path, rollout={"num_env_workers": 2}, reward_workers=2, engine={"num_slots": 5}))
    digests = [[line["weights"] for line in read_lines(folder.metrics_file) if "weights" in line] for folder in (run, again)]
    assert digests[0] == digests[1]


def test_rows_of_one_file_go_to_the_domains_that_they_name(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "answer": str(n), "domain": "even" if n % 2 == 0 else "odd"} for n in range(10)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "pipeline": "rl",
        "max_steps": 1,
        "model": {"scratch": {"characters": "0123456789="}},
        "data": {"train": {"path": str(path)}},
        "rewards": ["exact_match"],
        "domains": {"even": {"share": 0.25}, "odd": {"share": 0.75}},
    }
    job = prepare(check_config(tree))
    assert {name: [task.prompt for task in tasks] for name, tasks in job.tasks.items()} == {
        "even": ["0=", "2=", "4=", "6=", "8="],
        "odd": ["1=", "3=", "5=", "7=", "9="],
    }
    assert "10 (even 5, odd 5) training tasks" in job.describe()
    with pytest.raises(DataError, match=r"line 1: its domain is 'even'; evem or odd was expected. Did you mean 'evem'\?"):
        prepare(check_config({**tree, "domains": {"evem": {"share": 0.25}, "odd": {"share": 0.75}}}))
    with pytest.raises(DataError, match=r"domain 'more' has a share of 0.5 and no training task"):
        prepare(check_config({**tree, "domains": {"even": {"share": 0.25}, "odd": {"share": 0.25}, "more": {"share": 0.5}}}))


def test_a_mixture_with_a_curriculum_goes_on_exactly_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_curriculum(folder: Path) -> dict[str, Any]:
        tree = mixed(folder, checkpoint={"every": 1}, warmup=None, max_steps=4, curriculum={"lookahead": 3})
        del tree["domains"]["sorting"]["filters"]
        return tree

    def weights(folder: RunFolder) -> list[str]:
        return [line["weights"] for line in read_lines(folder.metrics_file) if "weights" in line]

    whole = run_tiny(tmp_path / "whole", **with_curriculum(tmp_path / "whole"))
    take_step = rl.take_step

    def cut_off(cfg: Any, fleet: Any, rec: Any, keeper: Any) -> None:
        if keeper.progress.step == 2:
            raise InterruptedError
        take_step(cfg, fleet, rec, keeper)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "take_step", cut_off)
        with pytest.raises(InterruptedError):
            run_tiny(tmp_path / "part", **with_curriculum(tmp_path / "part"))
    resumed = resume(tmp_path / "part" / "run")
    assert weights(resumed) == weights(whole)
    with Reader(whole.store) as reader:
        tasks = Counter(row.task_id for row in reader.query(Filter(phase="train", domain="copying", state="consumed")))
    assert len(tasks) == 8, "four steps of two tasks: none comes again before all have had their turn"


def test_domains_from_python(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}="} for number in range(8)]
    run = drumroll.train(
        model={"scratch": {"characters": "0123456789=", "config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}}},
        domains={
            "short": {"share": 0.75, "tasks": rows, "heldout": rows[:2], "reward": lambda trajectory: -trajectory.num_new_tokens},
            "sevens": {"share": 0.25, "tasks": rows[:4], "reward": [lambda trajectory: trajectory.last_reply.count("7")]},
        },
        max_steps=2,
        run_dir=tmp_path / "run",
        rollout={"groups_per_step": 4, "group_size": 2, "sampling": {"max_new_tokens": 3}},
        devices={"actor_train": 0, "actor_infer": 0},
    )
    samples = run.trajectories(phase="train")
    assert Counter(sample.task.domain for sample in samples) == {"short": 12, "sevens": 4}
    for sample in samples:
        expected = -sample.num_new_tokens if sample.task.domain == "short" else sample.last_reply.count("7")
        assert sample.reward == expected
    evaluated = drumroll.evaluate(
        model=str(run.model),
        domains={"short": {"share": 1.0, "tasks": rows[:2], "reward": lambda trajectory: -trajectory.num_new_tokens}},
        run_dir=tmp_path / "evaluated",
        rollout={"sampling": {"max_new_tokens": 3}},
        devices={"actor_infer": 0},
    )
    assert evaluated.summary["evaluation"]["greedy/short"] == run.summary["after"]["greedy/short"]
    assert len(evaluated.trajectories(phase="eval")) == 4
