"""Buckets through shared memory, in one process: content, order, sizes and every way to fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drumroll.backends import buckets
from drumroll.backends.buckets import NUM_BUCKETS, Inbox, Outbox, compare, digest
from drumroll.backends.checksum import checksum
from drumroll.errors import WeightSyncError

shapes = st.lists(st.integers(0, 9), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64])


def send(outbox: Outbox, tensors: list[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        buffer = tensor.clone()
        outbox.add(name, buffer)
        buffer.zero_()
    outbox.finish()


def receive(outbox: Outbox, index: int) -> tuple[list[tuple[str, Tensor]], dict[str, int]]:
    inbox = Inbox()
    buckets: Iterator[list[tuple[str, Tensor]]] = inbox.shared(outbox.lent(), index)
    received = [(name, tensor.clone()) for bucket in buckets for name, tensor in bucket]
    return received, inbox.expected


@given(st.lists(st.tuples(shapes, dtypes), max_size=8), st.integers(1, 4096), st.integers(1, 3))
def test_every_engine_gets_every_tensor(described: list[tuple[list[int], torch.dtype]], bucket_bytes: int, engines: int) -> None:
    torch.manual_seed(0)
    tensors = [(f"t{i}", (torch.rand(shape) * 200).to(dtype)) for i, (shape, dtype) in enumerate(described)]
    outbox = Outbox(engines, None, bucket_bytes, 10.0)
    with ThreadPoolExecutor(engines) as pool:
        receivers = [pool.submit(receive, outbox, index) for index in range(engines)]
        send(outbox, tensors)
        answers = [receiver.result() for receiver in receivers]
    outbox.close()
    assert outbox.num_bytes == sum(tensor.nbytes for _, tensor in tensors)
    for received, expected in answers:
        assert [name for name, _ in received] == [name for name, _ in tensors]
        for (_, got), (_, tensor) in zip(received, tensors, strict=True):
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)
        assert digest({name: checksum(tensor) for name, tensor in received}) == digest(expected) == digest(outbox.sums)


def test_memory_is_bounded_by_the_buckets() -> None:
    outbox = Outbox(1, None, 4096, 10.0)
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(receive, outbox, 0)
        send(outbox, [(f"t{i}", torch.ones(1000)) for i in range(50)])
        assert len(receiver.result()[0]) == 50
    rooms = [buffer.nbytes for buffer in outbox._buffers if buffer is not None]
    outbox.close()
    assert rooms == [4096] * NUM_BUCKETS


def test_buckets_begin_small_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", 4096)
    outbox = Outbox(1, None, 20_000, 10.0)
    claimed: list[int] = []
    claim = outbox._claim
    monkeypatch.setattr(outbox, "_claim", lambda num_bytes: (claimed.append(num_bytes), claim(num_bytes)))
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(receive, outbox, 0)
        send(outbox, [(f"t{i}", torch.full((1000,), float(i))) for i in range(20)])
        received, _ = receiver.result()
    outbox.close()
    assert claimed == [4096, 8192, 16384, *[20_000] * 4]
    assert all(torch.equal(tensor, torch.full((1000,), float(i))) for i, (_, tensor) in enumerate(received))


def test_a_reader_that_leaves_early_stops_nobody() -> None:
    outbox = Outbox(2, None, 16, 10.0)
    with ThreadPoolExecutor(2) as pool:
        receiver = pool.submit(receive, outbox, 0)
        sending = pool.submit(send, outbox, [(f"t{i}", torch.ones(8)) for i in range(9)])
        leaver = Inbox().shared(outbox.lent(), 1)
        next(leaver)
        leaver.close()
        sending.result()
        assert len(outbox.sums) == 9
        assert len(receiver.result()[0]) == 9
    outbox.close()


def test_a_reader_that_never_comes_can_be_released() -> None:
    outbox = Outbox(1, None, 16, 10.0)
    outbox.release(0)
    send(outbox, [(f"t{i}", torch.ones(8)) for i in range(9)])
    assert len(outbox.sums) == 9
    outbox.close()


def test_a_slow_reader_is_named_at_the_deadline() -> None:
    outbox = Outbox(2, None, 16, 0.05)
    outbox.release(0)
    with pytest.raises(WeightSyncError, match=r"readers \[1\] on this node did not read bucket 0 within 0.05 s"):
        send(outbox, [(f"t{i}", torch.ones(8)) for i in range(9)])
    outbox.close()


def test_readers_learn_that_the_sender_failed() -> None:
    outbox = Outbox(1, None, 16, 10.0)
    buckets = Inbox().shared(outbox.lent(), 0)
    outbox.add("a", torch.ones(8))
    outbox.add("b", torch.ones(8))
    assert [name for name, _ in next(buckets)] == ["a"]
    outbox.fail()
    with pytest.raises(WeightSyncError, match="the sender gave up"):
        next(buckets)
    with pytest.raises(WeightSyncError, match="given up"):
        outbox.finish()
    outbox.close()


def test_closed_or_foreign_memory_is_refused() -> None:
    outbox, other = Outbox(1, None, 16, 10.0), Outbox(1, None, 16, 10.0)
    lent = outbox.lent()
    outbox.close()
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        next(Inbox().shared(lent, 0))
    swapped = other.lent()
    with pytest.raises(WeightSyncError, match="other shared memory than it offered"):
        next(Inbox().shared(replace(swapped, key=lent.key), 0))
    other.close()


def test_comparison_names_the_tensor_and_the_engine() -> None:
    compare({"a": 1}, {"a": 1}, "engine 0")
    with pytest.raises(WeightSyncError, match="engine 0: tensor 'a' arrived damaged: checksum 2, sent 1"):
        compare({"a": 1}, {"a": 2}, "engine 0")
    with pytest.raises(WeightSyncError, match="tensor 'b' was sent and the engine did not take it"):
        compare({"a": 1, "b": 1}, {"a": 1}, "engine 0")
    with pytest.raises(WeightSyncError, match="reports a tensor 'c' that was not sent"):
        compare({"a": 1}, {"a": 1, "c": 1}, "engine 0")


def test_the_controller_needs_no_torch() -> None:
    code = "import sys, drumroll.cluster.cluster, drumroll.cluster.residency, drumroll.cluster.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
