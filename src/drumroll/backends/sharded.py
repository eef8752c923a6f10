"""Tensors of which every rank holds a part (torch's `DTensor`).

Whoever checks a config looks a trainer's options up, and need not wait the half second that torch's module for such tensors takes: where
nobody has imported it, there are none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if is_sharded(tensor) else tensor
