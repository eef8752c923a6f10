"""The shop's pages and where each click leads, without words.

search ──Search──→ results ──Open──→ product ──DESCRIPTION, FEATURES──→ a text about it
  ↑                 NEXT, PREV        Choose, BUY
  └── HOME, from everywhere; PREV leads back by one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from drumroll.envs.webshop.catalogue import Product

Place = Literal["search", "results", "product", "description", "features"]


@dataclass(frozen=True, slots=True)
class Search:
    """Possible on the search page."""

    words: str


@dataclass(frozen=True, slots=True)
class Open:
    """A product of the results, by its number in the shop."""

    product: int


@dataclass(frozen=True, slots=True)
class Choose:
    """An option; the group's earlier one is forgotten."""

    group: str
    value: str


class Click(Enum):
    """The buttons."""

    HOME = "home"
    NEXT = "next"
    PREV = "prev"
    DESCRIPTION = "description"
    FEATURES = "features"
    BUY = "buy"


Command = Search | Open | Choose | Click


@dataclass(frozen=True, slots=True)
class View:
    """Where a visitor is."""

    place: Place = "search"
    hits: tuple[int, ...] = ()
    """Numbers of all products that the search found."""
    page: int = 0
    """Of the results, from 0."""
    product: int = -1
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Option group → value."""

    def shown(self, page_size: int) -> tuple[int, ...]:
        """The results on this page."""
        return self.hits[self.page * page_size : (self.page + 1) * page_size]

    def num_pages(self, page_size: int) -> int:
        return -(-len(self.hits) // page_size)


def clicks(view: View, products: Sequence[Product], page_size: int) -> Iterator[Command]:
    """Everything that can be clicked, in the order of the page. `Search` is no click."""
    if view.place == "search":
        return
    yield Click.HOME
    if view.place == "results":
        if view.page > 0:
            yield Click.PREV
        if view.page + 1 < view.num_pages(page_size):
            yield Click.NEXT
        yield from map(Open, view.shown(page_size))
        return
    yield Click.PREV
    if view.place == "product":
        for group, values in products[view.product].options.items():
            yield from (Choose(group, value) for value in values)
        yield from (Click.DESCRIPTION, Click.FEATURES, Click.BUY)


def follow(view: View, command: Open | Choose | Click) -> View:
    """The page behind a click that is possible here. Buying ends the visit and leads to no page."""
    match command:
        case Open(product):
            return replace(view, place="product", product=product, chosen={})
        case Choose(group, value):
            return replace(view, chosen={**view.chosen, group: value})
        case Click.HOME:
            return View()
        case Click.NEXT:
            return replace(view, page=view.page + 1)
        case Click.DESCRIPTION:
            return replace(view, place="description")
        case Click.FEATURES:
            return replace(view, place="features")
        case Click.PREV:
            return _back(view)
        case Click.BUY:
            raise AssertionError("a purchase leads to no page")


def _back(view: View) -> View:
    if view.place == "results":
        return replace(view, page=view.page - 1)
    if view.place == "product":
        return replace(view, place="results", product=-1, chosen={})
    return replace(view, place="product")
