"""The vLLM engine on a GPU: what it samples, weights through the GPU's own memory, and the memory that it gives back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drumroll.backends.infer.vllm import check_installed
from drumroll.errors import PluginError

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from engine_driver import Driver, ask, engine, make_model, prompt_of, reference, tensors

try:
    check_installed()
except PluginError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", kind="vllm", hidden_size=256)


@pytest.fixture(scope="module")
def lasting(folder: Path) -> Iterator[Driver]:
    with engine(folder, "vllm", dtype="float32", device="cuda:0", memory_share=0.2) as running:
        yield running


@pytest.fixture
def driver(lasting: Driver) -> Driver:
    lasting.begin_anew()
    return lasting


def expected_logp(folder: Path, prompt: list[int], reply: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = reference(folder)(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_trainer(driver: Driver, folder: Path, temperature: float) -> None:
    prompts = [prompt_of(length) for length in (3, 17, 64)]
    asked = [ask(str(i), prompt, seed=i, max_new_tokens=60, temperature=temperature) for i, prompt in enumerate(prompts)]
    for prompt, reply in zip(prompts, driver.generate(*asked), strict=True):
        torch.testing.assert_close(reply.logp, expected_logp(folder, prompt, reply.token_ids, temperature), atol=2e-3, rtol=0)


def test_weights_change_while_requests_run(driver: Driver, folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path, "qwen2", seed=1, kind="vllm", hidden_size=256)
    on_gpu = {name: tensor.cuda() for name, tensor in tensors(other).items()}
    prompt = prompt_of(10)
    driver.submit(*(ask(f"r{i}", prompt, seed=i, max_new_tokens=200, stop_token_ids=()) for i in range(8)))
    driver.until(lambda: bool(driver.replies), wait_s=0.005)
    driver.do(driver.backend.pause())
    driver.update(4, on_gpu, "recompute")
    driver.do(driver.backend.resume())
    for reply in driver.gather(f"r{i}" for i in range(8)):
        split = reply.token_version.count(0)
        assert reply.token_version == [0] * split + [4] * (len(reply.token_ids) - split)
        logp = expected_logp(folder, prompt, reply.token_ids, 1.0)[:split] + expected_logp(other, prompt, reply.token_ids, 1.0)[split:]
        torch.testing.assert_close(reply.logp, logp, atol=2e-3, rtol=0)


@pytest.mark.parametrize("updates", [False, True])
def test_a_sleeping_engine_gives_its_memory_back(driver: Driver, updates: bool) -> None:
    driver.submit(*(ask(f"r{i}", prompt_of(10), seed=i, max_new_tokens=200) for i in range(4)))
    driver.until(lambda: bool(driver.replies), wait_s=0.005)
    free_before = torch.cuda.mem_get_info()[0]
    driver.do(driver.backend.sleep())
    freed = torch.cuda.mem_get_info()[0] - free_before
    assert freed > 0.1 * torch.cuda.mem_get_info()[1], f"{freed / 2**30:.1f} GiB"
    driver.do(driver.backend.wake())
    if updates:
        driver.update(1, {name: tensor.cuda() for name, tensor in tensors(driver.folder).items()})
    driver.do(driver.backend.resume())
    for reply in driver.gather(f"r{i}" for i in range(4)):
        assert reply.finishes[0] in ("stop", "length")
        torch.testing.assert_close(reply.logp, expected_logp(driver.folder, prompt_of(10), reply.token_ids, 1.0), atol=2e-3, rtol=0)
