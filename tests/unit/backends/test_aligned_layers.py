"""Layers of an odd width compute the same at an even one."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from drumroll.backends.train.aligned_layers import use_aligned_layers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40}


def test_an_odd_width_gives_the_same_logits_and_gradients() -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, intermediate_size=43)).float()
    names = [name for name, _ in model.named_parameters()]
    tokens = torch.arange(20)[None]

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        logits = model(tokens).logits
        logits.square().mean().backward()
        return logits.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected, expected_grads = run()
    assert use_aligned_layers(model)
    assert [name for name, _ in model.named_parameters()] == names
    logits, grads = run()
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)
    for got, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)


def test_an_even_width_is_left_alone() -> None:
    assert not use_aligned_layers(Qwen2ForCausalLM(Qwen2Config(**SIZES, intermediate_size=48)))
