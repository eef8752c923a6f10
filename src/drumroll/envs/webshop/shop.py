"""Products, index and goals together. A shop is built once a process and shared by its episodes; nobody changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Protocol

from drumroll.envs.webshop.catalogue import Goal, Product
from drumroll.envs.webshop.files import attribute_goals, human_goals, read_by_asin, read_products
from drumroll.envs.webshop.search import Index
from drumroll.envs.webshop.synthetic import SyntheticGoals, make_products
from drumroll.errors import DataError

_OPENING = Lock()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a shop's products and goals come from: the files, or a number of products to make."""

    num_products: int
    seed: int
    products: str | None = None
    attributes: str | None = None
    goals: str | None = None


class Goals(Protocol):
    """Goals by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Goal: ...


class Shop:
    """What episodes share."""

    def __init__(self, products: Sequence[Product], goals: Goals) -> None:
        self.products = products
        self.index = Index(product.text for product in products)
        self.goals = goals

    def goal(self, seed: int) -> Goal:
        """The goal of a seed. Different seeds have different goals, so that those for training and for validation have none in common."""
        if not 0 <= seed < len(self.goals):
            raise DataError(
                f"seed {seed}: this webshop has {len(self.goals)} goals, for the seeds 0-{len(self.goals) - 1}. "
                "Choose `seeds` among them, or make more products."
            )
        return self.goals[seed]


def open_shop(source: Source) -> Shop:
    """The shop of these products, built by whoever comes first while others wait."""
    with _OPENING:
        return _open(source)


@cache
def _open(source: Source) -> Shop:
    if source.products is None:
        made = make_products(source.num_products, source.seed)
        return Shop(made, SyntheticGoals(made, source.seed))
    attributes = {} if source.attributes is None else read_by_asin(source.attributes)
    products = read_products(source.products, attributes, source.seed)
    if source.goals is not None:
        return Shop(products, human_goals(products, read_by_asin(source.goals), source.goals, source.seed))
    return Shop(products, attribute_goals(products, attributes, str(source.attributes), source.seed))
