"""One episode: what a reply does, what is shown next, and what it was worth. Nothing here waits."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from drumroll.envs.actions import ActionConfig, explain_form, read_actions
from drumroll.envs.base import Step
from drumroll.envs.webshop.catalogue import Goal
from drumroll.envs.webshop.pages import Compact, Full, Words
from drumroll.envs.webshop.reward import NOTHING, Score, score
from drumroll.envs.webshop.shop import Shop, Source
from drumroll.envs.webshop.site import Choose, Click, Command, Search, View, follow
from drumroll.envs.webshop.synthetic import FEWEST_PRODUCTS

PROMPT_END = "\n>"
"""Where a reply begins in plain text."""


LONGEST_QUOTE = 80
"""Characters of an action that a complaint repeats."""


class VisitConfig(ActionConfig):
    """Options of the shop and of its episodes."""

    kind: str = "webshop"
    chat: bool = True
    """Show pages as chat messages; otherwise as plain text, with `>` before each reply."""
    rules: bool = True
    """Explain the shop and write pages in full. Otherwise pages and actions are as short as they can be, for small models:
    `s mug soft` searches, `1` opens a result, `red` chooses an option, and h, n, p, d, f, b are the buttons
    (home, next, previous, description, features, buy)."""
    num_products: Annotated[int, Field(ge=FEWEST_PRODUCTS)] = 1000
    """Size of the catalogue that is made when there is no `products`."""
    catalogue_seed: int = 0
    """The catalogue, and which goal a task's seed stands for, depend on it."""
    products: str | None = None
    """WebShop's own products, items_shuffle.json."""
    attributes: str | None = None
    """Attributes of those products, items_ins_v2.json. Its instructions are the goals where there is no `goals`."""
    goals: str | None = None
    """Goals that people wrote for those products, items_human_ins.json."""
    page_size: PositiveInt = 10
    """Results on a page."""
    max_results: PositiveInt = 50
    """Results of a search."""
    max_steps: PositiveInt = 15
    """Actions of an episode; one without a purchase by then ends, with nothing."""

    @model_validator(mode="after")
    def files_go_together(self) -> Self:
        if self.products is None and (self.attributes is not None or self.goals is not None):
            raise ValueError("`attributes` and `goals` are about the products of a file: give `products` as well")
        if self.products is not None and self.attributes is None and self.goals is None:
            raise ValueError("`products` has no goals of its own: give `goals` or `attributes` as well")
        return self

    @property
    def source(self) -> Source:
        """Which shop it is."""
        return Source(self.num_products, self.catalogue_seed, self.products, self.attributes, self.goals)


class Visit:
    """A visit to the shop with a goal, from the search page to a purchase.

    Example: `visit = Visit(VisitConfig(), shop, goal); visit.begin(); visit.answer("<answer>search[mug]</answer>")`.
    """

    def __init__(self, config: VisitConfig, shop: Shop, goal: Goal) -> None:
        self.config = config
        self.shop = shop
        self.goal = goal
        self.words: Words = (Full if config.rules else Compact)(shop.products, config.page_size)
        self.view = View()
        self._num_steps = 0
        self._counts = {"actions": 0.0, "invalid_actions": 0.0, "malformed_replies": 0.0}

    def begin(self) -> Step:
        """The rules, if they are told, and the search page."""
        page = self.words.page(self.view, self.goal)
        if self.config.rules:
            page = f"{self.words.rules}\n{explain_form(self.config, ['search[soft mug]', 'click[Back to Search]'])}\n\n{page}"
        return self._show(page, reward=None)

    def answer(self, reply: str) -> Step:
        """Take the reply's actions, one after another, up to a purchase or to the end of the budget."""
        reading = read_actions(reply, self.config)
        penalty = self.config.format_penalty if reading.problem else 0.0
        self._counts["malformed_replies"] += bool(reading.problem)
        self._num_steps += not reading.actions
        problem, only_choices = reading.problem, True
        for action in reading.actions:
            if self._num_steps >= self.config.max_steps:
                break
            self._num_steps += 1
            self._counts["actions"] += 1
            command = self.words.read(action, self.view)
            if command is Click.BUY:
                return self._end(score(self.shop.products[self.view.product], self.view.chosen, self.goal), penalty)
            if command is None:
                self._counts["invalid_actions"] += 1
                problem = f"Nothing happened: '{action[:LONGEST_QUOTE]}' is no action on this page."
            else:
                only_choices &= isinstance(command, Choose)
                self._go(command)
        if self._num_steps >= self.config.max_steps:
            return self._end(NOTHING, penalty)
        if problem:
            page = self.words.complaint(problem) + self.words.page(self.view, self.goal)
        else:
            page = self.words.chosen(self.view, self.goal) if only_choices else self.words.page(self.view, self.goal)
        return self._show(page if self.config.chat else f"\n{page}", reward=-penalty)

    def _go(self, command: Command) -> None:
        if isinstance(command, Search):
            self.view = View("results", tuple(self.shop.index.search(command.words, self.config.max_results)))
        else:
            self.view = follow(self.view, command)

    def _show(self, page: str, reward: float | None) -> Step:
        """Until there is a purchase, the visit is no success."""
        return Step(
            prompt=None if self.config.chat else page + PROMPT_END,
            messages=({"role": "user", "content": page},) if self.config.chat else None,
            state=self._state(),
            reward=reward,
            success=False,
            metrics={**self._counts, **NOTHING.parts()},
        )

    def _end(self, verdict: Score, penalty: float) -> Step:
        return Step(
            done=True,
            reward=verdict.reward - penalty,
            success=verdict.reward == 1.0,
            metrics={**self._counts, **verdict.parts()},
        )

    def _state(self) -> str:
        """What the page is about: the products on it, or one product and what is chosen, whichever search led there."""
        view = self.view
        if view.place == "results":
            return f"results {view.page} {view.shown(self.config.page_size)}"
        return f"{view.place} {view.product} {sorted(view.chosen.items())}"
