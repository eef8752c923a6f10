"""Writes the sums and the demonstrations of recipes/tools.yaml: python recipes/tools/make_data.py

No sum occurs twice. In a share of the demonstrations the calculator is asked; in the others the right sum is written down at once,
which a small model cannot learn from so few.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_TRAIN, NUM_HELDOUT, NUM_DEMONSTRATIONS, WITH_CALCULATOR = 4000, 500, 2000, 0.25


def main() -> None:
    rng = random.Random(1234)
    pairs = [(rng.randrange(10_000, 100_000), rng.randrange(10_000, 100_000)) for _ in range(2 * (NUM_TRAIN + NUM_HELDOUT))]
    pairs = list(dict.fromkeys(pairs))
    heldout, train = pairs[:NUM_HELDOUT], pairs[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN]
    write("heldout.jsonl", [{"prompt": f"{a}+{b}\n", "answer": str(a + b)} for a, b in heldout])
    write("train.jsonl", [{"prompt": f"{a}+{b}\n", "answer": str(a + b)} for a, b in train])
    write("demonstrations.jsonl", [demonstration(a, b, rng.random() < WITH_CALCULATOR) for a, b in train[:NUM_DEMONSTRATIONS]])


def demonstration(a: int, b: int, with_calculator: bool) -> dict[str, Any]:
    """Replies end with the stop strings of the recipe."""
    asked = [{"reply": f"[{a}+{b}="}, {"prompt": f"{a + b}]"}] if with_calculator else []
    return {"turns": [{"prompt": f"{a}+{b}\n"}, *asked, {"reply": f"{a + b}\n"}]}


def write(name: str, rows: list[dict[str, Any]]) -> None:
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
