"""Run by chaos.py in a process of its own: a run on a Ray cluster of two nodes, one of which is lost. Prints a JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sabotage import Scene, sabotaged

from tiny import tiny_tree  # isort: skip
from two_nodes import two_nodes  # isort: skip


def main(folder: Path) -> None:
    with two_nodes() as (simulated, other):

        def plan(scene: Scene) -> None:
            scene.await_step(3)
            simulated.remove_node(other, allow_graceful=False)

        changes = {
            "run_dir": str(folder / "run"),
            "ray": {"address": simulated.address},
            "devices": {"actor_train": 0, "actor_infer": [0, 2]},
            "rollout": {"num_env_workers": 2},
            "warmup": None,
            "data": {"heldout": None},
            "max_steps": 1000,  # Ray takes a quarter of a minute to believe that a node is gone
            "trainer": {"lr": 1e-5},  # or a policy that has settled on one reply soon has nothing to learn from any more
        }
        outcome = sabotaged(tiny_tree(folder, **changes), plan)
    outcome.check_samples(6, 4)
    kinds = [line["kind"] for line in outcome.incidents]
    print(json.dumps({"steps": len(outcome.weights), "incidents": kinds, "holds": "worker given up" in kinds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
