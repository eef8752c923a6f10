"""Run by chaos.py in a process of its own: a run on a Ray cluster of two nodes, one of which is lost. Prints a JSON line."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ray.cluster_utils import Cluster as SimulatedCluster
from sabotage import Scene, sabotaged

from tiny import tiny_tree  # isort: skip


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="lose-node-") as temporary:
        os.environ["RAY_TMPDIR"] = temporary  # where the simulation notes its address; it expects the folder to exist
        os.mkdir(f"{temporary}/ray")
        head = {"num_cpus": 2, "include_dashboard": False, "temp_dir": f"{temporary}/a"}
        simulated = SimulatedCluster(initialize_head=True, head_node_args=head)
        try:
            other = simulated.add_node(num_cpus=2, temp_dir=f"{temporary}/b")

            def plan(scene: Scene) -> None:
                scene.await_step(3)
                simulated.remove_node(other, allow_graceful=False)

            changes = {
                "run_dir": str(folder / "run"),
                "ray": {"address": simulated.address},
                "devices": {"actor_train": 0, "actor_infer": [0, 2]},  # devices 0 and 1 are the head's, 2 and 3 the other node's
                "rollout": {"num_env_workers": 2},
                "warmup": None,
                "data": {"heldout": None},
                "max_steps": 200,
            }
            outcome = sabotaged(tiny_tree(folder, **changes), plan)
        finally:
            simulated.shutdown()
    outcome.check_samples(6, 4)
    kinds = [line["kind"] for line in outcome.incidents]
    print(json.dumps({"steps": len(outcome.weights), "incidents": kinds, "holds": "worker given up" in kinds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
