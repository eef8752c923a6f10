"""Float32 masters of weights that passes have in bfloat16."""

import pytest
import torch
from torch import nn

from drumroll.backends.train.masters import Masters


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 1, bias=False))


def test_changes_too_small_for_the_weights_add_up_in_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    masters = Masters(model, torch.bfloat16)
    optimizer = torch.optim.SGD(masters.all, lr=1e-4)
    for _ in range(60):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        masters.spread()
    assert masters.of(model.weight).item() == pytest.approx(0.994, abs=1e-6)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == pytest.approx(0.994, abs=0.003)
    assert model.weight.item() != 1.0


def test_gradients_of_several_passes_are_added_in_float32_and_leave_the_model() -> None:
    model = model_of()
    masters = Masters(model, torch.bfloat16)
    expected: dict[int, torch.Tensor] = {}
    for seed in range(3):
        alone = model_of()
        of_alone = Masters(alone, torch.bfloat16)
        tokens = torch.randint(10, (6,), generator=torch.Generator().manual_seed(seed))
        for each in (model, alone):
            each(tokens).float().sum().backward()
        for number, master in enumerate(of_alone.all):
            expected[number] = expected.get(number, torch.zeros_like(master)) + master.grad
    assert all(parameter.grad is None for parameter in model.parameters())
    for number, master in enumerate(masters.all):
        assert master.grad.dtype == torch.float32
        torch.testing.assert_close(master.grad, expected[number], rtol=0, atol=0)


def test_an_exact_part_computes_in_float32() -> None:
    model = model_of()
    masters = Masters(model, torch.bfloat16, exact=model[2])
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16] * 3 + [torch.float32]
    assert masters.all[3] is model[2].weight
    output = model(torch.arange(4))
    assert output.dtype == torch.float32
    output.sum().backward()
    assert all(master.grad is not None for master in masters.all)


def test_tied_weights_have_one_master_and_buffers_are_their_own() -> None:
    model = model_of()
    model.register_buffer("angles", torch.ones(3))
    model.again = model[1]
    masters = Masters(model, torch.bfloat16)
    assert len(masters.all) == 4
    assert masters.of(model.again.weight) is masters.of(model[1].weight)
    assert masters.of(model.angles) is model.angles
    assert model.angles.dtype == torch.float32


def test_what_passes_compute_with_is_made_anew_on_the_device() -> None:
    model = model_of()
    masters = Masters(model, torch.bfloat16)
    tokens = torch.arange(6)
    expected = model(tokens)
    moves: list[int] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moves.append(tensor.numel())
        return tensor.clone()

    masters.to("host", move)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert moves == [master.numel() for master in masters.all]
    masters.to("device", move)
    assert torch.equal(model(tokens), expected)
