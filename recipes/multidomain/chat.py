"""Text prompts as messages of a chat, for models that were tuned for one: env: {kind: recipes/multidomain/chat.py, after: "Be brief."}"""

from drumroll import Task, register
from drumroll.envs.base import Env, EnvConfig, Step


@register.env("chat")
class Chat(Env):
    """Shows the task's text as the message of a user and is done after the first reply; the reward functions judge it."""

    class Config(EnvConfig):
        kind: str = "chat"
        after: str = ""
        """Added behind every prompt, on a line of its own."""

    config: Config
    needs_prompt = True

    async def start(self, task: Task) -> Step:
        text = f"{task.prompt}\n{self.config.after}" if self.config.after else task.prompt
        return Step(messages=[{"role": "user", "content": text}])

    async def step(self, reply: str) -> Step:
        return Step(done=True)
