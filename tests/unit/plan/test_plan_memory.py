"""The cost model against what was measured (docs/results/speed.md), and against arithmetic by hand."""

from __future__ import annotations

import pytest

from drumroll.bench.rl import SHAPES
from drumroll.plan.cost import (
    GIB,
    Memory,
    Serving,
    Shape,
    Training,
    adapter_parameters,
    cache_bytes,
    engine_memory,
    kept_numbers,
    shape_of,
    trainer_memory,
    waiting,
)


def shape(name: str) -> Shape:
    found = shape_of({"model_type": "qwen2", **SHAPES[name]})
    assert found is not None
    return found


def test_full_fine_tuning_of_half_a_billion_as_measured() -> None:
    """`drumroll bench rl --shape qwen2.5-0.5b trainer.micro_batch_tokens=32768`: 40.5 GiB and 5.5 GiB on an H200."""
    trainer = trainer_memory("actor_train", "update", shape("qwen2.5-0.5b"), Training(1, 2, 32768))
    assert trainer.total / GIB == pytest.approx(40.5, rel=0.05)
    engine = engine_memory("rollout", shape("qwen2.5-0.5b"), Serving(1, 2, 512, 512 * 704, 8192))  # 648 tokens of context in pages of 64
    assert engine.total / GIB == pytest.approx(5.5, rel=0.05)


def test_adapters_of_one_and_a_half_billion_as_measured() -> None:
    """`drumroll bench rl --shape qwen2.5-1.5b trainer.lora.rank=16 ...`, with checkpointing: 5.0 GiB and 5.1 GiB on an H200."""
    training = Training(1, 2, 4096, checkpointing=True, lora_rank=16)
    assert trainer_memory("actor_train", "update", shape("qwen2.5-1.5b"), training).total / GIB == pytest.approx(5.0, rel=0.05)
    engine = engine_memory("rollout", shape("qwen2.5-1.5b"), Serving(1, 2, 128, 65536, 8192))
    assert engine.total / GIB == pytest.approx(5.1, rel=0.05)


def test_state_of_seven_billion() -> None:
    """18 bytes for each parameter on one GPU in bfloat16, 16 where several share them or compute in float32, 2 where nothing learns."""
    seven = shape("qwen2.5-7b")
    p = seven.num_parameters
    one = trainer_memory("actor_train", "update", seven, Training(1, 2, 4096, checkpointing=True))
    assert (one.weights, one.gradients, one.optimizer) == (6 * p, 4 * p, 8 * p)
    four = trainer_memory("actor_train", "update", seven, Training(4, 2, 4096, checkpointing=True))
    assert (four.weights, four.gradients, four.optimizer) == (p, p, 2 * p)
    assert four.buffers > 0 == one.buffers
    plain = trainer_memory("actor_train", "update", seven, Training(1, 4, 4096))
    assert plain.weights == 4 * p
    reference = trainer_memory("reference", "score", seven, Training(1, 2, 4096))
    assert (reference.weights, reference.gradients, reference.optimizer) == (2 * p, 0, 0)


def test_what_settings_change() -> None:
    half = shape("qwen2.5-0.5b")

    def total(tokens: int = 16384, **changes: bool) -> int:
        return trainer_memory("actor_train", "update", half, Training(1, 2, tokens, **changes)).total

    assert total(8192) < total(16384)
    assert total(checkpointing=True) < total(16384) / 2
    assert total(fused_layers=False) > 1.2 * total()
    stages = {stage: trainer_memory("actor_train", stage, half, Training(1, 2, 16384)).total for stage in ("score", "update", "sync")}
    assert stages["update"] > max(stages["score"], stages["sync"])
    assert trainer_memory("critic", "update", half, Training(1, 2, 16384, has_scalar_head=True)).logits == 0


def test_arithmetic_by_hand() -> None:
    half = shape("qwen2.5-0.5b")
    assert kept_numbers(half, fused=True) == 4 * 896 + 2 * 896 + 2 * 128 + 2 * 14 + 3 * 4864
    assert cache_bytes(half, 2) == 2 * 24 * 128 * 2
    assert adapter_parameters(half, 1) == 24 * (4 * 896 + 2 * (896 + 128) + 3 * (896 + 4864))
    spread = engine_memory("rollout", half, Serving(2, 2, 64, 10_000, 1024))
    assert spread.cache == 10_000 * cache_bytes(half, 2) // 2
    assert spread.weights == half.num_parameters


def test_who_waits_keeps_its_state_or_leaves() -> None:
    working = Memory(weights=10, gradients=5, optimizer=20, activations=100, cache=7)
    assert waiting(working, offloads=False, keeps_cache=True) == Memory(weights=10, optimizer=20, cache=7)
    gone = waiting(working, offloads=True, keeps_cache=True)
    assert (gone.total, gone.host) == (0, 30)
