"""Writes the levels (as seeds) and the demonstrations of recipes/sokoban.yaml: python recipes/sokoban/make_data.py

No level of heldout.jsonl occurs in train.jsonl, from which the demonstrations are. Their expert waits in six of ten turns and makes a
detour in one in five of the others, so that 23 % solve their level in time.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drumroll.envs.experts import expert_episode
from drumroll.envs.sokoban.generator import Design, generate

HERE = Path(__file__).parent
ENV = {"chat": False, "rules": False, "tag": None, "moves": ["U", "D", "L", "R"], "show": "coordinates", "wait": "W", "max_moves": 14}
DESIGN = Design(6, 6, 1, 0.15, 30, 2)
NUM_TRAIN, NUM_HELDOUT = 8000, 256
DETOUR, HESITATION = 0.2, 0.6


def main() -> None:
    heldout = {generate(seed, DESIGN): seed for seed in range(1_000_000, 1_000_400)}
    held = dict(list(heldout.items())[:NUM_HELDOUT])
    train = [seed for seed in range(NUM_TRAIN + 500) if generate(seed, DESIGN) not in held][:NUM_TRAIN]
    write("heldout.jsonl", [{"seed": seed} for seed in held.values()])
    write("train.jsonl", [{"seed": seed} for seed in train])
    solver = partial(expert_episode, "sokoban", ENV, detour=DETOUR, hesitation=HESITATION, max_turns=ENV["max_moves"])
    episodes = [episode for seed in train if (episode := solver(seed))]
    pq.write_table(pa.Table.from_pylist([episode.row for episode in episodes]), HERE / "demonstrations.parquet", compression="zstd")
    print(f"{len(episodes)} demonstrations, of which {sum(episode.success for episode in episodes)} solve their level")


def write(name: str, rows: list[dict]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
