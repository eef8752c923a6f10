"""Ray's ways of saying that a worker is gone for good: each of them is a `WorkerLost`, so that nobody waits for it to come back."""

import pytest
from ray.exceptions import ActorDiedError, LocalRayletDiedError, NodeDiedError, OutOfMemoryError, RaySystemError, WorkerCrashedError

from drumroll.cluster.cluster import _as_ours
from drumroll.errors import WorkerError, WorkerLost


@pytest.mark.parametrize(
    "error", [ActorDiedError(), NodeDiedError("gone"), LocalRayletDiedError(), WorkerCrashedError(), OutOfMemoryError("killed")]
)
def test_a_worker_that_is_gone_is_lost(error: Exception) -> None:
    ours = _as_ours(error, "environment rank 0", "poll")
    assert isinstance(ours, WorkerLost)
    assert str(ours).startswith("environment rank 0: ")


def test_memory_is_named_as_the_reason_and_rays_policies_are_left_out() -> None:
    words = "6 worker(s) were killed. Memory was 11 GB used / 23 GB limit\nOOM kill reason: Memory usage exceeded. Ray killed 6 worker(s) …"
    ours = str(_as_ours(OutOfMemoryError(words), "environment rank 0", "poll"))
    assert "ran out of memory. 6 worker(s) were killed. Memory was 11 GB used / 23 GB limit. Free some" in ours
    assert "policy" not in ours


def test_other_trouble_of_ray_is_no_loss() -> None:
    ours = _as_ours(RaySystemError("busy"), "environment rank 0", "poll")
    assert isinstance(ours, WorkerError)
    assert not isinstance(ours, WorkerLost)
