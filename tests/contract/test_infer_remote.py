"""What drumroll does around another package's engine, whichever it is, shown with a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_driver import Driver, ask, make_model, tensors
from package_engine import Counting

from drumroll.backends.checksum import checksum
from drumroll.cluster.host import wrap_error
from drumroll.config.models import EngineConfig
from drumroll.errors import DeviceMemoryError, WeightSyncError, WorkerError
from drumroll.types import RankInfo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


@contextmanager
def counting(folder: Path, **options: int) -> Iterator[tuple[Driver, Counting]]:
    backend = Counting(EngineConfig(**options), folder, "float32")  # type: ignore[arg-type]
    backend.setup(RankInfo("actor_infer", 0, 1, "cpu"))
    driver = Driver(backend, folder)
    try:
        driver.start()
        yield driver, backend
    finally:
        driver.close()
    assert backend.told[-1] == "shut"


def test_requests_versions_and_refusals(folder: Path) -> None:
    with counting(folder, num_slots=2) as (driver, backend):
        first, tired = driver.generate(ask("a", [10], max_new_tokens=3), ask("t", [28], seed=30))
        assert (first.token_ids, first.logp, first.finishes) == ([11, 12, 13], [-1.0] * 3, ["length"])
        assert (tired.token_ids, tired.finishes) == ([29, 30], ["error"])
        assert "Counting ended it for a reason of its own: tired" in tired.error
        driver.submit(*(ask(f"{i}", [5], max_new_tokens=200, stop_token_ids=()) for i in range(3)))
        driver.until(lambda: "0" in driver.replies, wait_s=0.01)
        load = driver.backend.load()
        assert (load.num_running, load.num_waiting) == (2, 1)
        sums = driver.update(1, cache="recompute")
        assert sums == {name: checksum(tensor) for name, tensor in tensors(folder).items()}
        assert backend.told[-3:] == ["stand still", "forget", "go on"]
        driver.until(lambda: 1 in driver.replies["0"].token_version, wait_s=0.01)
        assert driver.replies["0"].logp[-1] == -2.0
        driver.backend.abort(["0", "1", "2"])
        assert [reply.finishes for reply in driver.gather("012")] == [["aborted"]] * 3
        assert driver.do(backend.take_peak_bytes()) == 7
        assert driver.do(backend.take_peak_bytes()) == 0


def test_weights_that_do_not_all_arrive_keep_it_out_of_service(folder: Path) -> None:
    with counting(folder) as (driver, _):
        weights = tensors(folder)
        weights.pop(next(iter(weights)))
        with pytest.raises(WeightSyncError, match="did not arrive"):
            driver.update(1, weights)
        assert driver.backend.load().paused
        with pytest.raises(WeightSyncError):
            driver.do(driver.backend.resume())
        driver.update(1)
        assert driver.generate(ask("r", [10], max_new_tokens=1))[0].token_version == [1]


def test_an_engine_that_dies_says_so(folder: Path) -> None:
    with counting(folder) as (driver, backend):
        driver.submit(ask("r", [5], max_new_tokens=200, stop_token_ids=()))
        driver.until(lambda: "r" in driver.replies, wait_s=0.01)
        backend.died = True
        assert "the Counting engine stopped: ConnectionError" in driver.gather(["r"])[0].error
        with pytest.raises(WorkerError, match="the Counting engine stopped"):
            driver.update(1)


def test_a_package_that_finds_no_memory_at_the_start(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "too-large")
    with pytest.raises(WorkerError, match="Counting did not start: RuntimeError: CUDA out of memory") as caught:
        Counting(EngineConfig(), folder, "float32").setup(RankInfo("actor_infer", 0, 1, "cpu"))
    error = wrap_error(caught.value, "actor_infer rank 0", "drumroll.workers.engine:EngineWorker", "actor_infer", 0)
    assert isinstance(error, DeviceMemoryError)
    assert error.stage == "start"
