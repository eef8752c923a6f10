"""Memory that was not enough, and devices that are gone, as errors that say what to do; allocators are made to fail, on the CPU."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
import torch

from drumroll.backends.exhaustion import advice, stage_of, summarise
from drumroll.backends.infer.native.runner import Runner
from drumroll.cluster.cluster import collect
from drumroll.cluster.host import seat, wrap_error
from drumroll.errors import DeviceLost, DeviceMemoryError, WorkerError, WorkerLost

WHERE = seat("actor_train", 3, "0123456789abcdef")
TORCHS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 3.20 GiB is free.\nProcess 7 has 1."
)


def raised(error: Exception) -> Exception:
    try:
        activations = torch.zeros(3, 5, 7)  # noqa: F841 - what the frame that failed was holding
        raise error
    except Exception as caught:
        return caught


def test_the_message_names_role_rank_stage_tensors_and_settings_and_survives_pickling() -> None:
    wrapped = wrap_error(raised(torch.OutOfMemoryError(TORCHS)), WHERE, "train", "actor_train", 3)
    error = pickle.loads(pickle.dumps(wrapped))
    assert type(error) is DeviceMemoryError
    assert (error.role, error.rank, error.stage) == ("actor_train", 3, "update")
    message, _, trace = str(error).partition("Remote traceback:")
    assert message.startswith("actor_train rank 3 on node 01234567: out of device memory at the stage 'update'. CUDA out of memory")
    assert "Process 7" not in message
    assert "Largest tensors: " in message
    for key in ("trainer.micro_batch_tokens", "trainer.gradient_checkpointing", "engine.offload", "drumroll plan"):
        assert key in message
    assert "raise error" in trace


@pytest.mark.parametrize(
    ("role", "method", "stage", "key"),
    [
        ("reference", "logprobs", "score", "trainer.micro_batch_tokens"),
        ("critic", "values", "score", "trainer.offload"),
        ("critic", "train", "update", "trainer.gradient_checkpointing"),
        ("actor_infer", "poll", "rollout", "engine.cache_tokens"),
        ("actor_infer", "receive_weights", "sync", "engine.offload"),
        ("actor_train", "send_weights", "sync", "engine.offload"),
        ("actor_train", "drumroll.workers.trainer:TrainWorker", "start", "devices"),
        ("actor_infer", "drumroll.workers.engine:EngineWorker", "start", "parallel.actor_infer.tp"),
    ],
)
def test_every_role_and_stage_has_a_setting_to_change(role: str, method: str, stage: str, key: str) -> None:
    assert stage_of(method) == stage
    error = wrap_error(raised(torch.OutOfMemoryError(TORCHS)), WHERE, method, role, 0)
    assert isinstance(error, DeviceMemoryError)
    assert f"`{key}" in str(error)
    assert f"`{key}" in advice(role, stage)


def test_a_cause_further_back_counts() -> None:
    stopped = WorkerError("the native engine stopped: OutOfMemoryError")
    stopped.__cause__ = torch.OutOfMemoryError(TORCHS)
    assert isinstance(wrap_error(stopped, WHERE, "poll", "actor_infer", 0), DeviceMemoryError)
    vllms = WorkerError("vLLM did not start: ValueError: No available memory for the cache blocks.")
    assert isinstance(wrap_error(vllms, WHERE, "a:B", "actor_infer", 0), DeviceMemoryError)
    other = WorkerError("environment rank 1: the door is locked")
    assert wrap_error(other, WHERE, "poll", "actor_infer", 0) is other


def test_a_device_that_falls_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5c1f")
    gone = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported")
    error = pickle.loads(pickle.dumps(wrap_error(raised(gone), WHERE, "train", "actor_train", 3)))
    assert type(error) is DeviceLost
    assert isinstance(error, WorkerLost)
    for words in ("actor_train rank 3", "GPU GPU-5c1f", "update", "uncorrectable ECC error", "nvidia-smi"):
        assert words in str(error)


def test_the_rank_that_ran_out_is_the_one_to_show() -> None:
    from concurrent.futures import Future

    futures: list[Future[None]] = [Future(), Future(), Future()]
    reasons = (WorkerError("rank 0: collective timed out"), WorkerLost("rank 1: gone"), DeviceMemoryError("rank 2: out of device memory"))
    for future, error in zip(futures, reasons, strict=True):
        future.set_exception(error)
    with pytest.raises(DeviceMemoryError, match="rank 2"):
        collect(futures, ["rank 0", "rank 1", "rank 2"], "train", 1.0)


def test_largest_tensors_by_kind_and_storages_once() -> None:
    big, small = torch.zeros(2**25), [torch.zeros(2**10, dtype=torch.bfloat16) for _ in range(3)]
    assert summarise([*small, big, big[:5]]) == "0.1 GiB in 1 of float32 [33554432], 0.0 MiB in 3 of bfloat16 [1024]"


def test_an_engine_that_runs_out_while_it_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator fails in the engine's own thread; whoever polls hears of memory."""
    from drumroll.config.models import ScratchConfig
    from drumroll.models.scratch import make_scratch
    from drumroll.types import GenRequest, RankInfo, Sampling
    from drumroll.workers.engine import EngineWorker

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    make_scratch(ScratchConfig(characters="abc", config=shape), tmp_path, 0)
    worker = EngineWorker(RankInfo("actor_infer", 0, 1, "cpu"), engine={"kind": "native"}, model_folder=str(tmp_path), dtype="float32")

    def fill(self: Runner, entries: object) -> None:
        raise torch.OutOfMemoryError(TORCHS)

    monkeypatch.setattr(type(worker.backend._runner), "fill", fill)  # type: ignore[attr-defined]

    async def generate() -> None:
        backend = worker.backend
        weights = dict(backend._ready_runner.weights())  # type: ignore[attr-defined]
        from drumroll.types import Version

        await backend.update(Version(0, 0), iter([[(name, tensor.clone()) for name, tensor in weights.items()]]), "keep")
        await backend.resume()
        await worker.submit("me", [GenRequest("r", [3, 4], Sampling(max_new_tokens=4), 0)])
        for _ in range(100):
            await worker.poll("me", 0.1)

    with pytest.raises(WorkerError) as caught:
        asyncio.run(generate())
    error = wrap_error(caught.value, WHERE, "poll", "actor_infer", 0)
    assert isinstance(error, DeviceMemoryError)
    assert error.stage == "rollout"
    asyncio.run(worker.backend.close())
