"""Whether an update brings every tensor of a model: each exactly once, under any of its names, in its own shape."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from drumroll.errors import WeightSyncError
from drumroll.registry import nearest


class Checklist:
    """What has arrived of one version.

    checklist = Checklist(dict(model.named_parameters(remove_duplicate=False)))
    target = checklist.tick(name, tensor)     # for each that arrives
    checklist.complete()
    """

    def __init__(self, targets: Mapping[str, Tensor], optional: frozenset[str] = frozenset()) -> None:
        """`optional` ones need not come."""
        self.targets = targets
        self.optional = optional
        self._taken: dict[int, str] = {}

    def tick(self, name: str, tensor: Tensor) -> Tensor:
        """The model's own tensor of that name."""
        target = self.targets.get(name)
        if target is None:
            raise WeightSyncError(f"'{name}' is no tensor of the model.{nearest(name, self.targets)}")
        if target.shape != tensor.shape:
            raise WeightSyncError(f"'{name}' arrived with shape {tuple(tensor.shape)}, expected {tuple(target.shape)}.")
        if id(target) in self._taken:
            raise WeightSyncError(f"'{name}' arrived a second time (first as '{self._taken[id(target)]}').")
        self._taken[id(target)] = name
        return target

    @property
    def arrived(self) -> list[str]:
        """Names of what has arrived, in that order."""
        return list(self._taken.values())

    def complete(self) -> None:
        """Raise unless everything has arrived."""
        missing = [name for name, target in self.targets.items() if id(target) not in self._taken and name not in self.optional]
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of the model's tensors did not arrive: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}"
            )
