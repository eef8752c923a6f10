"""A Ray cluster of two nodes with separate temporary folders, simulated on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.cluster_utils import Cluster as SimulatedCluster


@contextmanager
def two_nodes(**second: Any) -> Iterator[tuple[SimulatedCluster, Any]]:
    """The cluster and its second node. Devices 0 and 1 are the first node's; `second` are options of the other, two processors unless it
    says something else."""
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as folder:
        os.environ["RAY_TMPDIR"] = folder  # where the simulation notes its address; it expects the folder to exist
        os.mkdir(f"{folder}/ray")
        head = {"num_cpus": 2, "include_dashboard": False, "temp_dir": f"{folder}/a"}
        simulated = SimulatedCluster(initialize_head=True, head_node_args=head)
        try:
            yield simulated, simulated.add_node(**{"num_cpus": 2, "temp_dir": f"{folder}/b", **second})
        finally:
            simulated.shutdown()
