"""Writes the quickstart's tasks: sort four digits. Held-out tasks, demonstrations and training tasks share no prompt.

python recipes/sort_digits/make_data.py
"""

import json
import random
from pathlib import Path

SIZES = {"heldout": 512, "demonstrations": 96, "train": 3000}


def main() -> None:
    prompts = [f"{number:04d}" for number in range(10_000)]
    random.Random(1234).shuffle(prompts)
    for name, size in SIZES.items():
        answer_field = "completion" if name == "demonstrations" else "answer"
        rows = [{"prompt": f"{digits}=", answer_field: "".join(sorted(digits))} for digits in prompts[:size]]
        prompts = prompts[size:]
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
