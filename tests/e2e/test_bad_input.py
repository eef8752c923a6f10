"""Every mistake that can be known beforehand: exit code 2, one message that says where and what to do, and nothing started or written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_tree, write_rows

import drumroll
from drumroll import cli
from drumroll.cluster.session import Session
from drumroll.config.load import merge
from drumroll.errors import UserError

Files = dict[str, bytes | None]
Invoke = Callable[..., str]


def contents(folder: Path) -> Files:
    """Every file below with what is in it, and every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def config_file(folder: Path, **changes: Any) -> str:
    """A config that is right but for the changes, with its data in `folder`."""
    tree = merge(tiny_tree(folder, rewards=[{"kind": "exact_match"}], run_dir=str(folder / "run")), changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return "config.yaml"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run a command that must be refused; returns its message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "__enter__", lambda session: pytest.fail("Ray was started"))

    def invoke(*arguments: str) -> str:
        before = contents(tmp_path)
        monkeypatch.setattr(sys, "argv", ["drumroll", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert ended.value.code == 2, shown.err
        assert shown.out == ""
        assert shown.err.startswith("drumroll: ")
        assert "Traceback" not in shown.err
        assert contents(tmp_path) == before
        return shown.err.removeprefix("drumroll: ").strip()

    return invoke


def test_the_config_of_these_tests_is_otherwise_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path) | {"config.yaml": None}
    monkeypatch.setattr(sys, "argv", ["drumroll", "check", config_file(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code is None
    shown = capsys.readouterr().out
    assert shown.startswith("ok: 40 training tasks, 20 held-out tasks, 3 steps, roles actor_train, actor_infer, environment")
    assert set(contents(tmp_path)) - set(before) == {"train.jsonl", "heldout.jsonl", "demos.jsonl"}


CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": (
        {"trainer": {"learning_rate": 1e-3}},
        ["`trainer.learning_rate`: unknown key.", "Known here: ", "micro_batch_tokens"],
    ),
    "misspelt key": ({"rollout": {"group_sizes": 4}}, ["`rollout.group_sizes`: unknown key. Did you mean 'group_size'?"]),
    "misspelt section": ({"traner": {"lr": 1e-3}}, ["`traner`: unknown key. Did you mean 'trainer'?"]),
    "wrong type": ({"rollout": {"group_size": "many"}}, ["`rollout.group_size`: got 'many' (str), expected a valid integer"]),
    "out of range": ({"trainer": {"lr": -1}}, ["`trainer.lr`: got -1 (int), expected greater than 0."]),
    "unknown pipeline": ({"pipeline": "rll"}, ["`pipeline`: got 'rll' (str), expected one of rl, sft, preference. Did you mean 'rl'?"]),
    "unknown reward": (
        {"rewards": ["exact_mach"]},
        ["`rewards.0.kind`: no reward named 'exact_mach'. Did you mean 'exact_match'?", "contains_word", "`plugins`"],
    ),
    "unknown advantage": ({"algo": {"advantage": {"kind": "grop"}}}, ["`algo.advantage.kind`: no advantage named 'grop'.", "'grpo'?"]),
    "unknown loss": ({"algo": {"loss": {"kind": "ppo"}}}, ["`algo.loss.kind`: no loss named 'ppo'."]),
    "unknown environment": ({"env": {"kind": "singleturn"}}, ["`env.kind`: no env named 'singleturn'. Did you mean 'single_turn'?"]),
    "unknown trainer": ({"trainer": {"kind": "fsdp"}}, ["`trainer.kind`: no train backend named 'fsdp'. Did you mean 'fsdp2'?"]),
    "unknown engine": ({"engine": {"kind": "nativ"}}, ["`engine.kind`: no infer backend named 'nativ'. Did you mean 'native'?"]),
    "unknown option of an algorithm": (
        {"algo": {"advantage": {"kind": "grpo", "scale_by_sdt": True}}},
        ["`algo.advantage.scale_by_sdt`: unknown key. Did you mean 'scale_by_std'?"],
    ),
    "wrong option of a reward": (
        {"rewards": [{"kind": "exact_match", "strip": "perhaps"}]},
        ["`rewards.0.strip`: got 'perhaps' (str), expected a valid boolean"],
    ),
    "missing option of a reward": ({"rewards": ["contains_word"]}, ["`rewards.0.word`: is required and missing."]),
    "no reward": ({"rewards": []}, ["`rewards` is empty and `env.kind` is single_turn"]),
    "plugin module that is not there": (
        {"plugins": ["no_such_package.plugin"]},
        ["`plugins`: 'no_such_package.plugin' cannot be imported"],
    ),
    "plugin file that is not there": ({"plugins": ["./no_such.py"]}, ["`plugins`: plugin file './no_such.py' cannot be read"]),
    "plugin file that raises": (
        {"plugins": ["./raises.py"]},
        ["`plugins`: plugin file './raises.py' fails while it is imported: ZeroDivisionError: division by zero", "line 3"],
    ),
    "plugin file with a syntax error": ({"plugins": ["./syntax.py"]}, ["`plugins`: plugin file './syntax.py'", "SyntaxError", "line 2"]),
    "plugin module that raises": (
        {"plugins": ["raising_module"]},
        ["`plugins`: 'raising_module' cannot be imported: RuntimeError: not today"],
    ),
    "reward file without that function": (
        {"rewards": ["./mine.py:vowel"]},
        ["`rewards.0.kind`: './mine.py:vowel'", "no function or class 'vowel'. Did you mean 'vowels'?"],
    ),
    "reward module that is not there": ({"rewards": ["no_such_package:f"]}, ["`rewards.0.kind`: 'no_such_package' cannot be imported"]),
    "dataset that is not there": (
        {"data": {"train": {"path": "trian.jsonl"}}},
        ["'trian.jsonl' does not exist. Did you mean 'train.jsonl'?"],
    ),
    "dataset of an unknown format": (
        {"data": {"train": {"path": "rows.csv"}}},
        ["'rows.csv': files ending in '.csv' cannot be read", ".jsonl"],
    ),
    "dataset without the reward's column": (
        {"rewards": [{"kind": "exact_match", "field": "anser"}]},
        ["train.jsonl', line 1: there is no column 'anser'. Did you mean 'answer'? Columns: prompt, answer."],
    ),
    "held-out dataset without the reward's column": (
        {"data": {"heldout": {"path": "unanswered.jsonl"}}},
        ["'unanswered.jsonl', line 1: there is no column 'answer'", "Columns: prompt"],
    ),
    "dataset without the prompt's column": (
        {"data": {"train": {"prompt_field": "question"}}},
        ["line 1: there is no column 'question'", "Columns: prompt, answer", "`prompt_field`"],
    ),
    "demonstrations without completions": (
        {"warmup": {"data": {"path": "unanswered.jsonl"}}},
        ["'unanswered.jsonl', line 1: there is no column 'completion'", "`completion_field`"],
    ),
    "broken JSON": ({"data": {"train": {"path": "broken.jsonl"}}}, ["'broken.jsonl', line 2: not JSON"]),
    "empty dataset": ({"data": {"train": {"path": "empty.jsonl"}}}, ["'empty.jsonl' holds no rows."]),
    "model folder that is not there": ({"model": {"path": "./no/model", "scratch": None}}, ["'./no/model' does not exist.", "'no'"]),
    "model folder that is not one": (
        {"model": {"path": "./notes", "scratch": None}},
        ["'notes' is not a model folder: it has no config.json"],
    ),
    "model folder with pickled weights": (
        {"model": {"path": "./pickled", "scratch": None}},
        ["'pickled' holds its weights as 'pytorch_model.bin'"],
    ),
    "model that is both": ({"model": {"path": "./notes"}}, ["`model`: give either `path`", "and not both"]),
    "model from scratch that cannot be": (
        {"model": {"scratch": {"config": {"hiden_size": 32}}}},
        ["`model.scratch.config", "hiden_size", "hidden_size"],
    ),
    "unknown role": ({"devices": {"actor_trian": 0}}, ["`devices.actor_trian`:", "Did you mean 'actor_train'?"]),
    "device that the pool does not have": (
        {"devices": {"actor_train": "0-3"}, "ray": {"cpu_slots": 2}},
        ["`devices.actor_train`:", "0-3", "2 CPU slots"],
    ),
    "parallel engines that cannot be": (
        {"parallel": {"actor_infer": {"tp": 2}}},
        ["`parallel.actor_infer.tp` is 2, but", "`engine.kind` to vllm or sglang"],
    ),
    "parallel rewards": ({"parallel": {"reward": {"tp": 2}}}, ["`parallel.reward.tp` is 2, but a reward worker computes by itself."]),
    "context parallel engines": ({"parallel": {"actor_infer": {"cp": 2}}}, ["`parallel.actor_infer.cp` is 2, but engines span devices by"]),
    "tensors over ranks that do not divide the heads": (
        {"parallel": {"actor_train": {"tp": 4}}},
        ["`parallel.actor_train.tp` is 4, which does not divide the model's 2 key and value heads."],
    ),
    "tokens over ranks that do not divide the heads": (
        {"parallel": {"actor_train": {"tp": 2, "cp": 4}}},
        ["`parallel.actor_train.cp` is 4, but 2 (`parallel.actor_train.tp`) × 4 does not divide the model's 4 attention heads."],
    ),
    "tokens over ranks, and another attention": (
        {"model": {"scratch": {"architecture": "gemma2"}}, "parallel": {"actor_train": {"cp": 2}}},
        ["`parallel.actor_train.cp` is 2, but models of type 'gemma2' cannot be divided that way; those of type llama"],
    ),
    "experts over ranks, and no experts": (
        {"parallel": {"actor_train": {"ep": 2}}},
        ["`parallel.actor_train.ep` is 2, but a model of type 'llama' has no experts to divide."],
    ),
    "experts over ranks that do not divide them": (
        {
            "model": {"scratch": {"architecture": "qwen3_moe", "config": {"num_experts": 4, "moe_intermediate_size": 16}}},
            "parallel": {"actor_train": {"ep": 3}},
        },
        ["`parallel.actor_train.ep` is 3, which does not divide the model's 4 experts."],
    ),
    "devices that the parallel sizes do not divide": (
        {"parallel": {"actor_train": {"cp": 2}}, "devices": {"actor_train": "0-2"}, "ray": {"cpu_slots": 4}},
        ["`devices.actor_train` has 3 devices: `parallel.actor_train.tp` × `cp` = 2 does not divide them."],
    ),
    "no device matches": ({"devices": {"actor_infer": {"where": {"gpu": "L40S"}}}}, ["`devices.actor_infer`: no node has a label 'gpu'."]),
}


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the configs above name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    texts = {
        "raises.py": "value = 1\n\nvalue / 0\n",
        "syntax.py": "value = 1\nvalue = = 2\n",
        "raising_module.py": "raise RuntimeError('not today')\n",
        "mine.py": "def vowels(trajectory):\n    return 0.0\n",
        "rows.csv": "prompt,answer\n1,2\n",
        "unanswered.jsonl": '{"prompt": "1234="}\n',
        "broken.jsonl": '{"prompt": "1234=", "answer": "1234"}\n{"prompt": "43\n',
        "empty.jsonl": "\n",
        "notes/readme.md": "not a model\n",
        "pickled/config.json": json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
        "pickled/pytorch_model.bin": "",
        "pickled/tokenizer.json": "{}",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize(("changes", "said"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_with_a_mistake(tmp_path: Path, refused: Invoke, command: str, changes: dict[str, Any], said: list[str]) -> None:
    message = refused(command, config_file(tmp_path, **changes))
    for text in said:
        assert text in message


def test_several_mistakes_are_all_named(tmp_path: Path, refused: Invoke) -> None:
    message = refused("check", config_file(tmp_path, trainer={"lr": "fast"}, rollout={"group_size": 0}, sed=1))
    assert {line.partition(":")[0] for line in message.splitlines()} == {"`trainer.lr`", "`rollout.group_size`", "`sed`"}


@pytest.mark.parametrize("command", ["train", "check", "plan"])
class TestFilesAndOverrides:
    def test_no_config(self, refused: Invoke, command: str) -> None:
        assert "no config file given" in refused(command, "trainer.lr=1")

    def test_a_config_that_is_not_there(self, tmp_path: Path, refused: Invoke, command: str) -> None:
        config_file(tmp_path)
        assert refused(command, "confg.yaml") == "config file 'confg.yaml' does not exist. Did you mean 'config.yaml'?"

    def test_a_config_that_is_a_folder(self, tmp_path: Path, refused: Invoke, command: str) -> None:
        assert "config file '.' cannot be read" in refused(command, ".")

    def test_broken_yaml(self, tmp_path: Path, refused: Invoke, command: str) -> None:
        (tmp_path / "broken.yaml").write_text("pipeline: rl\nmodel: {path: x\ndata: 1\n")
        assert refused(command, "broken.yaml").startswith("broken.yaml, line 3, column ")

    def test_a_key_that_stands_twice(self, tmp_path: Path, refused: Invoke, command: str) -> None:
        (tmp_path / "twice.yaml").write_text("pipeline: rl\nseed: 1\nseed: 2\n")
        assert refused(command, "twice.yaml") == "twice.yaml, line 3, column 1: not valid YAML: key 'seed' appears twice."

    @pytest.mark.parametrize(
        ("override", "said"),
        [
            ("trainer.lr", "config file 'trainer.lr' does not exist."),
            ("trainer..lr=1", "override 'trainer..lr=1': expected key=value, for example trainer.lr=3e-4."),
            ("rewards.4.weight=1", "override 'rewards.4.weight=1': `rewards` is a list of 1; '4' is not one of its places."),
            ("trainer.lr={", "override 'trainer.lr={', line 1, column "),
            ("seed.root=1", "`seed`"),
            ("trainer.rl=1e-3", "`trainer.rl`: unknown key. Did you mean 'lr'?"),
        ],
    )
    def test_overrides(self, tmp_path: Path, refused: Invoke, command: str, override: str, said: str) -> None:
        assert refused(command, config_file(tmp_path), override).startswith(said)


def test_a_pool_that_is_not_one(tmp_path: Path, refused: Invoke) -> None:
    assert "4x8x80GiB" in refused("plan", config_file(tmp_path), "--pool", "four")


@pytest.mark.parametrize("inside", ["config.yaml", "notes.txt"])
def test_a_run_folder_that_is_taken(tmp_path: Path, refused: Invoke, inside: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / inside).write_text("precious")
    message = refused("train", config_file(tmp_path))
    held = "already holds a run" if inside == "config.yaml" else "contains notes.txt"
    assert message.startswith(f"run_dir: '{tmp_path / 'run'}' {held}, and nothing is overwritten.")
    assert "`run_dir=PATH`" in message


def test_an_environment_that_is_no_environment(tmp_path: Path, refused: Invoke) -> None:
    (tmp_path / "mine.py").write_text("def vowels(trajectory):\n    return 0.0\n")
    assert "`env.kind`" in refused("check", config_file(tmp_path, env={"kind": "./mine.py:vowels"}))


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_metrics_service_that_is_not_installed(tmp_path: Path, refused: Invoke) -> None:
    assert refused("check", config_file(tmp_path, record={"wandb": {}})).startswith("`record.wandb`: the package 'wandb' is not installed.")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": [{"question": "1="}]}, "there is no column 'prompt'"),
        ({"tasks": []}, "holds no rows"),
        ({"tasks": [{"prompt": {1, 2}}]}, "every row must be a mapping of JSON values"),
        ({"model": "./nowhere"}, "'./nowhere' does not exist"),
        ({"reward": 3.0}, "`reward`: expected"),
        ({"reward": [lambda t: 1.0, object()]}, "`reward`: expected a function"),
        ({"rolout": {}}, "`rolout`: unknown key. Did you mean 'rollout'?"),
    ],
)
def test_a_mistake_from_python_leaves_nothing_behind(tmp_path: Path, refused: Invoke, changes: dict[str, Any], said: str) -> None:
    """So that the same call, put right, may have the folder."""
    arguments: dict[str, Any] = {"model": {"scratch": {"characters": "01="}}, "tasks": [{"prompt": "1="}], "reward": lambda t: 1.0}
    with pytest.raises(UserError) as error:
        drumroll.train(**{**arguments, "run_dir": tmp_path / "run", **changes})
    assert said in str(error.value)
    assert contents(tmp_path) == {}


class TestRunsThatAreNotThere:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """What a run leaves behind, as far as these commands look."""
        run = tmp_path / "runs" / "one"
        (run / "model" / "final").mkdir(parents=True)
        (run / "config.yaml").write_text("name: one\n")
        (run / "model" / "final" / "config.json").write_text("{}")
        return run

    @pytest.mark.parametrize("arguments", [("show",), ("export",)])
    def test_no_such_folder(self, refused: Invoke, arguments: tuple[str, ...]) -> None:
        assert "'nowhere' holds no run: it does not exist." in refused(
            *arguments, "nowhere", *(["out"] if arguments == ("export",) else [])
        )

    def test_a_folder_of_runs(self, run: Path, refused: Invoke) -> None:
        assert "The newest run in it is 'one'." in refused("show", "runs")

    def test_a_run_without_trajectories(self, run: Path, refused: Invoke) -> None:
        assert str(run) in refused("show", str(run))

    def test_a_filter_that_is_none(self, run: Path, refused: Invoke) -> None:
        assert refused("show", str(run), "--reward", "good").startswith("--reward: ")

    def test_export_onto_something(self, tmp_path: Path, run: Path, refused: Invoke) -> None:
        (tmp_path / "out").mkdir()
        assert refused("export", str(run), "out") == "'out' exists already, and nothing is overwritten. Choose another folder."

    def test_export_of_a_step_without_a_checkpoint(self, run: Path, refused: Invoke) -> None:
        message = refused("export", str(run), "out", "--step", "7")
        assert "no checkpoint of step 7. Steps with one: none (`checkpoint.every`)" in message


class TestTheCommandLineItself:
    def test_unknown_command(self, refused: Invoke) -> None:
        assert "No such command 'trian'" in refused("trian")

    def test_unknown_option(self, tmp_path: Path, refused: Invoke) -> None:
        assert "No such option" in refused("train", config_file(tmp_path), "--fast")

    def test_a_family_that_is_none(self, refused: Invoke) -> None:
        assert "no family named 'rewards'. Did you mean 'reward'?" in refused("list", "rewards")

    def test_a_plugin_that_cannot_be_imported(self, refused: Invoke) -> None:
        assert "'no_such_package' cannot be imported" in refused("list", "--plugin", "no_such_package")


def test_a_mistake_ends_the_program_at_once_and_starts_no_process(tmp_path: Path) -> None:
    """In a process of its own: quick after the imports, and no child is ever made."""
    write_rows(tmp_path / "rows.jsonl", 3, 0)
    config = config_file(tmp_path, data={"train": {"path": "gone.jsonl"}})
    code = """
import subprocess, sys, os, time
import drumroll.cli, drumroll.pipelines.start
def forbidden(*args, **kwargs):
    raise AssertionError("a process is started")
subprocess.Popen.__init__ = os.fork = os.posix_spawn = forbidden
sys.argv = ["drumroll", "train", sys.argv[1]]
started = time.monotonic()
try:
    drumroll.cli.main()
finally:
    print(time.monotonic() - started)
"""
    ended = subprocess.run([sys.executable, "-c", code, config], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "'gone.jsonl' does not exist." in ended.stderr
    assert "Traceback" not in ended.stderr
    assert float(ended.stdout) < 5
    assert not (tmp_path / "run").exists()
