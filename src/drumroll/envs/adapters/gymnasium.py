"""Environments of Gymnasium whose observations and actions are text, or can be told as text.

    env:
      kind: gymnasium
      id: FrozenLake-v1
      kwargs: {is_slippery: false}
      observe: ansi
      actions: {Left: 0, Down: 1, Right: 2, Up: 3}
      success_at: 1.0

Refused: observations that are neither a Text space nor told by `observe`; actions that are neither a Text space nor named by `actions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from drumroll.envs.actions import ActionConfig, read_actions
from drumroll.envs.adapters import show
from drumroll.envs.base import Step, seed_of
from drumroll.envs.blocking import BlockingConfig, BlockingEnv
from drumroll.errors import PluginError
from drumroll.registry import import_plugin, nearest, register, require
from drumroll.types import Task

require("gymnasium", extra="gym")

if TYPE_CHECKING:
    import gymnasium

Observe = Callable[["gymnasium.Env[Any, Any]", Any], str]

_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLORED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def check_observe(how: str) -> str:
    """The way itself, where there is such a way to tell an observation; else a ValueError."""
    if how not in ("text", "ansi"):
        try:
            observe_function(how)
        except PluginError as error:
            raise ValueError(str(error)) from error
    return how


def observe_function(path: str) -> Observe:
    """The user's function behind `./file.py:function` or `package.module:function`."""
    place, colon, name = path.rpartition(":")
    if not colon:
        raise PluginError(f"no way to observe is called '{path}'. Known: text, ansi, './file.py:function', 'package.module:function'.")
    module = import_plugin(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise PluginError(f"'{path}': there is no function '{name}'.{nearest(name, vars(module))}")
    told: Observe = function
    return told


@register.env("gymnasium")
class Gymnasium(BlockingEnv):
    """One episode of a Gymnasium environment, from the task's seed."""

    class Config(BlockingConfig, ActionConfig):
        kind: str = "gymnasium"
        id: str
        """Name of the environment, for example `FrozenLake-v1`. `module:Name-v0` imports a module that registers it."""
        kwargs: dict[str, Any] = {}
        """Arguments for it."""
        observe: Annotated[str, AfterValidator(check_observe)] = "text"
        """How an observation is told. `text`: it is text itself. `ansi`: as the environment renders itself in a terminal; what is
        coloured there is written `{red:F}`. `./file.py:function`: your function of the environment and the observation."""
        actions: dict[str, Any] | None = None
        """Names of the actions → what the environment takes for them, for example `{Left: 0, Right: 1}`. null: actions are text."""
        rules: str = ""
        """Shown before the first observation."""
        chat: bool = True
        """Show observations as messages of the user, and not as plain text."""
        success_at: float | None = None
        """The episode is a success when its last move's reward is at least this much. Where the environment's `info` says `success` or
        `is_success`, that counts instead."""

    config: Config

    def begin(self, task: Task) -> Step:
        import gymnasium

        render = {"render_mode": "ansi"} if self.config.observe == "ansi" else {}
        try:
            self.env = gymnasium.make(self.config.id, disable_env_checker=True, **render, **self.config.kwargs)
        except gymnasium.error.Error as error:
            raise PluginError(
                f"`env.id: {self.config.id}`: {error} If it is yours, list the module that registers it under `plugins`."
            ) from error
        self._check_spaces()
        self.num_moves = self.num_invalid = self.num_malformed = 0
        observation, _ = self.env.reset(seed=seed_of(task))
        board = self._tell(observation)
        return show(f"{self.config.rules}\n\n{board}" if self.config.rules else board, chat=self.config.chat, state=board)

    def act(self, reply: str) -> Step:
        reading = read_actions(reply, self.config)
        reward, notes = 0.0, []
        if reading.problem:
            self.num_malformed += 1
            reward -= self.config.format_penalty
            notes.append(reading.problem)
        for name in reading.actions:
            action = self._action(name)
            if action is None:
                self.num_invalid += 1
                notes.append(f"'{name}' is no action here; nothing was done.")
                continue
            self.num_moves += 1
            self.observation, given, terminated, truncated, info = self.env.step(action)
            reward += float(given)
            if terminated or truncated:
                return Step(done=True, reward=reward, success=self._success(info, float(given)), metrics=self._metrics())
        board = self._tell(self.observation)
        return show("\n".join([*notes, board]), chat=self.config.chat, state=board, reward=reward, metrics=self._metrics())

    def end(self) -> None:
        if hasattr(self, "env"):
            self.env.close()

    def _tell(self, observation: Any) -> str:
        self.observation = observation
        match self.config.observe:
            case "text":
                text: Any = observation
            case "ansi":
                text = self.env.render()
                text = plain(text) if isinstance(text, str) else text
            case path:
                text = observe_function(path)(self.env, observation)
        if not isinstance(text, str):
            raise PluginError(
                f"`env.observe: {self.config.observe}` of {self.config.id} gave {type(text).__name__}; text was expected. "
                f"Name a function that tells the observation, as './file.py:function'."
            )
        return text

    def _action(self, name: str) -> Any:
        """What the environment takes for a name; None where it takes nothing for it."""
        if self.config.actions is not None:
            return self.config.actions.get(name)
        return name if self.env.action_space.contains(name) else None

    def _success(self, info: dict[str, Any], reward: float) -> bool | None:
        for key in ("success", "is_success"):
            if key in info:
                return bool(info[key])
        return None if self.config.success_at is None else reward >= self.config.success_at

    def _metrics(self) -> dict[str, float]:
        return {
            "moves": float(self.num_moves),
            "invalid_actions": float(self.num_invalid),
            "malformed_replies": float(self.num_malformed),
        }

    def _check_spaces(self) -> None:
        from gymnasium.spaces import Text

        seen, done = self.env.observation_space, self.env.action_space
        if self.config.observe == "text" and not isinstance(seen, Text):
            raise PluginError(
                f"`env.observe`: {self.config.id} shows {seen}, which is no text. Use `observe: ansi` where it can render itself, "
                f"or name a function that tells it, as './file.py:function'."
            )
        if self.config.actions is None and not isinstance(done, Text):
            raise PluginError(f"`env.actions`: {self.config.id} takes {done}. Give the actions names, for example {{Left: 0, Right: 1}}.")
        for name, action in (self.config.actions or {}).items():
            if not done.contains(action):
                raise PluginError(f"`env.actions.{name}`: {self.config.id} takes {done}, and {action!r} is not among it.")


def plain(text: str) -> str:
    """Terminal output as plain text, with colours in words: a red F is `{red:F}`."""
    return _ESCAPE.sub("", _COLORED.sub(_in_words, text))


def _in_words(colored: re.Match[str]) -> str:
    """Codes from 30 on are colours of the sign, those from 40 on of its background."""
    codes = [int(code) for code in colored[1].split(";") if code]
    names = [_COLORS[code % 10] for code in codes if 30 <= code <= 37 or 40 <= code <= 47]
    return f"{{{names[0]}:{colored[2]}}}" if names else colored[2]
