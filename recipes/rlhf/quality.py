"""The hidden quality of an invented name. It labels the pairs and is reported; nothing that is trained ever sees it.

A prompt is three consonants, for example `kdr=`, and a reply is a name: `kidora`.
"""

from itertools import pairwise

from drumroll import Trajectory

VOWELS, CONSONANTS = "aeiou", "bdfgklmnprst"
LENGTH = 7


def quality(prompt: str, name: str) -> float:
    """Up to 6: 3 for the prompt's letters, 2 for vowels and consonants in turns, 1 for no letter twice; less 0.4 for each letter too few
    or too many."""
    wanted = prompt.rstrip("=")
    used = sum(letter in name for letter in wanted) / len(wanted)
    neighbours = [(left in VOWELS) != (right in VOWELS) for left, right in pairwise(name)]
    flow = sum(neighbours) / len(neighbours) if neighbours else 0.0
    variety = len(set(name)) / len(name) if name else 0.0
    return 3.0 * used + 2.0 * flow + variety - 0.4 * abs(len(name) - LENGTH)


def gold(trajectory: Trajectory) -> float:
    """The quality of a reply, as a reward of weight 0: reported, and no part of the sum."""
    assert trajectory.task.prompt is not None, "the tasks of this recipe are texts"
    return quality(trajectory.task.prompt, trajectory.last_reply)
