"""Parts of the training backend that its contract does not reach: attention layout, chunked scoring, gradients, schedule, rendezvous."""

from __future__ import annotations

import math
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.backends.attention import PackedLayout, packed_attention
from drumroll.backends.train import fsdp2
from drumroll.backends.train.group import RankGroup, _meet
from drumroll.backends.train.schedule import learning_rate
from drumroll.config.models import TrainerConfig
from drumroll.errors import ModelError
from drumroll.text.packing import pack_demonstrations
from drumroll.types import Batch, RankInfo, Schedule, TokenLoss


@given(st.lists(st.integers(1, 150), min_size=1, max_size=8), st.sampled_from([None, 1, 7, 40]), st.integers(0, 99))
def test_packed_attention_is_attention_of_each_sequence_alone(lengths: list[int], window: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, sum(lengths), 4, generator=generator) for heads in (4, 2, 2))
    layout = PackedLayout(lengths, torch.device("cpu"))
    output, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packed=layout, scaling=0.3, sliding_window=window)
    start = 0
    for length in lengths:
        own = [states[0, :, start : start + length].repeat_interleave(4 // states.shape[1], 0) for states in (query, key, value)]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        scores = (own[0] @ own[1].transpose(1, 2) * 0.3).masked_fill(hidden, -torch.inf)
        torch.testing.assert_close(output[0, start : start + length].transpose(0, 1), scores.softmax(-1) @ own[2], rtol=1e-4, atol=1e-5)
        start += length
    assert sum(bucket.rows * bucket.width for bucket in layout.padded.buckets) <= 2 * sum(lengths) + 32 * len(lengths)


def test_attention_refuses_what_it_would_get_wrong() -> None:
    states = torch.zeros(1, 1, 2, 4)
    layout = PackedLayout([2], torch.device("cpu"))
    for wrong in ({"softcap": 30.0, "packed": layout}, {"s_aux": states, "packed": layout}, {"packed": None}):
        with pytest.raises(ModelError, match="cannot attend to packed sequences"):
            packed_attention(torch.nn.Identity(), states, states, states, None, **wrong)
    with pytest.raises(ModelError, match="attention_mask"):
        packed_attention(torch.nn.Identity(), states, states, states, torch.zeros(2, 2), packed=layout)


def test_scoring_in_chunks_is_scoring_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 17, generator=generator).requires_grad_()
    targets = torch.randint(0, 17, (10,), generator=generator)
    settings = [torch.full((10,), 0.8), torch.full((10,), 0.7), torch.full((10,), 9)]
    results = []
    for size in (2**27, 17 * 3):
        monkeypatch.setattr(fsdp2, "_LOGITS_PER_CHUNK", size)
        logp, entropy = fsdp2._chosen(logits, targets, settings, truncates=True)
        assert entropy.isfinite().all(), "cut tokens have probability 0 and no say in the entropy"
        results.append((logp, entropy, *torch.autograd.grad(logp.square().sum(), logits)))
    for at_once, in_chunks in zip(*results, strict=True):
        assert torch.equal(at_once, in_chunks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_gradient_outlives_its_update(dtype: str, tmp_path: Path) -> None:
    """Neither a used one nor one that is not finite, whether the rank has masters (bfloat16) or not."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    size = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(**size)).save_pretrained(tmp_path)
    backend = fsdp2.Fsdp2(fsdp2.Fsdp2.Config(micro_batch_tokens=4), tmp_path, dtype, 0)
    backend.setup(RankInfo("actor_train", 0, 1, "cpu"))
    backend.begin(Schedule(1e-3, 2))
    batch = pack_demonstrations([([1, 2], [3, 4]), ([5], [6, 7, 8])])
    batch = batch.with_fields(weight=batch.loss_mask / batch.loss_mask.sum())
    for factor, skipped in ((1.0, 0.0), (torch.nan, 1.0)):

        def scaled(logp: torch.Tensor, batch: Batch, factor: float = factor) -> TokenLoss:
            return TokenLoss(logp * factor)

        assert backend.train([batch], scaled)[0]["skipped"] == skipped
        assert [parameter.grad for parameter in backend._parameters] == [None] * len(backend._parameters)
    backend.close()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * n / 3)) for n in range(4))]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    config = TrainerConfig.model_validate({"lr": 2.0, "schedule": schedule, "warmup_updates": 2, "min_lr_ratio": 0.1})
    resolved = config.resolve_schedule(6)
    assert [learning_rate(resolved, update) / 2.0 for update in range(6)] == pytest.approx(expected)
    assert learning_rate(resolved, 1000) / 2.0 == pytest.approx(expected[-1]), "it stays where it ended"


def test_one_rank_needs_no_network() -> None:
    group = RankGroup(RankInfo("actor_train", 0, 1, "cpu"), timeout_s=10)
    assert group.gather("here") == ["here"]
    assert not torch.distributed.is_initialized()
    group.leave()


def test_ranks_meet_on_the_given_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = _meet(RankInfo("actor_train", 0, 2, "cpu", rendezvous=f"127.0.0.1:{port}"), timedelta(seconds=10))
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    with socket.create_server(("127.0.0.2", port)):
        del store  # the port is free there, which it would not be if rank 0 listened on every interface
