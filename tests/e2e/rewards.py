"""A user's rewards and filter, named in configs by this file's path."""

from drumroll import Trajectory
from drumroll.types import Group


def positions(trajectory: Trajectory, *, field: str = "answer") -> float:
    """Share of the answer's characters that stand where they belong."""
    wanted = str(trajectory.task.data[field])
    return sum(a == b for a, b in zip(trajectory.last_reply, wanted, strict=False)) / len(wanted)


def brevity(trajectory: Trajectory) -> float:
    """Less for every token."""
    return -0.1 * trajectory.num_new_tokens


def odd_places(group: Group) -> bool:
    """Rejects every other group of its round."""
    return int(group.group_id[-1]) % 2 == 1
