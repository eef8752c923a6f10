"""Products with packed weights: values, bits, and weights that change in place."""

import pytest
import torch
from torch.nn.functional import linear

from drumroll.backends import products
from drumroll.backends.products import Product, can_pack

needs_packing = pytest.mark.skipif(not can_pack([torch.zeros(1)]), reason="this build of torch packs no weights")


def random_weight(out_width: int, in_width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out_width, in_width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_width", "in_width"), [(768, 256), (1366, 256), (256, 683), (17, 33)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_equals_a_plain_product(out_width: int, in_width: int, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    weight = random_weight(out_width, in_width).to(dtype)
    offset = random_weight(1, out_width, 1)[0].to(dtype) if bias else None
    rows = random_weight(48, in_width, 2).view(48, 1, in_width).to(dtype)
    for packs in (False, can_pack([weight])):
        torch.testing.assert_close(Product(weight, offset, packs=packs)(rows), linear(rows, weight, offset), rtol=tolerance, atol=tolerance)


@needs_packing
@pytest.mark.parametrize("in_width", [64, 256, 683])
def test_a_row_has_the_same_bits_among_any_others_and_with_any_number_of_threads(in_width: int) -> None:
    product, rows = Product(random_weight(512, in_width), packs=True), random_weight(256, in_width, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = product(rows)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for count in range(16, 257, 16):
                assert torch.equal(product(rows[:count]), expected[:count])
                assert torch.equal(product(rows[:count].flip(0)), expected[:count].flip(0))
    finally:
        torch.set_num_threads(threads)


@needs_packing
def test_a_weight_that_changed_counts_from_renew_on() -> None:
    weight, rows = random_weight(32, 16), random_weight(16, 16, 1)
    product = Product(weight, packs=True)
    weight.copy_(random_weight(32, 16, 2))
    product.renew()
    torch.testing.assert_close(product(rows), linear(rows, weight), rtol=1e-5, atol=1e-5)


def test_large_models_and_other_types_are_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack([torch.zeros(4, 4, dtype=torch.float64)])
    monkeypatch.setattr(products, "MOST_BYTES", 100)
    assert not can_pack([torch.zeros(4, 4), torch.zeros(4, 4)])
