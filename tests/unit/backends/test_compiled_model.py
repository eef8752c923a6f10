"""Decode steps by functions in C: the numbers of torch's own, and bits that are a row's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drumroll.backends import compiled
from drumroll.backends.infer.native.cache import SlotCache
from drumroll.backends.infer.native.compiled_model import CompiledModel, open_lean
from drumroll.backends.infer.native.decode import Decode
from drumroll.backends.infer.native.lean import LeanModel
from drumroll.backends.llama_folder import Parts, Shape
from drumroll.backends.sampling import processed_logp, sample, uniform

pytestmark = pytest.mark.skipif(compiled.find_compiler() is None, reason="needs a C compiler")

NUM_SLOTS, CONTEXT, VOCABULARY, NUM_LAYERS = 24, 96, 50, 2

SHAPES: dict[str, dict[str, Any]] = {
    "heads of their own": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 32},
    "shared heads": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    "many to one": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64},
    "wide": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128},
    "narrow": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 6},
    "of no common size": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 50},
}


def functions() -> Decode:
    decode = Decode.open()
    assert decode is not None, "decode.c compiles wherever there is a compiler"
    return decode


def parts(num_heads: int, num_kv_heads: int, head_dim: int, *, has_bias: bool = False, has_norms: bool = False) -> Parts:
    """A decoder with random weights, the same for the same arguments."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return 0.3 * torch.randn(*size, generator=generator)

    hidden, inner = 40, 56
    sizes = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    weights = {"model.embed_tokens.weight": drawn(VOCABULARY, hidden), "model.norm.weight": 1 + drawn(hidden)}
    for number in range(NUM_LAYERS):
        prefix = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + drawn(hidden)
        for name, size in sizes.items():
            weights[f"{prefix}self_attn.{name}_proj.weight"] = drawn(size * head_dim, hidden)
            if has_bias:
                weights[f"{prefix}self_attn.{name}_proj.bias"] = drawn(size * head_dim)
            if has_norms and name != "v":
                weights[f"{prefix}self_attn.{name}_norm.weight"] = 1 + drawn(head_dim)
        weights[f"{prefix}self_attn.o_proj.weight"] = drawn(hidden, num_heads * head_dim)
        weights |= {f"{prefix}mlp.{name}_proj.weight": drawn(inner, hidden) for name in ("gate", "up")}
        weights[f"{prefix}mlp.down_proj.weight"] = drawn(hidden, inner)
    angle = torch.arange(CONTEXT)[:, None] * torch.logspace(0, -2, head_dim // 2)
    return Parts(Shape(NUM_LAYERS, hidden, num_heads, num_kv_heads, head_dim, 1e-6), weights, angle.cos(), angle.sin())


def filled(model: LeanModel) -> SlotCache:
    """Keys and values as if all positions had been computed, the same for every model of a shape."""
    cache = SlotCache(NUM_SLOTS, CONTEXT)
    generator = torch.Generator().manual_seed(1)
    for number in range(NUM_LAYERS):
        for store in cache.stored(number, torch.empty(0, model.num_kv_heads, 0, model.head_dim)):
            store.copy_(torch.randn(store.shape, generator=generator))
    return cache


def decoded(model: LeanModel, cache: SlotCache, tokens: Tensor, positions: Tensor) -> Tensor:
    cache.aim(len(tokens), positions[:, None], CONTEXT)
    hidden = torch.arange(CONTEXT) > positions[:, None, None, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    return model.next_logits(tokens[:, None], positions[:, None], mask, cache)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("extra", [{}, {"has_bias": True}, {"has_norms": True}], ids=["plain", "biases", "norms"])
def test_logits_keys_and_values_are_those_of_torch(shape: dict[str, Any], extra: dict[str, bool]) -> None:
    plain, fast = open_lean(parts(**shape, **extra), None), open_lean(parts(**shape, **extra), functions())
    assert not isinstance(plain, CompiledModel)
    assert isinstance(fast, CompiledModel)
    caches = [filled(model) for model in (plain, fast)]
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, CONTEXT - 2, (NUM_SLOTS,), generator=generator)
    for step in range(2):
        tokens = torch.randint(0, VOCABULARY, (NUM_SLOTS,), generator=generator)
        expected, got = (decoded(model, cache, tokens, positions + step) for model, cache in zip((plain, fast), caches, strict=True))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for number in range(NUM_LAYERS):
        for left, right in zip(caches[0].layers[number], caches[1].layers[number], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_row_has_the_same_bits_among_any_others(shape: dict[str, Any]) -> None:
    """Whatever they hold, wherever they stand, and whatever lies behind the row's own position."""
    model = open_lean(parts(**shape), functions())
    tokens, positions = torch.arange(NUM_SLOTS), torch.arange(NUM_SLOTS) * 3
    expected = decoded(model, filled(model), tokens, positions)
    for row in (0, 5, 15):
        cache = filled(model)
        for store in (store for stores in cache.layers.values() for store in stores):
            own = store[row].clone()
            store.mul_(100)
            store[row, :, : positions[row]] = own[:, : positions[row]]
        others, elsewhere = torch.full_like(tokens[:16], 7), torch.full_like(positions[:16], CONTEXT - 3)
        others[row], elsewhere[row] = tokens[row], positions[row]
        assert torch.equal(decoded(model, cache, others, elsewhere)[row], expected[row])


def test_shares_of_attention_are_exact_enough_over_long_and_uneven_scores() -> None:
    """Scores far apart, where e to their power is 0, and close together, where all count."""
    for scale in (1e-3, 1.0, 30.0):
        models = [open_lean(parts(2, 2, 32), decode) for decode in (None, functions())]
        caches = [filled(model) for model in models]
        for cache in caches:
            for keys, _ in cache.layers.values():
                keys.mul_(scale)
        tokens, positions = torch.arange(16), torch.full((16,), CONTEXT - 1)
        plain, fast = (decoded(model, cache, tokens, positions) for model, cache in zip(models, caches, strict=True))
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_shows() -> None:
    model = open_lean(parts(2, 2, 32), functions())
    cache = filled(model)
    cache.layers[0][0][3] = torch.nan
    logits = decoded(model, cache, torch.arange(16), torch.full((16,), 9))
    assert logits[3].isnan().all()
    assert logits[torch.arange(16) != 3].isfinite().all()


def test_other_numbers_than_float32_are_left_to_torch() -> None:
    narrow = parts(2, 2, 32)
    weights = {name: tensor.bfloat16() for name, tensor in narrow.weights.items()}
    assert not isinstance(open_lean(Parts(narrow.shape, weights, narrow.cos, narrow.sin), functions()), CompiledModel)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 500, 50_000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_tokens_are_drawn_as_torch_draws_them(size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = 64
    logits = spread * torch.randn(rows, size, generator=generator)
    logits[1, : size // 2] = -torch.inf
    temperature = torch.tensor([1.0, 0.7, 1.5, 0.0]).repeat(rows // 4)
    seeds, index = torch.randint(-(2**62), 2**62, (rows,), generator=generator), torch.arange(rows)
    ids, logp = functions().draw(logits, temperature, seeds, index)
    expected = processed_logp(logits, temperature, torch.ones(rows), torch.zeros(rows, dtype=torch.int64), truncates=False)
    assert torch.equal(ids, sample(expected, uniform(seeds, index), temperature == 0))
    torch.testing.assert_close(logp, expected.gather(-1, ids[:, None])[:, 0], rtol=1e-5, atol=2e-5)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((4096, 70), -torch.inf)
    logits[:, 66] = 0.0
    ids, logp = functions().draw(logits, torch.ones(4096), torch.arange(4096) * 7919, torch.arange(4096))
    assert (ids == 66).all()
    assert (logp == 0.0).all()


def test_a_draw_from_what_is_no_number_is_none() -> None:
    logits = torch.zeros(2, 70)
    logits[1, 5] = torch.nan
    ids, logp = functions().draw(logits, torch.ones(2), torch.arange(2), torch.arange(2))
    assert logp[0].isfinite()
    assert logp[1].isnan()
    assert 0 <= int(ids[1]) < 70
