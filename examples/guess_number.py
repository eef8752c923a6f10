"""Your own environment: a small class, built anew for every episode.

plugins: [./examples/guess_number.py]
env: {kind: guess_number, high: 9}
rollout: {max_turns: 3}
"""

from drumroll import Task, register
from drumroll.envs.base import Env, EnvConfig, Step


@register.env("guess_number")
class GuessNumber(Env):
    """Guess the task's number in a few turns; each answer says which way to go."""

    class Config(EnvConfig):
        kind: str = "guess_number"
        high: int = 9
        """Largest number that the model may be asked for."""

    config: Config

    async def start(self, task: Task) -> Step:
        self.answer = int(task.data["answer"])
        return Step(prompt=f"0-{self.config.high}?")

    async def step(self, reply: str) -> Step:
        guess = reply.strip()
        if not guess.isdigit():
            return Step(prompt="number!", reward=-0.1, metrics={"invalid": 1.0})
        if int(guess) == self.answer:
            return Step(done=True, reward=1.0, success=True)
        return Step(prompt="more!" if int(guess) < self.answer else "less!", success=False)
