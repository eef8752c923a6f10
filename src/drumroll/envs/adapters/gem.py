"""Environments of GEM, by their names: `gem.make(id)`.

    env: {kind: gem, id: game:GuessTheNumber-v0-easy}

GEM draws from the global random generators of Python and numpy, so it runs in processes: each episode has the generators' states to
itself, and its task's seed alone decides what is drawn.

Refused: `math:`, `code:` and those of `eval:` that score in the same way, because they run or evaluate the model's text without a sandbox
(the rewards `math` and `code` judge such tasks); those of `rg:` whose answers reasoning-gym evaluates (use the env `reasoning_gym`);
observations that are not text.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np

from drumroll.envs.adapters import show
from drumroll.envs.base import Step, seed_of
from drumroll.envs.blocking import BlockingConfig, BlockingEnv
from drumroll.errors import PluginError
from drumroll.registry import nearest, register, require
from drumroll.types import Task

require("gem", extra="gem")

UNSAFE = ("gem.envs.math_env:", "gem.envs.math_visual_env:", "gem.envs.code_env:", "gem.envs.mcpmark:", "gem.envs.terminal.")
"""Where environments live that run or evaluate what the model writes."""
ROUNDING = 1e-6
"""Rewards for progress are fractions that add up to 1."""


@register.env("gem")
class Gem(BlockingEnv):
    """One episode of a GEM environment, from the task's seed."""

    class Config(BlockingConfig):
        kind: str = "gem"
        runs_in: Literal["process"] = "process"
        """GEM uses global state."""
        id: str
        """Name of the environment, for example `game:Sudoku-v0-easy`."""
        kwargs: dict[str, Any] = {}
        """Arguments for it, in place of those that its name stands for."""
        success_at: float = 1.0
        """The episode is a success when its rewards add up to at least this much."""
        chat: bool = True
        """Show observations as messages of the user, and not as plain text."""

    config: Config

    def begin(self, task: Task) -> Step:
        seed = seed_of(task)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self.env = _make(self.config.id, self.config.kwargs)
        observation, info = self.env.reset(seed=seed % 2**32)
        self.total = 0.0
        self.num_moves = 0
        self._keep_random_state()
        return show(_text(observation, info), chat=self.config.chat)

    def act(self, reply: str) -> Step:
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])
        observation, reward, terminated, truncated, info = self.env.step(reply)
        self._keep_random_state()
        self.total += float(reward)
        self.num_moves += 1
        metrics = {"moves": float(self.num_moves)}
        if terminated or truncated:
            success = self.total >= self.config.success_at - ROUNDING
            return Step(done=True, reward=float(reward), success=success, metrics=metrics)
        return show(_text(observation, info), chat=self.config.chat, reward=float(reward), metrics=metrics)

    def end(self) -> None:
        close = getattr(getattr(self, "env", None), "close", None)
        if close is not None:
            close()

    def _keep_random_state(self) -> None:
        self.states = random.getstate(), np.random.get_state()


def _make(env_id: str, kwargs: dict[str, Any]) -> Any:
    """The environment, where it is one that may be used."""
    import gem
    from gem.envs.registration import ENV_REGISTRY

    if env_id not in ENV_REGISTRY:
        raise PluginError(f"`env.id`: GEM has no environment '{env_id}'.{nearest(env_id, ENV_REGISTRY)}")
    entry_point = ENV_REGISTRY[env_id].entry_point
    where = entry_point if isinstance(entry_point, str) else f"{entry_point.__module__}:"
    if where.startswith(UNSAFE) or _is_evaluated(env_id):
        raise PluginError(
            f"`env.id`: GEM's '{env_id}' runs or evaluates the model's text without a sandbox. "
            f"Use the env `reasoning_gym`, or tasks from a file with the reward `math` or `code`."
        )
    return gem.make(env_id, **kwargs)


def _is_evaluated(env_id: str) -> bool:
    family, _, name = env_id.partition(":")
    if family != "rg":
        return False
    from drumroll.envs.adapters.reasoning_gym import FORMULAS, LISTS

    return name in LISTS | FORMULAS


def _text(observation: Any, info: dict[str, Any]) -> str:
    """What GEM shows at one turn: the observation, between the texts that go before and after it."""
    if not isinstance(observation, str):
        raise PluginError(f"GEM showed {type(observation).__name__}; only environments whose observations are text can be used")
    return "\n".join(part.rstrip("\n") for part in (info.get("prefix", ""), observation, info.get("suffix", "")) if part)
