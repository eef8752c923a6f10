"""Float32 masters of a single rank's weights, where passes compute in narrower numbers.

    passes ── gradients, narrow ──► added up in float32 ──► optimizer ──► masters ── rounded ──► weights of the next passes

Several ranks have their masters sharded, by FSDP2. For one alone that would only cost time: it has nothing to gather or to reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn


class Masters:
    """Makes a model compute in `dtype`, and holds what it learns in float32.

    masters = Masters(model, torch.bfloat16)
    optimizer = AdamW(masters.all)
    loss.backward()                          # fills the masters' gradients, not the model's
    optimizer.step(); masters.spread()
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, exact: nn.Module | None = None) -> None:
        """The model is in float32, on its device. Its module `exact` goes on to compute in float32."""
        self._of: dict[int, nn.Parameter] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.all: list[nn.Parameter] = []
        untouched = {id(parameter) for parameter in exact.parameters()} if exact is not None else set()
        if exact is not None:
            exact.register_forward_pre_hook(lambda _, inputs: tuple(value.float() for value in inputs))
        for parameter in model.parameters():
            if id(parameter) in untouched:
                self.all.append(parameter)
                continue
            master = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.to(dtype)
            self._of[id(parameter)] = master
            self._pairs.append((parameter, master))
            self.all.append(master)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))  # type: ignore[no-untyped-call]

    def of(self, parameter: Tensor) -> Tensor:
        """The master of one of the model's parameters; another tensor, such as a buffer, is its own."""
        return self._of.get(id(parameter), parameter)

    @torch.no_grad()
    def spread(self) -> None:
        """The model computes with what the masters are now."""
        narrow, masters = zip(*self._pairs, strict=True)
        torch._foreach_copy_(narrow, masters)

    def to(self, where: Literal["device", "host"], move: Callable[[Tensor], Tensor]) -> None:
        """`move` every master, and its gradient if there is one. What the model computes with is let go, and made anew on the device."""
        for narrow, master in self._pairs:
            master.data = move(master.data)
            if master.grad is not None:
                master.grad.data = move(master.grad.data)
            narrow.data = master.data.to(narrow.dtype) if where == "device" else narrow.data.new_empty(0)


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a pass's gradient to those before it."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None
