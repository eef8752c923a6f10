"""Where tensors lie in the host memory that they wait in."""

import pytest
import torch

from drumroll.backends import offload
from drumroll.backends.offload import Shelf


def test_tensors_lie_side_by_side_and_the_next_ones_take_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def page_locked(num_bytes: int) -> torch.Tensor:
        taken.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(offload, "SLAB_BYTES", 2**12)
    monkeypatch.setattr(offload, "_page_locked", page_locked)
    tensors = [torch.randn(10, 10), torch.randn(700), torch.arange(5), torch.randn(700), torch.randn(60, 2).to(torch.bfloat16)]
    tensors += [torch.randn(8, 16) for _ in range(9)]
    shelf = Shelf()
    addresses = []
    for _ in range(2):
        shelf.clear()
        placed = [shelf._place(tensor).copy_(tensor) for tensor in tensors]
        for tensor, copy in zip(tensors, placed, strict=True):
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy, tensor)
        addresses.append([copy.data_ptr() for copy in placed])
    assert addresses[0] == addresses[1]
    assert taken == [4096, 2800, 2800, 4096], "large ones have their own; no memory is taken twice"


def test_what_is_on_the_host_stays_where_it_is() -> None:
    tensor = torch.randn(3)
    assert Shelf().moved(tensor, torch.device("cpu")) is tensor
