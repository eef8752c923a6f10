"""Whatever layout the ranks of a trainer have, they are one rank: the same log-probabilities, losses, gradients and weights; and a state
that was saved under one layout is loaded under another.

Run as a script, this file is four ranks: it imports once, then forks. Each runs every layout of `CASES` in turn; those of two ranks on the
first two.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_backends import LR, VOCABULARY, free_ports, make_backend, make_batch, of_each_update, outputs
from torch import Tensor

from drumroll.algo.critic import value_loss
from drumroll.algo.loss import ppo_clip
from drumroll.backends.train import head as head_module
from drumroll.backends.train.base import Head, TrainBackend
from drumroll.config.models import ParallelConfig
from drumroll.errors import CheckpointError
from drumroll.registry import REGISTRY
from drumroll.text.packing import select, split_balanced
from drumroll.types import Batch, RankInfo

KINDS = [kind for kind in REGISTRY.names("train_backend") if REGISTRY.lookup("train_backend", kind).target.axes]  # type: ignore[attr-defined]

SMALL: dict[str, Any] = {"micro_batch_tokens": 40}

# Name → model, ranks, layout, options. The states of a model are handed on from each of these layouts to the next one.
CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "llama cp2": ("llama", 2, {"cp": 2}, {}),
    "llama shard2 of 4": ("llama", 4, {"shard": 2}, SMALL),
    "llama tp2 dp2": ("llama", 4, {"tp": 2}, {**SMALL, "reduce_every_pass": False, "reshard_after_forward": False}),
    "llama cp2 dp2": ("llama", 4, {"cp": 2}, {**SMALL, "gradient_checkpointing": True}),
    "llama tp2 cp2": ("llama", 4, {"tp": 2, "cp": 2}, {}),
    "llama cp4": ("llama", 4, {"cp": 4}, SMALL),
    "llama tp2 shard1 of 2": ("llama", 4, {"tp": 2, "shard": 1}, SMALL),
    "llama_scalar tp2 cp2": ("llama_scalar", 4, {"tp": 2, "cp": 2}, SMALL),
    "qwen2 tp2": ("qwen2", 2, {"tp": 2}, SMALL),
    "qwen2 tp2 cp2": ("qwen2", 4, {"tp": 2, "cp": 2}, {**SMALL, "gradient_checkpointing": True}),
    "qwen2 shard1 of 2 cp2": ("qwen2", 4, {"cp": 2, "shard": 1}, {}),
    "qwen3 shard1 of 2": ("qwen3", 2, {"shard": 1}, SMALL),
    "qwen3 tp2": ("qwen3", 2, {"tp": 2}, SMALL),
    "qwen3 tp2 dp2": ("qwen3", 4, {"tp": 2}, {}),
    "qwen3 tp2 cp2": ("qwen3", 4, {"tp": 2, "cp": 2}, SMALL),
    "gpt2 cp2": ("gpt2", 2, {"cp": 2}, {}),
    "moe dp2": ("qwen3_moe", 2, {}, SMALL),
    "moe tp2": ("qwen3_moe", 2, {"tp": 2}, SMALL),
    "moe ep2": ("qwen3_moe", 2, {"ep": 2}, SMALL),
    "moe ep2 dp4": ("qwen3_moe", 4, {"ep": 2}, {**SMALL, "gradient_checkpointing": True}),
    "moe ep4": ("qwen3_moe", 4, {"ep": 4}, {**SMALL, "reduce_every_pass": False}),
    "moe ep2 shard2 of 4": ("qwen3_moe", 4, {"ep": 2, "shard": 2}, {}),
    "moe ep2 tp2 dp2": ("qwen3_moe", 4, {"ep": 2, "tp": 2}, {}),
    "moe ep2 cp2 dp2": ("qwen3_moe", 4, {"ep": 2, "cp": 2}, SMALL),
    "moe ep4 tp2 cp2": ("qwen3_moe", 4, {"ep": 4, "tp": 2, "cp": 2}, SMALL),
    "moe tp2 cp2": ("qwen3_moe", 4, {"tp": 2, "cp": 2}, {**SMALL, "gradient_checkpointing": True}),
    "lora tp2 cp2": ("qwen2", 4, {"tp": 2, "cp": 2}, {"lora": {"rank": 2}}),
    "lora ep2 tp2 dp2": ("qwen3_moe", 4, {"ep": 2, "tp": 2}, {"lora": {"rank": 2}}),
    "bfloat16 tp2 cp2": ("qwen3", 4, {"tp": 2, "cp": 2}, {"dtype": "bfloat16"}),
    "bfloat16 ep2 shard2 of 4": ("qwen3_moe", 4, {"ep": 2, "shard": 2}, {"dtype": "bfloat16"}),
}


def every_layout(model: str, world: int, num_experts: int = 1) -> Iterator[tuple[str, tuple[str, int, dict[str, int], dict[str, Any]]]]:
    """Whatever `ParallelConfig` allows so many ranks of a model with four heads of each kind."""
    sizes = range(1, world + 1)
    for tp, cp, ep, shard in itertools.product(sizes, sizes, sizes, sizes):
        layout = {"tp": tp, "cp": cp, "ep": ep, "shard": shard}
        if ParallelConfig(**layout).problem_with(world) is None and 4 % (tp * cp) == 0 == num_experts % ep:
            yield f"{model} x{world} " + " ".join(f"{name}{size}" for name, size in layout.items()), (model, world, layout, {})


FULL = tuple(CASES)
CASES |= {name: case for world in (2, 3, 4) for name, case in every_layout("qwen3", world)}
CASES |= {name: case for world in (2, 4) for name, case in every_layout("qwen3_moe", world, num_experts=4) if case[2]["ep"] > 1}

EXPORTED = ("moe ep4 tp2 cp2", "lora tp2 cp2")
STRAIGHT = {"llama tp2 cp2", "qwen2 tp2", "qwen3 tp2 dp2", "moe ep4 tp2 cp2", "llama cp4"}
"""Layouts in which log-probabilities come straight from hidden states, however few there are."""


def more_models(root: Path) -> None:
    """Qwen3, with norms of queries and keys, and as a mixture of experts; and biases that do not begin at 0."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    body: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    for name, config in {
        "qwen3": Qwen3Config(**body, intermediate_size=48, tie_word_embeddings=True, attention_bias=True),
        "qwen3_moe": Qwen3MoeConfig(**body, **experts, intermediate_size=48, decoder_sparse_step=1),
    }.items():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
        model.save_pretrained(root / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (root / name / file).write_bytes((root / "llama" / file).read_bytes())


def head_of(model: str) -> Head:
    return "scalar" if model.endswith("_scalar") else "lm"


def loss_of(model: str) -> Any:
    return value_loss if head_of(model) == "scalar" else ppo_clip


def updates() -> list[Batch]:
    return [make_batch(seed) for seed in range(3)]


def build(kind: str, case: str, root: Path, rank: RankInfo) -> TrainBackend:
    model, _, layout, options = copy.deepcopy(CASES[case])
    return make_backend(kind, root / model, rank, head=head_of(model), parallel=ParallelConfig(**layout), **options)


def shard_of(batch: Batch, rank: int, world: int, layout: dict[str, int]) -> Batch:
    """What a rank is given: ranks that share trajectories get the same."""
    each = layout.get("tp", 1) * layout.get("cp", 1)
    return select(batch, split_balanced(batch.lengths, world // each)[rank // each])


def meeting_place(root: Path, case: str, rank: int) -> str:
    """Where the ranks of a case meet: the first one says, when its turn has come, because ports are soon taken by others."""
    path = Path(f"{path_of(root, case)}.port")
    if rank == 0:
        path.with_suffix(".partial").write_text(str(free_ports(1)[0]))
        path.with_suffix(".partial").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return f"127.0.0.1:{path.read_text()}"


def path_of(root: Path, case: str) -> Path:
    return root / case.replace(" ", "_")


def case_before(case: str) -> str | None:
    """The layout whose state this one goes on from: the one before of the same kind."""
    model, _, _, options = CASES[case]
    kind = (model, options.get("dtype"), "lora" in options)
    alike = [name for name in FULL if (CASES[name][0], CASES[name][3].get("dtype"), "lora" in CASES[name][3]) == kind]
    return alike[alike.index(case) - 1] if case in alike[1:] else None


def as_rank(rank: int, kind: str, root: Path) -> None:
    """Score and train under every layout; under those of `FULL` also save, export, and go on from what the layout before it saved."""
    torch.set_num_threads(1)
    usual = head_module.WORTH_IT
    for case, (model, world, layout, _) in CASES.items():
        if rank >= world:
            continue
        head_module.WORTH_IT = 0 if case in STRAIGHT else usual
        backend = build(kind, case, root, RankInfo("actor_train", rank, world, "cpu", rendezvous=meeting_place(root, case, rank)))
        shards = [shard_of(batch, rank, world, layout) for batch in updates()]
        tensors = {"scores": outputs(backend, shards[0])}
        seen: dict[str, Any] = {"metrics": backend.train(shards[:2], loss_of(model))}
        tensors |= {f"weights/{name}": tensor.clone() for name, tensor in backend.weights()}
        if case in FULL:
            if backend.head == "lm":
                said = backend.top_logprobs(shards[2], 3)
                tensors |= {"said/logp": said.logp, "said/top_logp": said.top_logp}
            backend.save(backend.snapshot(), path_of(root / "saved", case))
            if case in EXPORTED:
                backend.export(path_of(root / "exported", case))
            seen["third"] = backend.train(shards[2:], loss_of(model))[0]
            if (before := case_before(case)) is not None:
                backend.load(path_of(root / "saved", before))
                tensors |= {f"loaded/{name}": tensor.clone() for name, tensor in backend.weights()}
                seen["third_loaded"] = backend.train(shards[2:], loss_of(model))[0]
        backend.close()
        stem = path_of(root, case)
        save_file(tensors, f"{stem}.{rank}.safetensors")
        Path(f"{stem}.{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module", params=KINDS)
def root(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    """The models' folder, with what four ranks left there."""
    folder = models["llama"].parent
    more_models(folder)
    with (folder / "ranks.log").open("w") as log:
        ended = subprocess.run([sys.executable, __file__, request.param, str(folder)], stderr=log, timeout=300, check=False)
    assert ended.returncode == 0, (folder / "ranks.log").read_text()[-6000:]
    return folder


@cache
def alone(kind: str, root: Path, model: str, options: str) -> dict[str, Any]:
    """What a single rank says and becomes."""
    backend = make_backend(kind, root / model, head=head_of(model), **json.loads(options))
    batches = updates()
    found: dict[str, Any] = {"scores": outputs(backend, batches[0])}
    found["metrics"] = backend.train(batches[:2], loss_of(model))
    found["weights"] = {name: tensor.clone() for name, tensor in backend.weights()}
    found["said"] = backend.top_logprobs(batches[2], 3) if backend.head == "lm" else None
    found["third"] = backend.train(batches[2:], loss_of(model))[0]
    backend.close()
    return found


def results(root: Path, case: str) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Any]]]:
    for rank in range(CASES[case][1]):
        stem = f"{path_of(root, case)}.{rank}"
        yield rank, load_file(f"{stem}.safetensors"), json.loads(Path(f"{stem}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_one_rank(case: str, root: Path) -> None:
    model, world, layout, options = CASES[case]
    narrow = "dtype" in options
    kept = {name: value for name, value in options.items() if name in ("lora", "dtype")}
    expected = alone(KINDS[0], root, model, json.dumps(kept))
    far, near, moved, ulp = (0.3, 0.1, LR * 2.5, 2**-7) if narrow else (1e-4, 1e-3, LR * 0.03, 0.0)
    whole: dict[str, Tensor] = {}

    def own(rank: int, batch: Batch, values: Tensor) -> Tensor:
        """What of a single rank's answer is about a rank's shard."""
        shard = shard_of(batch.with_fields(values=values), rank, world, layout).values
        assert shard is not None
        return shard

    for rank, tensors, seen in results(root, case):
        first, _, last = updates()
        torch.testing.assert_close(tensors["scores"], own(rank, first, expected["scores"]), rtol=0, atol=far)
        if "said/logp" in tensors and not narrow:
            torch.testing.assert_close(tensors["said/logp"], own(rank, last, expected["said"].logp), rtol=0, atol=LR)
            torch.testing.assert_close(tensors["said/top_logp"], own(rank, last, expected["said"].top_logp), rtol=0, atol=LR)
        of_one = [*expected["metrics"], *([expected["third"]] if "third" in seen else [])]
        for got, metrics in zip([*seen["metrics"], *([seen["third"]] if "third" in seen else [])], of_one, strict=True):
            assert of_each_update(got) == pytest.approx(of_each_update(metrics), rel=near, abs=near if narrow else 1e-5)
        found = {name.removeprefix("weights/"): tensor for name, tensor in tensors.items() if name.startswith("weights/")}
        assert found.keys() == expected["weights"].keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected["weights"][name], rtol=ulp, atol=moved, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(tensor, whole.setdefault(name, tensor)), f"ranks differ in {name}"


@pytest.mark.parametrize("case", [case for case in FULL if case_before(case) is not None])
def test_a_state_is_loaded_under_another_layout(case: str, root: Path) -> None:
    """Weights come back as they were, and the update that follows is the one that would have followed."""
    before = case_before(case)
    assert before is not None
    _, tensors, seen = next(results(root, case))
    _, saved, _ = next(results(root, before))
    for name, tensor in saved.items():
        if name.startswith("weights/"):
            assert torch.equal(tensor, tensors[name.replace("weights/", "loaded/", 1)]), name
    near, least = (0.1, 0.1) if "dtype" in CASES[case][3] else (1e-3, 1e-5)
    assert of_each_update(seen["third_loaded"]) == pytest.approx(of_each_update(seen["third"]), rel=near, abs=least)


def test_a_single_rank_goes_on_from_any_layout(root: Path) -> None:
    for case in ("llama tp2 shard1 of 2", "moe ep4 tp2 cp2", "qwen2 tp2 cp2"):
        model = CASES[case][0]
        backend = make_backend(KINDS[0], root / model)
        backend.load(path_of(root / "saved", case))
        _, tensors, seen = next(results(root, case))
        for name, tensor in backend.weights():
            assert torch.equal(tensor, tensors[f"weights/{name}"]), name
        third = backend.train(updates()[2:], ppo_clip)[0]
        assert of_each_update(third) == pytest.approx(of_each_update(seen["third"]), rel=1e-3, abs=1e-5)
        backend.close()


def test_what_a_layout_exports_are_the_model_s_own_files(root: Path, tmp_path: Path) -> None:
    """Experts have a matrix each in files, also where a checkpoint is joined into a folder."""
    from drumroll.backends.train.shards import export_folder

    case = "moe_ep4_tp2_cp2"
    names = load_file(root / "qwen3_moe" / "model.safetensors").keys()
    assert any("experts.3.up_proj.weight" in name for name in names)
    export_folder(root / "saved" / case, root / "qwen3_moe", tmp_path / "joined")
    exported = load_file(root / "exported" / case / "model.safetensors")
    joined = load_file(tmp_path / "joined" / "model.safetensors")
    weights = load_file(root / f"{case}.0.safetensors")
    assert exported.keys() == joined.keys() == names
    for name, tensor in exported.items():
        assert torch.equal(tensor, joined[name]), name
        assert torch.equal(tensor, weights[f"weights/{name}"]), name


def test_every_engine_takes_what_a_layout_gives(root: Path) -> None:
    """Names and shapes are those that `native` and `vllm` expect, and in the former every value arrives where it belongs."""
    from transformers import AutoModelForCausalLM

    from drumroll.backends.infer.checklist import Checklist
    from drumroll.backends.infer.native import Native
    from drumroll.backends.infer.native.runner import open_runner
    from drumroll.backends.infer.remote import _describe
    from drumroll.backends.infer.vllm import Vllm

    case = "moe_ep4_tp2_cp2"
    saved = load_file(root / f"{case}.0.safetensors")
    weights = [(name.removeprefix("weights/"), tensor) for name, tensor in saved.items() if name.startswith("weights/")]
    config = Native.Config(kind="native", num_slots=2, context_tokens=64)
    runner = open_runner(config, root / "qwen3_moe", "float32", "cpu", trust_remote_code=False)
    runner.take_weights(iter([weights]))
    exported = AutoModelForCausalLM.from_pretrained(root / "exported" / case, dtype=torch.float32)
    expected = dict(exported.state_dict())
    for name, tensor in runner.model._model.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(tensor, expected[name]), name
    _, targets = _describe(root / "qwen3_moe", Vllm.Config.model_construct(kind="vllm", context_tokens=64), trust_remote_code=False)
    checklist = Checklist(targets)
    for name, tensor in weights:
        checklist.tick(name, tensor)
    checklist.complete()


def test_masters_are_float32_where_passes_are_not(root: Path) -> None:
    for path in sorted((root / "saved" / "bfloat16_tp2_cp2").glob("*.safetensors")):
        assert {tensor.dtype for name, tensor in load_file(path).items() if not name.startswith("rng/")} == {torch.float32}


def test_a_state_that_lacks_a_part_is_refused(root: Path, tmp_path: Path) -> None:
    saved, damaged = root / "saved" / "llama_tp2_cp2", tmp_path / "damaged"
    damaged.mkdir()
    for file in saved.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    index = json.loads((damaged / "rank-00001-of-00004.json").read_text())
    key = "weight/model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(damaged / "rank-00001-of-00004.safetensors")
    del index["tensors"][key], tensors[key]
    (damaged / "rank-00001-of-00004.json").write_text(json.dumps(index))
    save_file(tensors, damaged / "rank-00001-of-00004.safetensors")
    backend = make_backend(KINDS[0], root / "llama")
    with pytest.raises(CheckpointError, match=r"some values of '.*o_proj.weight' are in no rank's file, or in two"):
        backend.load(damaged)
    backend.close()


def main(kind: str, root: Path) -> int:
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    del transformers
    ranks = []
    for rank in range(4):
        if child := os.fork():
            ranks.append(child)
            continue
        try:
            as_rank(rank, kind, root)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status:  # the others would wait for it
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
