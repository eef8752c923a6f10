"""AdamW of what this rank holds of each tensor, in torch's one kernel for all of them.

`torch.optim.AdamW` calls the same kernel. It also imports torch's compiler, for half a second at the start of every trainer, works out anew
in every update how sharded tensors are sharded, and refuses those that are sharded over different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drumroll.backends.sharded import local


class AdamW:
    """Gradients → weights. `state` has of each weight that was updated its moments `exp_avg` and `exp_avg_sq`, and `step`, how often."""

    def __init__(self, parameters: Sequence[Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self._parameters = list(parameters)
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; weights without a gradient stay as they are."""
        learning = [parameter for parameter in self._parameters if parameter.grad is not None]
        for parameter in learning:
            if parameter not in self.state:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        for dtype in {parameter.dtype for parameter in learning}:
            alike = [parameter for parameter in learning if parameter.dtype == dtype]
            states = [self.state[parameter] for parameter in alike]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [local(parameter) for parameter in alike],
                [local(parameter.grad) for parameter in alike if parameter.grad is not None],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                steps,
                lr=lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=self._weight_decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )
