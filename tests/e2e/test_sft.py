"""The sft pipeline through a real local Ray."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_tree, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from drumroll.config.load import check_config
from drumroll.pipelines.start import start
from drumroll.record.files import read_lines
from drumroll.record.folder import RunFolder
from drumroll.record.report import read_summary

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two trainers share each update."""
    folder = tmp_path_factory.mktemp("sft")
    tree = tiny_tree(folder)
    return start(
        check_config(
            {
                "pipeline": "sft",
                "name": "imitate",
                "seed": 11,
                "run_dir": str(folder / "run"),
                "model": tree["model"],
                "sft": {key: value for key, value in tree["warmup"].items() if key != "compare"} | {"steps": 45},
                "heldout": {"path": write_rows(folder / "unseen.jsonl", 20, 4, demonstrations=True)},
                "devices": {"actor_train": "0-1"},
                "ray": {"cpu_slots": 2},
            }
        )
    )


def test_the_heldout_loss_falls(run: RunFolder) -> None:
    summary = read_summary(run)
    before, after = summary["before"]["heldout_loss"], summary["after"]["heldout_loss"]
    assert before > 2.2  # about the logarithm of the 14 tokens
    assert after < 0.9 * before
    assert [(line["stage"], line["heldout_loss"]) for line in read_lines(run.eval_file)] == [("before", before), ("after", after)]
    assert summary["seconds"]["total"] > summary["seconds"]["update"] > 0
    assert summary["tokens"]["imitated"] > 0


def test_every_update_is_in_the_metrics(run: RunFolder) -> None:
    lines = read_lines(run.metrics_file)
    assert [line["step"] for line in lines] == list(range(45))
    assert all(line["sft/grad_norm"] > 0 for line in lines)
    losses = [line["sft/loss"] for line in lines]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_what_a_run_leaves_behind(run: RunFolder) -> None:
    assert check_config(run.config()).name == "imitate"
    assert run.curve_file.stat().st_size > 5_000
    assert list(run.tensorboard.glob("events*"))


def test_the_final_model_is_the_one_whose_loss_is_reported(run: RunFolder) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.final_model)
    tokenizer = AutoTokenizer.from_pretrained(run.final_model)
    total, count = 0.0, 0
    for row in read_lines(run.root.parent / "unseen.jsonl"):
        prompt = tokenizer(row["prompt"]).input_ids
        reply = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([prompt + reply])).logits[0].log_softmax(-1)
        total -= float(sum(logp[len(prompt) - 1 + place, token] for place, token in enumerate(reply)))
        count += len(reply)
    assert total / count == pytest.approx(read_summary(run)["after"]["heldout_loss"], abs=1e-4)


def test_the_initial_model_is_kept(run: RunFolder) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (run.initial_model, run.final_model))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
