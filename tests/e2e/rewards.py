"""A user's reward, named in configs by this file's path."""

from drumroll import Trajectory


def positions(trajectory: Trajectory, *, field: str = "answer") -> float:
    """Share of the answer's characters that stand where they belong."""
    wanted = str(trajectory.task.data[field])
    return sum(a == b for a, b in zip(trajectory.last_reply, wanted, strict=False)) / len(wanted)
