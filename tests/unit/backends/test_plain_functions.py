"""Functions between a decoder's products: what they give and how they learn is what torch's own operations do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drumroll.backends.train.plain_functions import angles, gated, normed, turned

Function = Callable[..., Tensor]
TOKENS, HEADS, WIDTH = 7, 3, 10
FREQUENCIES = 100.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))


def plainly_gated(joint: Tensor) -> Tensor:
    gate, through = joint.chunk(2, dim=-1)
    return silu(gate) * through


def plainly_turned(heads: Tensor) -> Tensor:
    angle = (torch.arange(TOKENS)[:, None] * FREQUENCIES)[:, None]
    first, second = heads.double().chunk(2, dim=-1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1).to(heads.dtype)


def own_turned(heads: Tensor) -> Tensor:
    return turned(heads, *angles(torch.arange(TOKENS), FREQUENCIES, heads.dtype))


CASES: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "normed": (lambda x, w: normed(x, w, 1e-5), lambda x, w: rms_norm(x, w.shape, w, 1e-5), [(TOKENS, WIDTH), (WIDTH,)]),
    "normed heads": (lambda x, w: normed(x, w, 1e-5), lambda x, w: rms_norm(x, w.shape, w, 1e-5), [(TOKENS, HEADS, WIDTH), (WIDTH,)]),
    "gated": (gated, plainly_gated, [(TOKENS, 2 * WIDTH)]),
    "turned": (own_turned, plainly_turned, [(TOKENS, HEADS, WIDTH)]),
}


def learnt(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """What it gives, and the gradients of its inputs."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    steepness = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, steepness)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_those_of_torchs_own_operations(case: str, scale: float, dtype: torch.dtype, tolerance: float) -> None:
    own, plain, shapes = CASES[case]
    generator = torch.Generator().manual_seed(0)
    inputs = [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    expected = learnt(plain, [tensor.float() for tensor in inputs])
    for found, exact in zip(learnt(own, inputs), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))


def test_parts_of_larger_tensors_are_taken_as_they_are() -> None:
    whole = torch.randn(TOKENS, HEADS + 2, WIDTH)
    expected = own_turned(whole[:, 1 : 1 + HEADS].contiguous())
    assert torch.equal(own_turned(whole[:, 1 : 1 + HEADS]), expected)
    weight = torch.rand(WIDTH)
    assert torch.equal(normed(whole[:, 0], weight, 1e-5), normed(whole[:, 0].contiguous(), weight, 1e-5))
