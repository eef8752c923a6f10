"""Log-probabilities and entropies from hidden states against the plain way, with their gradients."""

import pytest
import torch

from drumroll.backends.train import head
from drumroll.backends.train.head import FusedHead


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("entropy_learns", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, entropy_learns: bool, rows_per_chunk: int) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", rows_per_chunk * 11)
    hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    targets, temperature = torch.randint(11, (7,)), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0, 1.3], dtype=torch.float64)
    of_logp, of_entropy = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64) * entropy_learns
    gradients = []
    outputs = []
    for function in (plain, lambda *inputs: FusedHead.apply(*inputs, entropy_learns)):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logp, entropy = function(*leaves, targets, temperature)
        ((logp * of_logp).sum() + (entropy * of_entropy).sum()).backward()
        outputs.append((logp.detach().double(), entropy.detach().double()))
        gradients.append([leaf.grad.double() for leaf in leaves])
    for expected, got in zip(outputs[0], outputs[1], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for expected, got in zip(gradients[0], gradients[1], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_entropy_that_does_not_learn_has_no_gradient() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    logp, entropy = FusedHead.apply(hidden, torch.randn(6, 4), torch.tensor([1, 2, 3]), torch.ones(3), False)
    assert logp.requires_grad
    assert not entropy.requires_grad


def test_tokens_that_are_nearly_impossible_cost_no_numbers() -> None:
    hidden = torch.tensor([[300.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    logp, entropy = FusedHead.apply(hidden, weight, torch.tensor([1]), torch.ones(1), True)
    (logp + entropy).sum().backward()
    assert logp.item() == pytest.approx(-600.0)
    assert entropy.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_a_head_that_does_not_learn_costs_no_gradient() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    logp, _ = FusedHead.apply(hidden, weight, torch.tensor([1, 2, 3]), torch.ones(3), False)
    logp.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    learning = weight.clone().requires_grad_()
    again = hidden.detach().clone().requires_grad_()
    FusedHead.apply(again, learning, torch.tensor([1, 2, 3]), torch.ones(3), False)[0].sum().backward()
    assert torch.equal(again.grad, hidden.grad)
    assert learning.grad is not None
