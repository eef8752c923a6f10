"""The score of a reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from drumroll.config.models import RewardConfig
from drumroll.registry import register
from drumroll.rewards.markers import defuse
from drumroll.rewards.place import Place, ScoreModel, Scorer
from drumroll.types import Message, Trajectory


@register.reward("reward_model", seat="device")
class RewardModel:
    """`scale` × the score that a reward model gives + `offset`; with `squash`, the sigmoid of that.

    The model sees a conversation where the task's prompt is chat messages and there is one reply, and the whole text otherwise.
    """

    class Config(RewardConfig):
        """Options of the reward model."""

        model: ScoreModel
        """The model, for example `{path: org/name}`."""
        scale: float = 1.0
        """Factor of the score."""
        offset: float = 0.0
        """Added to the scaled score."""
        squash: bool = False
        """Map the result into 0 to 1 by the sigmoid: a score is the log-odds of a good reply for models trained on comparisons."""

    concurrency = 256  # what waits together is computed together

    def __init__(self, config: Config) -> None:
        self.config = config
        self._scorer: Scorer | None = None

    async def start(self, place: Place) -> None:
        """Load the model."""
        assert place.open_scorer is not None, "a reward model was placed where there are no devices"
        self._scorer = await place.open_scorer(self.config.model)

    async def __call__(self, trajectory: Trajectory) -> float:
        assert self._scorer is not None, "`start` comes before the first sample"
        value = self.config.scale * await self._scorer.score(subject_of(trajectory)) + self.config.offset
        return 0.5 * (1.0 + math.tanh(0.5 * value)) if self.config.squash else value  # the sigmoid, in a form that cannot overflow


def subject_of(trajectory: Trajectory) -> Sequence[Message] | str:
    """What the model scores. Control tokens that the policy spelled out are broken up: they must not end its own message."""
    messages = trajectory.task.messages
    if messages is not None and sum(turn.author == "policy" for turn in trajectory.turns) == 1:
        return [*messages, {"role": "assistant", "content": defuse(trajectory.last_reply)}]
    return "".join(defuse(turn.text) if turn.author == "policy" else turn.text for turn in trajectory.turns)
