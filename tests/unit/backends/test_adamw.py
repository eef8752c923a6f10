"""The optimizer gives the bits that torch's own fused one gives."""

import torch

from drumroll.backends.train.adamw import AdamW

OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7, 5), (16,), (3, 4, 2)]


def weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in SHAPES]


def test_bits_are_torchs_own_with_weights_that_sometimes_have_no_gradient() -> None:
    ours, theirs = weights(), weights()
    optimizer, reference = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, lr=0.0, fused=True, **OPTIONS)
    for update in range(5):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(10 * update + number))
            for weight in pair:
                weight.grad = None if number == update % 3 else gradient.clone()
        lr = 0.01 * (update + 1)
        optimizer.step(lr)
        for settings in reference.param_groups:
            settings["lr"] = lr
        reference.step()
        for own, other in zip(ours, theirs, strict=True):
            assert torch.equal(own, other)
            for name, value in reference.state.get(other, {}).items():
                assert torch.equal(optimizer.state[own][name], value)
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in ours)


def test_numbers_of_several_kinds() -> None:
    wide, narrow = torch.ones(4, requires_grad=True), torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = AdamW([wide, narrow], **OPTIONS)
    for weight in (wide, narrow):
        weight.grad = torch.ones_like(weight)
    optimizer.step(0.5)
    assert torch.allclose(wide, narrow.float(), atol=1e-2)
    assert (wide < 1).all()
