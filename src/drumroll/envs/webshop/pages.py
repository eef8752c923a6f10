"""Pages and actions in words: in full, as WebShop has them, or compact, for small models whose tokens are characters.

in full                                   compact
search[soft mug]                          s soft mug
click[B000000001], a result               1, its number on the page
click[red], an option                     red
click[Next >], click[< Prev]              n, p
click[Description], click[Features]       d, f
click[Back to Search], click[Buy Now]     h, b
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from drumroll.envs.webshop.catalogue import Goal, Product
from drumroll.envs.webshop.site import Choose, Click, Command, Open, Search, View, clicks


class Words(ABC):
    """A way of writing pages and of naming actions."""

    buttons: ClassVar[Mapping[Click, str]]
    rules: ClassVar[str] = ""
    """Told once, before the first page."""

    def __init__(self, products: Sequence[Product], page_size: int) -> None:
        self.products = products
        self.page_size = page_size

    @abstractmethod
    def page(self, view: View, goal: Goal) -> str:
        """What a visitor sees."""

    @abstractmethod
    def read(self, action: str, view: View) -> Command | None:
        """What an action means on this page; None where it means nothing."""

    @abstractmethod
    def write(self, command: Command, view: View) -> str:
        """The action for a command that is possible on this page."""

    @abstractmethod
    def result(self, product: Product) -> str:
        """What the results say about a product."""

    @abstractmethod
    def complaint(self, problem: str) -> str:
        """A line above the page, when something was wrong with an action or a reply."""

    def chosen(self, view: View, goal: Goal) -> str:
        """The page after an option was chosen."""
        return self.page(view, goal)

    def names(self, view: View) -> dict[str, Command]:
        """Everything that can be clicked on this page, by the name that it has there."""
        named: dict[str, Command] = {}
        for command in clicks(view, self.products, self.page_size):
            named[self._name(command, named)] = command
        return named

    def _name(self, command: Command, taken: Mapping[str, Command]) -> str:
        """A name for the next thing on a page, where those before it have theirs."""
        if isinstance(command, Click):
            return self.buttons[command]
        if isinstance(command, Open):
            return self._name_of_result(command.product, taken)
        assert isinstance(command, Choose)
        used = {name.lower() for name in (*taken, *self.buttons.values())}
        return f"{command.group}: {command.value}" if command.value.lower() in used else command.value

    @abstractmethod
    def _name_of_result(self, product: int, taken: Mapping[str, Command]) -> str:
        """Of a product on a page of results."""


class Full(Words):
    """As WebShop has them; names are read without regard to case."""

    buttons = {
        Click.HOME: "Back to Search",
        Click.NEXT: "Next >",
        Click.PREV: "< Prev",
        Click.DESCRIPTION: "Description",
        Click.FEATURES: "Features",
        Click.BUY: "Buy Now",
    }
    rules = (
        "You are shopping. Find a product that fits the instruction, choose the right options and buy it.\n"
        "Actions: search[words] on the search page; click[name] for anything that a page shows in brackets. "
        "click[Buy Now] buys the product with the chosen options and ends the visit."
    )

    def page(self, view: View, goal: Goal) -> str:
        return "\n".join([f"Instruction: {goal.instruction}", *self._lines(view)])

    def read(self, action: str, view: View) -> Command | None:
        match = re.fullmatch(r"(search|click)\s*\[(.*)\]", action, re.IGNORECASE | re.DOTALL)
        if match is None:
            return None
        words = match[2].strip()
        if match[1].lower() == "search":
            return Search(words) if view.place == "search" and words else None
        return {name.lower(): command for name, command in self.names(view).items()}.get(words.lower())

    def write(self, command: Command, view: View) -> str:
        if isinstance(command, Search):
            return f"search[{command.words}]"
        return f"click[{_name_of(command, self.names(view))}]"

    def result(self, product: Product) -> str:
        return f"{product.title}, {_price_tag(product)}"

    def complaint(self, problem: str) -> str:
        return f"{problem}\n"

    def _name_of_result(self, product: int, taken: Mapping[str, Command]) -> str:
        return self.products[product].asin

    def _lines(self, view: View) -> Iterator[str]:
        named = self.names(view)
        if view.place == "search":
            yield "You are on the search page: search[words]"
            return
        yield " ".join(f"[{name}]" for name, command in named.items() if command in (Click.HOME, Click.PREV, Click.NEXT))
        if view.place == "results":
            place = f"Page {view.page + 1} of {view.num_pages(self.page_size)}"
            yield f"{place}, {len(view.hits)} results" if view.hits else "Nothing was found."
            yield from (f"[{name}] {self.result(self.products[c.product])}" for name, c in named.items() if isinstance(c, Open))
            return
        product = self.products[view.product]
        if view.place == "description":
            yield product.description or "There is no description."
        elif view.place == "features":
            yield from product.features or ["No features are listed."]
        else:
            yield product.title
            yield f"Price: {_price_tag(product)}"
            yield f"Rating: {product.rating or 'N.A.'}"
            yield from self._groups(view, named)
            yield " ".join(f"[{self.buttons[click]}]" for click in (Click.DESCRIPTION, Click.FEATURES, Click.BUY))

    def _groups(self, view: View, named: Mapping[str, Command]) -> Iterator[str]:
        for group in self.products[view.product].options:
            values = " ".join(f"[{name}]" for name, c in named.items() if isinstance(c, Choose) and c.group == group)
            choice = f" (chosen: {view.chosen[group]})" if group in view.chosen else ""
            yield f"{group}: {values}{choice}"


class Compact(Words):
    """As short as it can be, with everything that the goal is about: results and products show their attributes."""

    buttons = {Click.HOME: "h", Click.NEXT: "n", Click.PREV: "p", Click.DESCRIPTION: "d", Click.FEATURES: "f", Click.BUY: "b"}

    def page(self, view: View, goal: Goal) -> str:
        if view.place == "search":
            return goal.brief
        if view.place == "results":
            lines = [f"{name} {self.result(self.products[c.product])}" for name, c in self.names(view).items() if isinstance(c, Open)]
            return "\n".join(lines) or "-"
        product = self.products[view.product]
        if view.place == "description":
            return product.description or "-"
        if view.place == "features":
            return "\n".join(product.features) or "-"
        return "\n".join([self.result(product), *self._groups(view)])

    def chosen(self, view: View, goal: Goal) -> str:
        """What is chosen in each group; the rest of the page is what it was."""
        return " ".join(view.chosen.get(group, "?") for group in self.products[view.product].options)

    def read(self, action: str, view: View) -> Command | None:
        key, _, words = action.partition(" ")
        if key == "s" and view.place == "search" and words.strip():
            return Search(words.strip())
        return self.names(view).get(action)

    def write(self, command: Command, view: View) -> str:
        return f"s {command.words}" if isinstance(command, Search) else _name_of(command, self.names(view))

    def result(self, product: Product) -> str:
        price = product.price_tag if " to " in product.price_tag else f"{product.price:g}"
        return " ".join([product.query or product.title, *product.attributes, price])

    def complaint(self, problem: str) -> str:
        return "!\n"

    def _name_of_result(self, product: int, taken: Mapping[str, Command]) -> str:
        return str(1 + sum(isinstance(other, Open) for other in taken.values()))

    def _groups(self, view: View) -> Iterator[str]:
        named = self.names(view)
        for group in self.products[view.product].options:
            choices = [(name, c.value) for name, c in named.items() if isinstance(c, Choose) and c.group == group]
            yield " ".join(f"{name}{'*' if view.chosen.get(group) == value else ''}" for name, value in choices)


def _name_of(command: Command, named: Mapping[str, Command]) -> str:
    return next(name for name, candidate in named.items() if candidate == command)


def _price_tag(product: Product) -> str:
    return product.price_tag or f"${product.price:.2f}"
