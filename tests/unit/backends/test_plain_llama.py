"""A decoder without transformers computes and learns what transformers' own does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from drumroll.backends.attention import PACKED_ATTENTION, PackedLayout, register_packed_attention
from drumroll.backends.llama_folder import LlamaFolder
from drumroll.backends.train.plain_llama import PlainLlama

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "intermediate_size": 43,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, other turns": LlamaConfig(**{**SIZES, "intermediate_size": 48}, rope_theta=500.0, head_dim=12),
    "llama, a padding token": LlamaConfig(**{**SIZES, "pad_token_id": 3}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3, tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
}
LENGTHS = [5, 9, 1]
"""Every sequence begins with token 3."""


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases begin as ones and zeros, which would hide mistakes
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    return tmp_path


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    register_packed_attention()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED_ATTENTION, dtype=dtype)


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> PlainLlama:
    found = LlamaFolder.open(folder)
    assert found is not None
    return PlainLlama(found, dtype)


def learnt(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits where they are asked for, and every gradient of a loss that sees them all."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    tokens = (positions * 7 + 3) % SIZES["vocab_size"]
    asked = torch.tensor([0, 3, 4, 8, 13])
    layout = PackedLayout(LENGTHS, torch.device("cpu"))
    logits = model(input_ids=tokens, position_ids=positions, logits_to_keep=asked, use_cache=False, packed=layout).logits
    layout.check(SIZES["num_hidden_layers"], "any")
    (logits.log_softmax(-1) * torch.linspace(-1, 1, SIZES["vocab_size"])).sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_logits_and_gradients_are_theirs(folder: Path) -> None:
    expected, expected_gradients = learnt(theirs(folder))
    logits, gradients = learnt(ours(folder))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_in_bfloat16_it_is_as_close_to_float32_as_theirs_is(folder: Path) -> None:
    exact, exact_gradients = learnt(theirs(folder))
    errors = []
    for make in (theirs, ours):
        logits, gradients = learnt(make(folder, torch.bfloat16))
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
        distance = sum(float((gradient - exact_gradients[name]).norm() ** 2) for name, gradient in gradients.items()) ** 0.5
        errors.append((float((logits - exact).norm()), distance))
    (their_logits, their_gradients), (own_logits, own_gradients) = errors
    assert own_logits < 1.5 * their_logits
    assert own_gradients < 1.5 * their_gradients


def test_names_of_what_is_tied_are_theirs(folder: Path) -> None:
    model, expected = ours(folder), theirs(folder)
    assert set(model.state_dict()) == set(expected.state_dict())
    assert model.all_tied_weights_keys == expected.all_tied_weights_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_by_transformers(folder: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    model, out = ours(folder, dtype), tmp_path / "out"
    out.mkdir()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    tied = set(model.all_tied_weights_keys)
    model.save_pretrained(out, {name: tensor for name, tensor in model.state_dict().items() if name not in tied})
    model.write_config(out, str(dtype).removeprefix("torch."))
    read = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert read.dtype == dtype
    for name, tensor in read.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=0, rtol=0)
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(read).__name__]
