"""Writes the maps (as seeds) and the demonstrations of recipes/frozen_lake.yaml: python recipes/frozen_lake/make_data.py

No map of heldout.jsonl occurs in train.jsonl or in the demonstrations. The expert of the demonstrations makes a detour in a share of
its moves, so that four of ten reach the goal in time.
"""

from __future__ import annotations

import json
from pathlib import Path

from drumroll.envs.experts import expert_episode
from drumroll.envs.frozen_lake import random_map

HERE = Path(__file__).parent
ENV = {"chat": False, "rules": False, "tag": None, "moves": ["U", "D", "L", "R"], "max_moves": 10}
NUM_TRAIN, NUM_HELDOUT, NUM_DEMONSTRATIONS, DETOUR = 4000, 256, 800, 0.35


def main() -> None:
    seen: set[tuple[str, ...]] = set()
    heldout: list[int] = []
    for seed in range(1_000_000, 1_100_000):
        rows = random_map(seed, 4, 0.2, False)
        if rows not in seen and len(heldout) < NUM_HELDOUT:
            seen.add(rows)
            heldout.append(seed)
    train = [seed for seed in range(100_000) if random_map(seed, 4, 0.2, False) not in seen][:NUM_TRAIN]
    write("heldout.jsonl", [{"seed": seed} for seed in heldout])
    write("train.jsonl", [{"seed": seed} for seed in train])
    episodes = [expert_episode("frozen_lake", ENV, seed, detour=DETOUR, max_turns=10) for seed in train[:NUM_DEMONSTRATIONS]]
    write("demonstrations.jsonl", [episode.row for episode in episodes if episode])


def write(name: str, rows: list[dict]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
