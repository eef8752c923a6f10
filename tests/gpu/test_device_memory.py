"""Weights that stay on the GPU while they go from one process to another."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from drumroll.backends.buckets import Inbox, Outbox
from drumroll.backends.checksum import checksum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def receive(offer: object, answers: object) -> None:
    inbox, sums = Inbox(), {}
    for bucket in inbox.shared(offer, 0, torch.device("cuda:0")):
        sums |= {name: checksum(tensor.clone()) for name, tensor in bucket}
    answers.put((inbox.expected, sums))


def test_tensors_arrive_as_they_were_sent() -> None:
    tensors = {f"t{n}": torch.randn(n + 1, 300, device="cuda").to(torch.bfloat16) for n in range(40)}
    outbox = Outbox(1, None, 100_000, 60.0, "cuda:0")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=receive, args=(outbox.lent(), answers))
    child.start()
    for name, tensor in tensors.items():
        outbox.add(name, tensor)
    outbox.finish()
    expected, received = answers.get(timeout=60)
    child.join()
    outbox.close()
    assert expected == received == {name: checksum(tensor) for name, tensor in tensors.items()}
