"""The inference backend `native` on a CUDA device: against transformers, and against the trainer's log-probabilities."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from engine_driver import Driver, make_model, reference, tensors

from drumroll.backends.infer.native import Native
from drumroll.backends.train.fsdp2 import Fsdp2
from drumroll.text.packing import pack
from drumroll.types import GenRequest, RankInfo, Sampling, Task, Trajectory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANK = RankInfo("actor_infer", 0, 1, "cuda:0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


def start(folder: Path, dtype: str) -> Driver:
    backend = Native(Native.Config(num_slots=32), folder, dtype)
    backend.setup(RANK)
    driver = Driver(backend, folder)
    driver.update(0, {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors(folder).items()})
    driver.do(backend.resume())
    return driver


def test_greedy_replies_are_those_of_transformers(folder: Path) -> None:
    driver = start(folder, "float32")
    prompts = [[1, *range(3, 6 + n)] for n in range(20)]
    greedy = Sampling(max_new_tokens=24, temperature=0.0)
    replies = driver.generate(*(GenRequest(f"{n}", prompt, greedy, n) for n, prompt in enumerate(prompts)))
    model = reference(folder).to("cuda")
    for prompt, reply in zip(prompts, replies, strict=True):
        expected = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert reply.token_ids == expected.tolist()
    driver.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_engine_and_trainer_agree_on_log_probabilities(folder: Path, dtype: str, tolerance: float) -> None:
    driver = start(folder, dtype)
    sampling = Sampling(max_new_tokens=40, temperature=0.8)
    prompts = [[1, *range(3, 6 + n)] for n in range(24)]
    replies = driver.generate(*(GenRequest(f"{n}", prompt, sampling, n) for n, prompt in enumerate(prompts)))
    driver.close()
    trajectories = [
        Trajectory(
            sample_id=f"{n:03d}",
            group_id="g",
            task=Task(id=f"{n}", prompt=""),
            turns=(),
            token_ids=np.array([*prompt, *reply.token_ids], dtype=np.int32),
            loss_mask=np.array([False] * len(prompt) + [True] * len(reply.token_ids)),
            logp=np.array([0.0] * len(prompt) + reply.logp, dtype=np.float32),
            token_version=np.zeros(len(prompt) + len(reply.token_ids), dtype=np.int32),
            sampling=sampling,
            seed=n,
            reward=0.0,
            stop_reason="stop",
        )
        for n, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
    batch = pack(trajectories)
    trainer = Fsdp2(Fsdp2.Config(), folder, dtype, 0)
    trainer.setup(RANK)
    difference = (trainer.logprobs(batch) - batch.behaviour_logp)[batch.loss_mask].abs()
    trainer.close()
    assert float(difference.mean()) <= tolerance
