"""The reply must be the answer."""

from __future__ import annotations

from drumroll.registry import register
from drumroll.rewards.extract import Extraction
from drumroll.rewards.extract import extract as extract_answer
from drumroll.types import Trajectory


@register.reward("exact_match")
def exact_match(
    trajectory: Trajectory, *, field: str = "answer", extract: Extraction = "reply", strip: bool = True, ignore_case: bool = False
) -> float:
    """1.0 when the last reply equals the task's answer, else 0.0.

    Options:
        field: Column of the answer.
        extract: Which part of the reply is compared (see `drumroll.rewards.extract`); `reply` is all of it.
        strip: Ignore space around both.
        ignore_case: Ignore the case of letters.
    """
    reply, answer = extract_answer(trajectory.last_reply, extract), str(trajectory.task.data[field])
    if reply is None:
        return 0.0
    if strip:
        reply, answer = reply.strip(), answer.strip()
    if ignore_case:
        reply, answer = reply.casefold(), answer.casefold()
    return float(reply == answer)
