"""Your own reward: one plain function. Its keyword-only arguments are its options in YAML.

    rewards:
      - kind: ./examples/vowel_reward.py:vowels
        target: 3

or from Python, as at the bottom of this file: `python examples/vowel_reward.py`.
"""

import drumroll


def vowels(trajectory: drumroll.Trajectory, *, target: int = 4) -> float:
    """Share of the wanted number of vowels that the reply has."""
    found = sum(letter in "aeiou" for letter in trajectory.last_reply)
    return min(found, target) / target


if __name__ == "__main__":
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    run = drumroll.train(
        model={"scratch": {"characters": "abcdefghijklmnop ", "config": sizes}},
        tasks=[{"prompt": letter} for letter in "bcdfghjk"],
        heldout=[{"prompt": letter} for letter in "lmnp"],
        reward=vowels,
        max_steps=15,
        rollout={"groups_per_step": 8, "group_size": 16, "sampling": {"max_new_tokens": 6}},
        trainer={"lr": 1e-2},
    )
    print(f"reward on new prompts: {run.summary['before']['sampled']:.2f} → {run.summary['after']['sampled']:.2f}")
