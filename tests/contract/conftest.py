"""What the suites over every registered training backend share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumroll.backends.train.base import TrainBackend
from drumroll.registry import REGISTRY


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from test_train_backends import make_models

    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=REGISTRY.names("train_backend"))
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., TrainBackend]]:
    from test_train_backends import make_backend

    opened: list[TrainBackend] = []

    def build(folder: Path, **options: Any) -> TrainBackend:
        opened.append(make_backend(request.param, folder, **options))
        return opened[-1]

    yield build
    for backend in opened:
        backend.close()
