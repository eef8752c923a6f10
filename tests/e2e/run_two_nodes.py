"""Run by test_nodes.py in a process of its own: the tiny run on a Ray cluster of two nodes with separate temporary folders."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster as SimulatedCluster
from tiny import run_tiny

from drumroll.cluster.weights import SyncReport, WeightSync
from drumroll.types import Version


def main(folder: Path) -> None:
    reports: list[SyncReport] = []
    push = WeightSync.push

    def noted(sync: WeightSync, version: Version, **kwargs: Any) -> SyncReport:
        reports.append(push(sync, version, **kwargs))
        return reports[-1]

    WeightSync.push = noted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as temporary:
        os.environ["RAY_TMPDIR"] = temporary  # where the simulation notes its address; it expects the folder to exist
        os.mkdir(f"{temporary}/ray")
        head = {"num_cpus": 2, "include_dashboard": False, "temp_dir": f"{temporary}/a"}
        simulated = SimulatedCluster(initialize_head=True, head_node_args=head)
        try:
            simulated.add_node(num_cpus=2, temp_dir=f"{temporary}/b")
            # Devices 0 and 1 are the head's, 2 and 3 the other node's.
            devices = {"actor_train": 0, "actor_infer": [0, 2]}
            run_tiny(folder, ray={"address": simulated.address}, devices=devices, warmup={"compare": False})
        finally:
            simulated.shutdown()
    print(json.dumps([list(report.transports.values()) for report in reports]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
