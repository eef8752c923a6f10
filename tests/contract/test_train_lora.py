"""Low-rank adapters: the base stays, everybody outside sees the sum, and checkpoints hold the adapters alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train_backends import make_backend, make_batch, make_models, weights_of

from drumroll.algo.loss import ppo_clip
from drumroll.errors import ConfigError

LORA = {"rank": 2, "alpha": 4.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_what_is_learnt_is_in_the_weights_that_others_get(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    batch = make_batch()
    backend = make_backend("fsdp2", models[name], lora=LORA, lr=0.05)
    before, logp_before = weights_of(backend), backend.logprobs(batch)
    plain = make_backend("fsdp2", models[name])
    assert set(before) == set(weights_of(plain))
    torch.testing.assert_close(logp_before, plain.logprobs(batch), msg="an adapter begins as nothing")
    plain.close()
    backend.train([batch] * 3, ppo_clip)
    after, logp = weights_of(backend), backend.logprobs(batch)
    changed = {weight for weight in after if not torch.equal(after[weight], before[weight])}
    assert changed
    assert not any("embed" in weight or "wte" in weight or "norm" in weight or "ln_" in weight for weight in changed)
    backend.export(tmp_path / "model")
    backend.close()
    merged = make_backend("fsdp2", tmp_path / "model")
    torch.testing.assert_close(merged.logprobs(batch), logp, atol=1e-4, rtol=1e-4)
    merged.close()
    original = AutoModelForCausalLM.from_pretrained(models[name])
    adapted = PeftModel.from_pretrained(original, tmp_path / "model" / "adapter")
    ids = torch.tensor([[3, 5, 2, 7]])
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.inference_mode():
        torch.testing.assert_close(adapted.eval()(ids).logits, whole(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_holds_the_adapters_and_their_moments_alone(models: dict[str, Path], tmp_path: Path) -> None:
    batch = make_batch()
    backend = make_backend("fsdp2", models["llama"], lora=LORA, lr=0.05)
    backend.train([batch], ppo_clip)
    state = backend.snapshot()
    assert {extent.parameter.split(".")[-3] for extent, _ in state.pieces} == {"lora_A", "lora_B"}
    (tmp_path / "state").mkdir()
    backend.save(state, tmp_path / "state")
    expected = backend.train([batch], ppo_clip)
    weights = weights_of(backend)
    backend.load(tmp_path / "state")
    assert backend.train([batch], ppo_clip) == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_of(backend).items())
    backend.close()


def test_a_scalar_head_learns_whole(models: dict[str, Path]) -> None:
    backend = make_backend("fsdp2", models["llama_scalar"], lora=LORA, head="scalar")
    assert "score.weight" in {extent.parameter for extent, _ in backend.snapshot().pieces}
    backend.close()


def test_in_half_precision_the_base_is_held_once_and_adapters_are_exact(models: dict[str, Path]) -> None:
    backend = make_backend("fsdp2", models["llama"], dtype="bfloat16", lora=LORA, lr=0.05)
    backend.train([make_batch()], ppo_clip)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in backend._model.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    assert {tensor.dtype for tensor in weights_of(backend).values()} == {torch.bfloat16}
    backend.close()


def test_targets_that_are_not_there_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"`trainer\.lora\.targets`.*nonsense"):
        make_backend("fsdp2", models["llama"], lora={"targets": ["nonsense"]})
