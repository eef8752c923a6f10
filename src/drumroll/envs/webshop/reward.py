"""How well a purchase fits a goal, by WebShop's definition:

    r = r_type · (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + [y_price ≤ u_price]) / (|U_att| + |U_opt| + 1)

U is what the goal asks for, Y what was bought. Attributes and options are compared by their words, so that `wool blend` is found in
`soft wool blend`; sizes must be equal. An attribute counts as well when the product's title, features or description say it.

r_type tells whether it is the kind of thing that was wanted. It depends on how many nouns of the wanted product's title stand in the
bought one's title:

    0     none
    0.1   fewer than a tenth
    0.5   at most a fifth, while neither the query nor two parts of the category are the same
    1     otherwise

Nouns are taken to be the words of a title that are neither function words nor numbers nor part of an attribute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from drumroll.envs.webshop.catalogue import Goal, Product

SIMILAR = 85
"""Texts with a higher `word_similarity` mean the same."""

EXACT_GROUPS = frozenset({"size"})
"""Option groups whose values must be equal."""

FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be by can for from has have in into is it its more most new no not of off on one or our out over per plus so "
        "than that the their this to up use very was we with without you your",
    )
)


@dataclass(frozen=True, slots=True)
class Score:
    """A purchase's reward and the parts that it is made of, each between 0 and 1."""

    reward: float
    r_att: float
    """Share of the wanted attributes that the product has."""
    r_opt: float
    """Share of the wanted options that were chosen."""
    r_price: float
    """1 within the budget."""
    r_type: float

    def parts(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if name != "reward"}


NOTHING = Score(0.0, 0.0, 0.0, 0.0, 0.0)
"""For an episode without a purchase."""


def score(product: Product, chosen: Mapping[str, str], goal: Goal) -> Score:
    """The reward of buying the product with the chosen option of each group."""
    num_attributes = sum(has_attribute(product, wanted) for wanted in goal.attributes)
    num_options = sum(any(fits_option(group, value, wanted) for group, value in chosen.items()) for wanted in goal.options)
    within = product.price <= goal.budget
    r_type = type_match(product, goal.wanted)
    return Score(
        reward=r_type * (num_attributes + num_options + within) / (len(goal.attributes) + len(goal.options) + 1),
        r_att=num_attributes / len(goal.attributes) if goal.attributes else 1.0,
        r_opt=num_options / len(goal.options) if goal.options else 1.0,
        r_price=float(within),
        r_type=r_type,
    )


def has_attribute(product: Product, wanted: str) -> bool:
    """Whether one of its attributes means the same, or a text about it says so."""
    if any(word_similarity(attribute, wanted) > SIMILAR for attribute in product.attributes):
        return True
    return any(wanted.lower() in text.lower() for text in (product.title, " ".join(product.features), product.description))


def fits_option(group: str, value: str, wanted: str) -> bool:
    """Whether choosing the value in this group is what the goal asks for."""
    if group.lower() in EXACT_GROUPS:
        return value.lower() == wanted.lower()
    return word_similarity(value, wanted) > SIMILAR


def type_match(bought: Product, wanted: Product) -> float:
    """r_type: 0, 0.1, 0.5 or 1."""
    wanted_nouns = nouns(wanted)
    overlap = len(wanted_nouns & nouns(bought)) / len(wanted_nouns) if wanted_nouns else 0.2
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    same_query = bought.query.lower() == wanted.query.lower()
    same_category = len(category_parts(bought) & category_parts(wanted)) >= 2
    return 1.0 if same_query or same_category or overlap > 0.2 else 0.5


def nouns(product: Product) -> frozenset[str]:
    """Words of the title that say what it is, in lower case."""
    said_of_it = {word for attribute in product.attributes for word in words(attribute)}
    return frozenset(word for word in words(product.title) if not word.isdigit()) - said_of_it - FUNCTION_WORDS


def category_parts(product: Product) -> frozenset[str]:
    return frozenset(part for piece in product.product_category.split("›") if (part := piece.strip()))


def words(text: str) -> list[str]:
    """Lower-case words and numbers.

    Example: `words("Size 7, X-Large") == ["size", "7", "x", "large"]`.
    """
    return re.findall(r"[^\W_]+", text.lower())


def word_similarity(one: str, other: str) -> int:
    """0 to 100: how alike two texts are as sets of words; 100 when the words of one are among the other's.

    Example: `word_similarity("blue", "dark blue") == 100`.
    """
    first, second = set(words(one)), set(words(other))
    if not first or not second:
        return 0
    both = sorted(first & second)
    left, right = " ".join(both + sorted(first - second)), " ".join(both + sorted(second - first))
    pairs = [(left, right), (" ".join(both), left), (" ".join(both), right)] if both else [(left, right)]
    return max(round(100 * _likeness(*pair)) for pair in pairs)


def _likeness(one: str, other: str) -> float:
    """Twice the length of the longest common subsequence over the sum of the lengths."""
    row = [0] * (len(other) + 1)
    for letter in one:
        diagonal = 0
        for place, candidate in enumerate(other, start=1):
            diagonal, row[place] = row[place], diagonal + 1 if letter == candidate else max(row[place], row[place - 1])
    return 2 * row[-1] / (len(one) + len(other))
