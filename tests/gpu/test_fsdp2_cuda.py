"""The training backend `fsdp2` on a CUDA device, against float32 on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drumroll.algo.loss import cross_entropy
from drumroll.backends.attention import PackedLayout, packed_attention
from drumroll.backends.train.base import TrainBackend
from drumroll.backends.train.fsdp2 import Fsdp2
from drumroll.text.packing import pack_demonstrations
from drumroll.types import Batch, RankInfo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(0, 300, (length,), generator=generator).tolist()

    batch = pack_demonstrations([(draw(1 + n % 5), draw(3 + 11 * (n % 7))) for n in range(24)])
    return batch.with_fields(weight=batch.loss_mask / batch.loss_mask.sum())


def make_backend(folder: Path, device: str, dtype: str, **options: Any) -> TrainBackend:
    config = Fsdp2.Config(lr=1e-3, **options)
    backend = Fsdp2(config, folder, dtype, 0)
    backend.setup(RankInfo("actor_train", 0, 1, device))
    backend.begin(config.resolve_schedule(10))
    return backend


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_attention_agrees_with_float32_on_the_cpu(dtype: torch.dtype, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 90, 1, 33, 64]
    states = [torch.randn(1, heads, sum(lengths), 32, generator=generator) for heads in (4, 2, 2)]
    module = torch.nn.Identity()

    def attend(device: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [value.to(device, dtype).requires_grad_() for value in copy.deepcopy(states)]
        layout = PackedLayout(lengths, torch.device(device))
        output, _ = packed_attention(module, *inputs, None, packed=layout, scaling=0.2, sliding_window=window)  # type: ignore[misc]
        gradients = torch.autograd.grad(output.float().square().sum(), inputs)
        return [value.float().cpu() for value in (output, *gradients)]

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for got, expected in zip(attend("cuda:0", dtype), attend("cpu", torch.float32), strict=True):
        assert (got - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_scores_and_updates_agree_with_the_cpu(folder: Path, tmp_path: Path, dtype: str, tolerance: float) -> None:
    from transformers import AutoModelForCausalLM

    batch = make_batch()
    reference = make_backend(folder, "cpu", "float32")
    logp = reference.logprobs(batch)
    expected = [metrics["loss"] for metrics in reference.train([batch] * 8, cross_entropy)]
    reference.close()  # before there are kernels of a GPU, which take the place of functions of transformers in the whole process
    backend = make_backend(folder, "cuda:0", dtype, micro_batch_tokens=300, gradient_checkpointing=True)
    torch.testing.assert_close(backend.logprobs(batch), logp, rtol=0, atol=tolerance)
    backend.save(backend.snapshot(), tmp_path / "start")
    backend.train([batch], cross_entropy)
    backend.load(tmp_path / "start")
    backend.to("host")
    backend.to("device")
    losses = [metrics["loss"] for metrics in backend.train([batch] * 8, cross_entropy)]
    assert losses == pytest.approx(expected, abs=tolerance)
    assert losses[-1] < losses[0] - 0.1
    assert all(tensor.dtype == getattr(torch, dtype) and tensor.is_cuda for _, tensor in backend.weights())
    backend.export(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == getattr(torch, dtype)
    backend.close()


def test_a_saved_state_trains_on_as_before(folder: Path, tmp_path: Path) -> None:
    backend, batch = make_backend(folder, "cuda:0", "bfloat16"), make_batch()
    backend.train([batch], cross_entropy)
    backend.save(backend.snapshot(), tmp_path / "here")
    first = backend.train([batch], cross_entropy)[0]
    backend.load(tmp_path / "here")
    again = backend.train([batch], cross_entropy)[0]
    assert again["lr"] == first["lr"]
    assert again["loss"] == pytest.approx(first["loss"], rel=1e-3)
    backend.close()


def test_a_trainer_that_waits_in_host_memory_leaves_the_gpu_and_comes_back(folder: Path) -> None:
    backend, batch = make_backend(folder, "cuda:0", "bfloat16"), make_batch()
    backend.train([batch], cross_entropy)
    expected, held = backend.logprobs(batch), torch.cuda.memory_allocated()
    for _ in range(2):
        backend.to("host")
        assert torch.cuda.memory_allocated() < held / 4
        assert all(not tensor.is_cuda for tensor in backend._tensors.values())
        backend.to("device")
        assert torch.equal(backend.logprobs(batch), expected)
    backend.close()
