"""Run by test_cluster.py in a process of its own: a Ray cluster of two nodes on one machine, joined by address."""

from __future__ import annotations

import json

from two_nodes import two_nodes

from drumroll.cluster.cluster import Cluster
from drumroll.cluster.session import Session
from drumroll.cluster.weights import WeightSync
from drumroll.config.models import RayConfig
from drumroll.plan import Device, Placement
from drumroll.types import Version


def main() -> None:
    with two_nodes(num_cpus=3, labels={"gpu": "L40S"}) as (simulated, _):
        print(json.dumps(join(simulated.address)))


def join(address: str) -> dict[str, object]:
    with Session(RayConfig(address=address, start_timeout_s=60)) as session:
        pool = session.pool()
        here, there = (node.id for node in pool.nodes)

        def launch(role: str, nodes: list[str], target: str) -> Cluster:
            places = [Placement(role, rank, node, (Device(rank, node, 0, "cpu"),), "cpu") for rank, node in enumerate(nodes)]  # type: ignore[arg-type]
            return Cluster.launch(session, places, f"cluster_weight_workers:{target}")

        trainers = launch("actor_train", [here], "Trainer")
        engines = launch("actor_infer", [here, there], "Engine")
        report = WeightSync(trainers, engines, deadline_s=60).push(Version(0, 1))
        return {
            "slots": [node.num_devices for node in pool.nodes],
            "labels": [dict(node.labels) for node in pool.nodes],
            "transports": list(report.transports.values()),
            "apart": engines.handles[0].node == here and engines.handles[1].node == there,
            "matches": engines.all("matches", 0),
        }


if __name__ == "__main__":
    main()
