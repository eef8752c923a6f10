"""The head's GPU kernels, on a GPU or in Triton's interpreter, against the functions of torch that they stand for."""

from __future__ import annotations

import os

import pytest
import torch

from drumroll.backends.train import head

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":  # which Triton reads when it is first imported
    pytest.skip("needs a CUDA device, or Triton's interpreter: make test-kernels", allow_module_level=True)

from drumroll.backends.train import head_kernels  # noqa: E402


def chunk(vocab_size: int, num_rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    logits[1, : vocab_size - 2] = -torch.inf  # whole blocks of impossible tokens
    targets = torch.randint(vocab_size, (num_rows,), generator=generator)
    targets[1] = vocab_size - 1
    targets[4] = -1  # on another rank, where the vocabulary is divided
    return logits.to(DEVICE), targets.to(DEVICE), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7]).to(DEVICE)


@pytest.mark.parametrize("vocab_size", [7, 4096, 9001])
def test_they_say_what_torch_says(vocab_size: int) -> None:
    logits, targets, temperature = chunk(vocab_size)
    expected = head.look(logits.clone(), targets, temperature)
    said = head_kernels.look(logits.clone(), targets, temperature)
    for got, wanted in zip(said, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    _, entropy, lse = expected
    of_logp, of_entropy = torch.randn(2, 5).to(DEVICE)
    for rise in (None, of_entropy):
        rows = head.Rows(targets, temperature, lse, entropy, of_logp, rise)
        for dtype in (torch.float32, torch.bfloat16):
            wanted = head.slope(logits.clone(), rows, dtype)
            got = head_kernels.slope(logits.clone(), rows, dtype)
            assert got.dtype == dtype
            torch.testing.assert_close(got, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
