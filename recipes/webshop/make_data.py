"""Writes the demonstrations of recipes/webshop.yaml: python recipes/webshop/make_data.py

The buyer of the demonstrations slips: a poor search, a wrong product, an option that is forgotten or wrong. Goals are numbered; those
that the recipe is evaluated on are in neither the demonstrations nor the training.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drumroll.envs.webshop import WebShop, expert_episode

ENV = {"kind": "webshop", "chat": False, "rules": False, "tag": None, "page_size": 5, "max_steps": 12}
NUM_DEMONSTRATIONS, DETOUR = 4000, 0.45


def main() -> None:
    config = WebShop.Config.model_validate(ENV)
    episodes = [expert_episode(config, seed, detour=DETOUR) for seed in range(NUM_DEMONSTRATIONS)]
    table = pa.Table.from_pylist([episode.row for episode in episodes])
    pq.write_table(table, Path(__file__).with_name("demonstrations.parquet"), compression="zstd")
    print(f"{len(episodes)} demonstrations, of which {sum(episode.success for episode in episodes)} buy exactly what is asked for")


if __name__ == "__main__":
    main()
