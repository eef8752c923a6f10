"""Writes pairs of replies to the quickstart's task: four digits in order are preferred to the same digits out of order.

python recipes/preference_sort/make_data.py
"""

import json
import random
from pathlib import Path

SIZES = {"heldout": 256, "pairs": 1000}


def main() -> None:
    rng = random.Random(4321)
    prompts = [f"{number:04d}" for number in range(10_000) if len(set(f"{number:04d}")) > 1]
    rng.shuffle(prompts)
    for name, size in SIZES.items():
        rows = []
        for digits in prompts[:size]:
            chosen = rejected = "".join(sorted(digits))
            while rejected == chosen:
                rejected = "".join(rng.sample(digits, 4))
            rows.append({"prompt": f"{digits}=", "chosen": chosen, "rejected": rejected})
        prompts = prompts[size:]
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
