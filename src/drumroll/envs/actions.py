"""How actions are read from a reply, by one set of rules for every environment that has any.

    <think>a hole below</think> I go right. <answer>Right||Down</answer>   →   ("Right", "Down")
    └──────── never counts ───┘ └ ignored ┘         └─ separator

- Text up to the last `</think>` is thinking and never counts.
- With a `tag`, the rest holds it exactly once, opened and closed; what stands around it is ignored. Without a tag, the rest is the answer.
- An answer is one or more actions with separators between them. Blanks around an action, and actions that are blank, do not count.

A reply that keeps these rules and has no more actions than a turn allows is in form. Whether an action makes sense is up to the
environment: one that it does not know does nothing, and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from drumroll.config.models import EnvConfig, NonNegativeFloat

THINK_END = "</think>"


class ActionConfig(EnvConfig):
    """Base of the options of environments that read actions from replies."""

    tag: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] | None = "answer"
    """Actions stand between `<answer>` and `</answer>`, or whatever the tag is called. null: the whole reply is the actions.
    A stop string is not part of a reply: where one is used, it must not be the closing tag."""
    separator: Annotated[str, Field(min_length=1)] = "||"
    """Stands between the actions of one turn."""
    max_actions_per_turn: PositiveInt = 1
    """A reply with more of them has only the first ones taken, and is out of form."""
    format_penalty: NonNegativeFloat = 0.0
    """Taken from the reward for each reply that is out of form."""

    @model_validator(mode="after")
    def not_thinking(self) -> Self:
        if self.tag == "think":
            raise ValueError("`tag` is 'think', which is where the model thinks and nothing is read. Give actions another tag.")
        return self


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reply asks for.

    Example: `Reading(("Up",))`, or `Reading((), "The reply has no <answer>…</answer>.")`.
    """

    actions: tuple[str, ...]
    """To be taken in this order. Empty only where there is a problem."""
    problem: str = ""
    """Why the reply is out of form, as a sentence that the model may be shown; empty when it is in form."""


def read_actions(reply: str, config: ActionConfig) -> Reading:
    """The actions of a reply, and what is wrong with its form, if anything.

    Example: `read_actions("<answer>Up</answer>", ActionConfig()).actions == ("Up",)`.
    """
    spoken = reply.rpartition(THINK_END)[2]
    answer, problem = (spoken, "") if config.tag is None else _inside(spoken, config.tag)
    if problem:
        return Reading((), problem)
    actions = tuple(action for piece in answer.split(config.separator) if (action := piece.strip()))
    most = config.max_actions_per_turn
    if not actions:
        return Reading((), "The answer holds no action.")
    if len(actions) > most:
        return Reading(actions[:most], f"The answer holds {len(actions)} actions, and a turn has at most {most}.")
    return Reading(actions)


def write_actions(actions: Sequence[str], config: ActionConfig) -> str:
    """A reply that asks for these actions, so that `read_actions` finds them again.

    Example: `write_actions(["Up", "Left"], config) == "<answer>Up||Left</answer>"`.
    """
    answer = config.separator.join(actions)
    return answer if config.tag is None else f"<{config.tag}>{answer}</{config.tag}>"


def explain_form(config: ActionConfig, examples: Sequence[str]) -> str:
    """How to answer, in words for the model, with one or more actions as examples.

    Example: `explain_form(config, ["Up", "Left"]) == "Answer with one action, for example: <answer>Up</answer>"`.
    """
    most = config.max_actions_per_turn
    if most == 1:
        return f"Answer with one action, for example: {write_actions(examples[:1], config)}"
    shown = write_actions(examples[:most], config)
    return f"Answer with 1 to {most} actions, separated by {config.separator}, for example: {shown}"


def _inside(text: str, tag: str) -> tuple[str, str]:
    """What stands in the text's only tag, and a problem where there is no such."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    inside, found, _ = text.partition(opening)[2].partition(closing)
    num_tags = max(text.count(opening), text.count(closing))
    if num_tags > 1:
        return "", f"The reply has {opening} or {closing} {num_tags} times; once was expected."
    if not found:
        return "", f"The reply has no {opening}…{closing}."
    return inside, ""
