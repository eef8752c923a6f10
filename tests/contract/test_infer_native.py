"""The native engine's own promises: the same bits whoever the neighbours are, models that it refuses, faults that surface."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, Reply, ask, engine, make_model, prompt_of, tensors

from drumroll.backends.infer.native import Native
from drumroll.backends.infer.native.slots import bucket
from drumroll.errors import ConfigError, ModelError, WorkerError
from drumroll.types import GenRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("native"), num_attention_heads=6, hidden_size=48)


def fingerprint(reply: Reply) -> tuple[tuple[int, ...], tuple[float, ...], tuple[str, ...]]:
    return tuple(reply.token_ids), tuple(reply.logp), tuple(reply.finishes)


def requests(count: int) -> list[GenRequest]:
    """Prompts from one token to several prefill calls, each twice; replies from one token to a full context, all kinds of sampling."""
    rnd = random.Random(0)
    lengths = random.Random(1).choices([1, 2, 5, 16, 17, 30, 70, 150, 250], k=count)
    return [
        ask(
            f"r{i}",
            prompt_of(lengths[i // 2], seed=i // 2),
            seed=i,
            max_new_tokens=rnd.choice([1, 5, 30, 80]),
            temperature=rnd.choice([0.0, 0.7, 1.0, 1.5]),
            top_k=rnd.choice([0, 0, 5]),
            top_p=rnd.choice([1.0, 1.0, 0.9]),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=[True, False], ids=["C", "torch"])
def compiles(request: pytest.FixtureRequest) -> bool:
    """Decoding by functions in C, and without them."""
    return bool(request.param)


@pytest.fixture(scope="module")
def alone(folder: Path, compiles: bool) -> dict[str, object]:
    """Every request by itself in the smallest engine."""
    with engine(folder, num_slots=1, prefill_tokens=64, compiles=compiles) as driver:
        return {request.id: fingerprint(driver.generate(request)[0]) for request in requests(40)}


@pytest.mark.parametrize("num_slots", [7, 16, 32, 64])
def test_bits_do_not_depend_on_the_number_of_slots(folder: Path, compiles: bool, alone: dict[str, object], num_slots: int) -> None:
    with engine(folder, num_slots=num_slots, prefill_tokens=64, compiles=compiles) as driver:
        driver.generate(*requests(40))
        assert {name: fingerprint(reply) for name, reply in driver.replies.items()} == alone


@pytest.fixture(scope="module")
def busy(folder: Path, compiles: bool) -> Iterator[Driver]:
    with engine(folder, num_slots=48, prefill_tokens=64, compiles=compiles) as driver:
        yield driver


@pytest.mark.parametrize("seed", range(6))
def test_bits_do_not_depend_on_neighbours_arrival_or_slot(busy: Driver, alone: dict[str, object], seed: int) -> None:
    """Random order, random pauses, strangers that come and are aborted at random."""
    rnd = random.Random(seed)
    busy.replies.clear()
    order = requests(40)
    rnd.shuffle(order)
    strangers: list[str] = []
    while order:
        batch = [order.pop() for _ in range(min(len(order), rnd.randint(1, 9)))]
        strangers.append(f"s{len(strangers)}")
        busy.submit(ask(strangers[-1], prompt_of(rnd.randint(1, 90)), rnd.randint(0, 99), max_new_tokens=100), *batch)
        time.sleep(rnd.choice([0.0, 0.002, 0.01]))
        busy.backend.abort([name for name in strangers if rnd.random() < 0.3])
        busy.poll(0.0)
    busy.gather([*alone, *strangers])
    assert {name: fingerprint(busy.replies[name]) for name in alone} == alone


def test_bits_of_long_contexts_do_not_depend_on_longer_ones(tmp_path: Path, compiles: bool) -> None:
    """Prompts of several chunks beside longer ones, whose keys and values are read further."""
    heads = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    asked = [ask(f"{n}", prompt_of(length, seed=n), n, max_new_tokens=24) for n, length in enumerate((40, 190, 250, 260, 500, 700))]
    folder, found = make_model(tmp_path, **heads), []
    for num_slots in (1, 16):
        with engine(folder, num_slots=num_slots, prefill_tokens=1024, compiles=compiles) as driver:
            replies = driver.generate(*asked) if num_slots > 1 else [driver.generate(request)[0] for request in asked]
            found.append([fingerprint(reply) for reply in replies])
    assert found[0] == found[1]


def test_decoding_runs_only_the_rows_that_are_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder, num_slots=64) as driver:
        assert isinstance(driver.backend, Native)
        runner = driver.backend._ready_runner
        seen: set[tuple[int, ...]] = set()
        mask = runner._mask

        def spy(positions: torch.Tensor, reach: int) -> torch.Tensor:
            seen.add((*positions.shape, reach))
            return mask(positions, reach)

        monkeypatch.setattr(runner, "_mask", spy)
        driver.generate(*(ask(f"{i}", prompt_of(5, seed=i), i) for i in range(40)))
        assert {(48, 1, 32)} <= seen
        seen.clear()
        driver.generate(*(ask(f"again {i}", prompt_of(5, seed=40 + i), i) for i in range(3)))
        assert seen == {(3, 16, 32), (16, 1, 32)}


def test_a_prompt_that_several_share_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder, num_slots=4, prefill_tokens=64) as driver:
        assert isinstance(driver.backend, Native)
        runner = driver.backend._ready_runner
        prefill = runner.prefill
        computed: list[int] = []

        def spy(chunks: list[Any], length: int) -> None:
            computed.extend(len(chunk.tokens) for chunk in chunks)
            prefill(chunks, length)

        monkeypatch.setattr(runner, "prefill", spy)
        replies = driver.generate(*(ask(f"{i}", prompt_of(151), i, max_new_tokens=2 + i) for i in range(12)))
        assert sum(computed) == 150, "twelve requests in four slots"
        assert len({tuple(reply.token_ids) for reply in replies}) > 6
        driver.update(1, cache="keep")
        driver.generate(ask("new", prompt_of(151), 0))
        assert sum(computed) == 300, "keys and values of other weights serve nobody"


def test_buckets() -> None:
    assert [bucket(size, 16) for size in (1, 16, 17, 33, 48, 49, 65, 97, 129, 193)] == [16, 16, 32, 48, 48, 64, 96, 128, 192, 256]


def test_a_fault_in_the_compute_thread_reaches_everyone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder) as driver:
        assert isinstance(driver.backend, Native)
        driver.do(driver.backend.pause())
        driver.submit(ask("a", prompt_of(5)), ask("b", prompt_of(6)))

        def broken(*args: object, **options: object) -> None:
            raise RuntimeError("the device fell off")

        monkeypatch.setattr(driver.backend._ready_runner, "decode", broken)
        driver.do(driver.backend.resume())
        for reply in driver.gather(["a", "b"]):
            assert reply.finishes == ["error"]
            assert "the device fell off" in reply.error
        for call in (lambda: driver.update(1), lambda: driver.do(driver.backend.resume()), lambda: driver.poll(5.0)):
            with pytest.raises(WorkerError, match="the device fell off"):
                call()
        driver.submit(ask("late", prompt_of(5)))
        assert driver.gather(["late"])[0].finishes == ["error"]


def test_logits_that_are_not_finite_are_errors_and_leave_no_trace(folder: Path) -> None:
    with engine(folder) as driver:
        request = ask("good", prompt_of(20), seed=3)
        expected = fingerprint(driver.generate(request)[0])
        weights = tensors(folder)
        driver.update(1, {**weights, "model.norm.weight": weights["model.norm.weight"] * torch.nan})
        poisoned = driver.generate(*(ask(f"bad {i}", prompt_of(20)) for i in range(16)))
        assert all(reply.finishes == ["error"] and "finite" in reply.error for reply in poisoned)
        driver.update(2)
        driver.replies.clear()
        assert fingerprint(driver.generate(request)[0]) == expected


def test_weights_may_come_under_any_name_of_a_tied_tensor(folder: Path) -> None:
    with engine(folder) as driver:
        weights = tensors(folder)
        shared = weights.pop("model.embed_tokens.weight")
        assert "lm_head.weight" in driver.update(1, {"lm_head.weight": shared, **weights})


def test_a_context_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings"), engine(folder, context_tokens=512):
        pass


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
        ("gemma2", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    ],
)
def test_a_model_that_the_cache_does_not_serve_is_refused(tmp_path: Path, architecture: str, config: dict[str, int]) -> None:
    from drumroll.config.models import ScratchConfig
    from drumroll.models.scratch import make_scratch

    make_scratch(ScratchConfig(architecture=architecture, characters="abc", config=config), tmp_path, 0)
    with pytest.raises(ModelError, match=r"engine|attention"), engine(tmp_path, context_tokens=64):
        pass


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"), engine(tmp_path):
        pass
