"""What a product and a goal are, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Product:
    """Something on sale.

    Example: `Product("B000000001", "Soft Warm Mug", 12.0, query="mug", options={"color": ("red", "blue")})`.
    """

    asin: str
    """Its name in the shop; unique."""
    title: str
    price: float
    price_tag: str = ""
    """The price as pages show it, where it is not one number."""
    query: str = ""
    """What kind of thing it is, in a word or two."""
    product_category: str = ""
    """Path in the shop's tree, with ` › ` between its parts."""
    attributes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    description: str = ""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Option group → the values that a buyer can choose from."""
    rating: str = ""

    @property
    def text(self) -> str:
        """Everything that a buyer can read about it."""
        values = (value for group in self.options.values() for value in group)
        return " ".join([self.title, self.query, *self.features, self.description, *values])


@dataclass(frozen=True, slots=True)
class Goal:
    """What the buyer wants: some product like `wanted`, with these attributes and options, within the budget."""

    instruction: str
    """In words."""
    brief: str
    """In as few words as possible."""
    wanted: Product
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Values to choose."""
    budget: float
