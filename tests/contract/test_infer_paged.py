"""The fused decoder and its pages, on a GPU or in Triton's interpreter: what transformers' own model says, with shared beginnings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, Reply, ask, engine, make_model, prompt_of, tensors

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":  # which Triton reads when it is first imported
    pytest.skip("needs a CUDA device, or Triton's interpreter: make test-kernels", allow_module_level=True)

from drumroll.backends.infer.native import Native  # noqa: E402
from drumroll.backends.infer.native import runner as runners  # noqa: E402
from drumroll.backends.infer.native.paged import PagedRunner, row_bucket  # noqa: E402
from drumroll.types import GenRequest, RankInfo  # noqa: E402


@pytest.fixture
def open_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    drivers: list[Driver] = []

    def always_paged(cfg: Any, folder: Path, dtype: str, device: str, *, trust_remote_code: bool) -> PagedRunner:
        return PagedRunner(runners.load_for_inference(folder, dtype, torch.device(device), trust_remote_code), folder, cfg)

    def open_(folder: Path, **options: Any) -> Driver:
        config = Native.Config.model_validate({"kind": "native", "num_slots": 4, **options})
        backend = Native(config, folder, "float32")
        backend.setup(RankInfo("actor_infer", 0, 1, DEVICE))
        drivers.append(Driver(backend, folder, patience_s=150.0))  # the interpreter takes its time
        drivers[-1].start()
        return drivers[-1]

    def open_here(folder: Path, **options: Any) -> Driver:
        with monkeypatch.context() as patch:
            patch.setattr(runners, "open_runner", always_paged)
            return open_(folder, **options)

    yield open_here
    for driver in drivers:
        driver.close()


def model_logp(folder: Path, tokens: list[int], num_prompt: int) -> list[float]:
    """Of every token of the reply, as transformers' model says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logp = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(logp[place - 1, tokens[place]]) for place in range(num_prompt, len(tokens))]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_tokens_have_the_probabilities_that_the_model_gives_them(tmp_path: Path, open_engine: Any, kind: str) -> None:
    folder = make_model(tmp_path / "model", kind, hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    driver = open_engine(folder)
    prompts = [prompt_of(70, seed=1), prompt_of(5, seed=2), prompt_of(1, seed=3)]
    replies = driver.generate(*(ask(f"{i}", prompt, i, max_new_tokens=9) for i, prompt in enumerate(prompts)))
    for prompt, reply in zip(prompts, replies, strict=True):
        expected = model_logp(folder, prompt + reply.token_ids, len(prompt))
        assert reply.logp == pytest.approx(expected, abs=2e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("paged") / "model", hidden_size=64, num_attention_heads=4)


def requests(count: int) -> list[GenRequest]:
    """Two of each prompt, all kinds of sampling."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.8}]
    return [
        ask(f"r{i}", prompt_of((64, 67, 130)[i // 2 % 3], seed=i // 2), i, max_new_tokens=3 + 4 * (i % 4), **kinds[i % 4])
        for i in range(count)
    ]


def test_replies_are_those_of_the_other_runner(folder: Path, open_engine: Any) -> None:
    driver = open_engine(folder)
    replies = driver.generate(*requests(10))
    with engine(folder, num_slots=4) as other:
        expected = other.generate(*requests(10))
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in expected]
    for reply, wanted in zip(replies, expected, strict=True):
        assert reply.logp == pytest.approx(wanted.logp, abs=2e-4)
        assert reply.finishes == wanted.finishes


def test_beginnings_are_computed_once_and_held_together(folder: Path, open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = open_engine(folder)
    runner = driver.backend._ready_runner
    computed: list[int] = []
    prefill = runner._prefill

    def spy(chunks: list[tuple[int, int, list[int]]]) -> None:
        computed.extend(len(tokens) for _, _, tokens in chunks)
        prefill(chunks)

    monkeypatch.setattr(runner, "_prefill", spy)
    free = runner.book.num_available
    prompt = prompt_of(100)
    replies = driver.generate(*(ask(f"{i}", prompt, i, max_new_tokens=8) for i in range(4)))
    assert sum(computed) == 99, "one for all four"
    assert runner.book.num_available == free, "whoever ends gives its pages back"
    reply = replies[0].token_ids
    driver.generate(ask("longer", [*prompt, *reply, *prompt_of(20, seed=3)], 9, max_new_tokens=1))
    assert sum(computed) == 99 + 100 + len(reply) + 20 - 1 - 64, "the whole pages of what is there already"
    driver.update(1, cache="keep")
    driver.generate(ask("new weights", prompt, 0, max_new_tokens=1))
    assert computed[-1] == 99, "keys and values of other weights serve nobody"


def test_who_came_last_waits_when_there_are_too_few_pages(folder: Path, open_engine: Any) -> None:
    driver = open_engine(folder, cache_tokens=256)
    wanted = [ask(f"{i}", prompt_of(60, seed=i), i, max_new_tokens=24) for i in range(3)]
    replies = driver.generate(*wanted)
    with engine(folder, num_slots=4) as other:
        expected = other.generate(*wanted)
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in expected]
    assert driver.backend._ready_runner.book.num_available == 4


def test_pause_update_sleep_and_abort_between_launches(tmp_path: Path, open_engine: Any) -> None:
    folder = make_model(tmp_path / "model", hidden_size=64, num_attention_heads=4, max_position_embeddings=8192)
    driver = open_engine(folder)
    # So long that no GPU is at its end before this test has gone through all of it.
    driver.submit(ask("long", prompt_of(30), 1, max_new_tokens=8000), ask("unwanted", prompt_of(31), 2, max_new_tokens=8000))
    driver.until(lambda: len(driver.replies.get("long", Reply()).token_ids) > 4)
    driver.backend.abort(["unwanted"])
    driver.do(driver.backend.pause())
    driver.update(1, {name: weight * 0.9 for name, weight in tensors(folder).items()}, cache="recompute")
    driver.do(driver.backend.resume())
    driver.until(lambda: driver.replies["long"].token_version[-1] == 1)
    driver.do(driver.backend.sleep())
    driver.do(driver.backend.wake())
    driver.update(2)
    driver.do(driver.backend.resume())
    driver.until(lambda: driver.replies["long"].token_version[-1] == 2)
    driver.backend.abort(["long"])
    (long,) = driver.gather(["long"])
    assert driver.replies["unwanted"].finishes == ["aborted"]
    assert long.token_version == sorted(long.token_version)
    assert set(long.token_version) == {0, 1, 2}
    place = 30 + long.token_version.index(2)
    end = min(len(long.token_ids), place - 30 + 20)
    tokens = prompt_of(30) + long.token_ids[:end]
    assert long.logp[place - 30 : end] == pytest.approx(model_logp(folder, tokens, place), abs=2e-4)


def test_weights_that_are_no_numbers_end_requests_and_nothing_else(folder: Path, open_engine: Any) -> None:
    driver = open_engine(folder)
    weights = tensors(folder)
    driver.update(1, {name: weight * torch.nan for name, weight in weights.items()})
    (reply,) = driver.generate(ask("spoilt", prompt_of(9), 1))
    assert "not finite" in reply.error
    driver.update(2, weights)
    (reply,) = driver.generate(ask("fine", prompt_of(9), 1, max_new_tokens=3))
    assert reply.logp == pytest.approx(model_logp(folder, prompt_of(9) + reply.token_ids, 9), abs=2e-4)


def test_row_buckets() -> None:
    assert [row_bucket(n) for n in (1, 2, 3, 5, 8, 9, 17, 64, 65, 256, 257, 512)] == [1, 2, 4, 8, 8, 16, 24, 64, 96, 256, 320, 512]
