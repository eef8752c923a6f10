"""Every task of reasoning-gym as an environment of one turn.

    env: {kind: reasoning_gym, task: basic_arithmetic, options: {max_terms: 3}}
    env: {kind: reasoning_gym, tasks: {spell_backward: 2, letter_counting: 1}}

The task's seed chooses the problem; the package itself scores the answer. It draws from numpy's global random generator and may compute
for long on a strange answer, so it runs in processes. It evaluates the answers to some of its tasks as Python (`LISTS`, `FORMULAS`): there,
an answer that could do more than sums is not shown to it, and scores 0.

Refused: `composite`, whose place `tasks` takes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from drumroll.envs.adapters import show
from drumroll.envs.base import Step, seed_of
from drumroll.envs.blocking import BlockingConfig, BlockingEnv
from drumroll.errors import PluginError
from drumroll.registry import nearest, register, require
from drumroll.rewards.extract import Extraction, extract
from drumroll.types import Task

require("reasoning_gym", extra="reasoning-gym")

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scoring evaluates the answer as a Python list."""
FORMULAS = frozenset({"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"})
"""Tasks whose scoring evaluates the answer as a formula of sympy, which is Python, too."""

_FUNCTIONS = frozenset({"acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "sin", "sinh", "sqrt", "tan", "tanh", "Abs"})
_LIST = re.compile(r"[A-Za-z0-9_\s+\-,.'\"\[\]]*")
_FORMULA = re.compile(r"[A-Za-z0-9_\s+\-*/^(),.]*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
_CALL = re.compile(r"([A-Za-z0-9_]+|\))\s*\(")


@register.env("reasoning_gym")
class ReasoningGym(BlockingEnv):
    """One problem of reasoning-gym: the score is the reward, and the full score is success."""

    class Config(BlockingConfig):
        kind: str = "reasoning_gym"
        runs_in: Literal["process"] = "process"
        """The package uses global state and evaluates what it is answered."""
        task: str | None = None
        """Name of the package's task, for example `basic_arithmetic`."""
        tasks: dict[str, PositiveFloat] = {}
        """In place of `task`: several, each with its weight. The task's seed chooses among them."""
        options: dict[str, Any] = {}
        """Options of the package for the task; for several tasks, by their names: `{countdown: {max_numbers: 4}}`."""
        size: PositiveInt = 500
        """Problems of one dataset of the package: seed 1234 is number 234 of the third one."""
        extract: Extraction = "tag:answer"
        """Where in the reply the answer stands."""
        instruction: str = "Put the final answer between <answer> and </answer>."
        """Shown after the question. Change it with `extract`."""
        chat: bool = True
        """Show the question as a message of the user, and not as plain text."""

        @model_validator(mode="after")
        def known_tasks(self) -> Self:
            if (self.task is None) == (not self.tasks):
                raise ValueError("give either `task` (a name) or `tasks` (names with weights), and not both")
            for name in self.weights:
                if name not in task_names():
                    raise ValueError(f"reasoning-gym has no task '{name}'.{nearest(name, task_names())} Known: {', '.join(task_names())}.")
            strangers = set(self.options) - set(self.tasks)
            if self.tasks and strangers:
                raise ValueError(
                    f"`options` has {', '.join(sorted(strangers))}; with several tasks, options are given by the names in `tasks`"
                )
            return self

        @property
        def weights(self) -> Mapping[str, float]:
            """The tasks' shares."""
            return self.tasks if self.task is None else {self.task: 1.0}

        def options_of(self, name: str) -> Mapping[str, Any]:
            options = self.options if self.task is not None else self.options.get(name, {})
            return dict(options)

    config: Config

    def begin(self, task: Task) -> Step:
        seed = seed_of(task)
        weights = self.config.weights
        self.name = random.Random(seed).choices(list(weights), list(weights.values()))[0]
        number, index = divmod(seed, self.config.size)
        self.dataset = _dataset(self.name, json.dumps(self.config.options_of(self.name), sort_keys=True), self.config.size, number)
        self.item = self.dataset[index]
        question = self.item["question"]
        return show(f"{question}\n\n{self.config.instruction}" if self.config.instruction else question, chat=self.config.chat)

    def act(self, reply: str) -> Step:
        answer = extract(reply, self.config.extract)
        readable = answer is not None and is_harmless(answer, self.name)
        score = self._score(answer) if readable else 0.0
        metrics = {"score": score, "answered": float(answer is not None), "refused_answers": float(answer is not None and not readable)}
        return Step(done=True, reward=score, success=score >= 1.0, metrics=metrics)

    def _score(self, answer: str | None) -> float:
        """The package's score. Where it fails on the answer, and not on its own reference, the answer is worth nothing."""
        try:
            return float(self.dataset.score_answer(answer, self.item))
        except Exception:
            self.dataset.score_answer(self.item["answer"], self.item)
            return 0.0


def task_names() -> list[str]:
    """Every task of the installed package."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def is_harmless(answer: str, task: str) -> bool:
    """Whether scoring the answer can run nothing but sums: `is_harmless("sqrt(2)*x", "puzzle24")`, but not of `open(x)`."""
    if task in LISTS:
        return _LIST.fullmatch(answer) is not None and _ATTRIBUTE.search(answer) is None
    if task in FORMULAS:
        known = all(call[1] in _FUNCTIONS or call[1].isdigit() for call in _CALL.finditer(answer))
        return known and _FORMULA.fullmatch(answer) is not None and _ATTRIBUTE.search(answer) is None
    return True


@lru_cache(64)
def _dataset(name: str, options: str, size: int, number: int) -> ProceduralDataset:
    """The dataset with the problems from `number * size` on."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=number * size, size=size, **json.loads(options))
    except (TypeError, AssertionError, ValueError) as error:
        raise PluginError(f"`env.options`: reasoning-gym's task '{name}' does not take {options}: {error}") from error
