"""Writes the data of recipes/rlhf.py: python recipes/rlhf/make_data.py

Names come from writers of every skill, from careless to good. Of two names for a prompt, the better one is preferred only more often:
with probability σ(SHARPNESS × difference of quality), as Bradley and Terry have it. Held-out prompts occur nowhere else.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

from quality import CONSONANTS, LENGTH, VOWELS, quality

HERE = Path(__file__).parent
NUM_HELDOUT, NUM_DEMONSTRATIONS, NUM_PAIRS, NUM_HELDOUT_PAIRS = 240, 4000, 6000, 960
SHARPNESS = 2.0


def main() -> None:
    rng = random.Random(2024)
    prompts = ["".join(letters) + "=" for letters in itertools.permutations(CONSONANTS, 3)]
    rng.shuffle(prompts)
    held, known = prompts[:NUM_HELDOUT], prompts[NUM_HELDOUT:]
    write("train", [{"prompt": prompt} for prompt in known])
    write("heldout", [{"prompt": prompt} for prompt in held])
    write("demonstrations", [{"prompt": prompt, "completion": invent(prompt, rng)} for prompt in rng.choices(known, k=NUM_DEMONSTRATIONS)])
    write("pairs", [compare(prompt, rng) for prompt in rng.choices(known, k=NUM_PAIRS)])
    write("heldout_pairs", [compare(prompt, rng) for prompt in rng.choices(held, k=NUM_HELDOUT_PAIRS)])


def invent(prompt: str, rng: random.Random) -> str:
    """A name by a writer whose skill is drawn anew: with much of it, of the right length, with the prompt's letters, and easy to say."""
    skill = 0.9 * rng.random()
    length = min(max(round(rng.gauss(LENGTH, 0.5 + 3.0 * (1.0 - skill))), 2), 12)
    wanted, name, is_vowel = rng.sample(prompt[:3], 3), "", rng.random() < 0.3
    while len(name) < length:
        letter = rng.choice(VOWELS if is_vowel else CONSONANTS)
        if not is_vowel and wanted and rng.random() < skill:
            letter = wanted.pop()
        name += letter
        is_vowel = not is_vowel if rng.random() < 0.4 + 0.6 * skill else rng.random() < 0.5
    return name


def compare(prompt: str, rng: random.Random) -> dict[str, str]:
    """Two different names and a label with noise."""
    first, second = invent(prompt, rng), invent(prompt, rng)
    while second == first:
        second = invent(prompt, rng)
    if rng.random() > 1.0 / (1.0 + math.exp(SHARPNESS * (quality(prompt, second) - quality(prompt, first)))):
        first, second = second, first
    return {"prompt": prompt, "chosen": first, "rejected": second}


def write(name: str, rows: list[dict[str, str]]) -> None:
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
