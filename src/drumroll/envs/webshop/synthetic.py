"""A catalogue that is made from a seed, and goals in it.

A kind of thing has five attributes, and every product of the kind has two of them. Products with the same two form a family: but for the
wording of their descriptions, they differ in price alone. All products of a kind have the same two option groups. Search finds families and
their neighbours, not the right price; and a product that praises one attribute again and again may come before one that has both.

A goal asks for one family at a price that at most half of it is sold for, and for a value of each option group. The rest of the family is
too dear, and others of the kind are cheap enough but lack an attribute.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from random import Random

from drumroll.envs.webshop.catalogue import Goal, Product

PRODUCTS_PER_KIND = 50
"""Ten families of five, where there are no more than that for each kind."""

FEWEST_PRODUCTS = PRODUCTS_PER_KIND

COLORS = ("red", "blue", "green", "black", "white", "pink", "gold", "teal", "brown", "tan")

COLORS_PER_KIND = 6


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing, such as mugs."""

    name: str
    maker: str
    category: str
    attributes: tuple[str, ...]
    group: str
    """Its second option group; the first is the color."""
    values: tuple[str, ...]


def _kind(name: str, maker: str, category: str, attributes: str, group: str, values: str) -> Kind:
    return Kind(name, maker, category, tuple(attributes.split()), group, tuple(values.split()))


KINDS = (
    _kind("mug", "Norwell", "Home › Kitchen › Cups", "matte thick tall shiny sealed", "size", "s m l xl"),
    _kind("pan", "Kastrel", "Home › Kitchen › Cookware", "coated light deep shiny sturdy", "width", "20cm 24cm 28cm 32cm"),
    _kind("bowl", "Dunmore", "Home › Kitchen › Dishes", "matte deep thick sturdy round", "pack", "1 2 4 6"),
    _kind("jar", "Pellina", "Home › Kitchen › Storage", "sealed tall round thick vented", "volume", "1l 2l 3l 5l"),
    _kind("lamp", "Lumora", "Home › Living › Lighting", "bright slim tall quiet matte", "power", "5w 10w 15w 25w"),
    _kind("rug", "Tavira", "Home › Living › Floors", "woven thick soft round washed", "length", "1m 2m 3m 4m"),
    _kind("clock", "Zephira", "Home › Living › Clocks", "quiet round slim bright shiny", "width", "20cm 30cm 40cm 50cm"),
    _kind("quilt", "Morvane", "Home › Sleeping › Bedding", "warm soft thick light vegan", "size", "s m l xl"),
    _kind("towel", "Wexcombe", "Home › Bathing › Cloth", "soft thick woven light washed", "size", "s m l xl"),
    _kind("shirt", "Calloway", "Clothing › Wear › Tops", "slim soft light washed vegan", "size", "s m l xl"),
    _kind("jacket", "Ostrander", "Clothing › Wear › Coats", "warm padded quilted light sealed", "size", "s m l xl"),
    _kind("scarf", "Ilmarin", "Clothing › Wear › Necks", "warm soft woven light vegan", "length", "1m 2m 3m 4m"),
    _kind("boot", "Garrick", "Clothing › Feet › Boots", "warm sturdy sealed padded shiny", "size", "6 7 8 9"),
    _kind("shoe", "Velarno", "Clothing › Feet › Shoes", "light vented slim sturdy vegan", "size", "6 7 8 9"),
    _kind("sock", "Quillan", "Clothing › Feet › Socks", "warm soft thick vented woven", "pack", "1 3 5 7"),
    _kind("bag", "Umberto", "Travel › Carry › Bags", "sealed sturdy padded light slim", "volume", "5l 10l 20l 30l"),
    _kind("tent", "Xandel", "Travel › Camping › Tents", "light sealed vented sturdy tall", "sleeps", "1 2 3 4"),
    _kind("chair", "Yarrow", "Travel › Camping › Chairs", "padded sturdy light folding tall", "height", "30cm 40cm 50cm 60cm"),
    _kind("bike", "Jorund", "Travel › Riding › Bikes", "light sturdy folding quiet coated", "gears", "1 3 5 7"),
    _kind("helmet", "Edrick", "Travel › Riding › Helmets", "vented padded light bright round", "size", "s m l xl"),
)

PRAISE = (
    "Made to be {attribute}.",
    "Buyers say how {attribute} it feels.",
    "A {attribute} {kind} for every day.",
    "It stays {attribute} for years.",
    "Nothing is as {attribute} as a {attribute} {kind} of ours.",
    "If it must be {attribute}, it must be this {kind}.",
)

FILLER = (
    "Sent within two days.",
    "Returns are free for a month.",
    "One year of warranty.",
    "Packed in paper, without plastic.",
    "A gift card can be added.",
    "See our other offers as well.",
    "Our staff is glad to help you.",
    "Sold by the maker.",
)

NUM_SENTENCES = 8

NUM_PRAISES = (0, 1, 2, 8)

PHRASINGS = (
    "I need a {kind} that is {one} and {two}, in {color}, {group} {value}, for less than {budget} dollars",
    "Find me a {one} and {two} {kind}, color {color}, {group} {value}, and price lower than {budget} dollars",
    "I am looking for a {kind} which is {one} as well as {two}. I want it in {color}, with {group} {value}, below {budget} dollars",
    "My old {kind} broke. Get me a {two} one in {color} that is also {one}, {group} {value}, and costs less than {budget} dollars",
    "Please buy a {color} {kind}, {one} and {two}, in {group} {value}; I can spend less than {budget} dollars",
)


def make_products(num_products: int, seed: int) -> tuple[Product, ...]:
    """The catalogue, in a shuffled order. The same numbers give the same products on every machine."""
    kinds = KINDS[: max(1, num_products // PRODUCTS_PER_KIND)]
    rng = Random(f"catalogue {seed}")
    colors = {kind.name: rng.sample(COLORS, COLORS_PER_KIND) for kind in kinds}
    families = [(kind, pair) for pair in itertools.combinations(range(5), 2) for kind in kinds]
    sizes = [len(range(number, num_products, len(families))) for number in range(len(families))]
    asins = [f"B{number:09d}" for number in rng.sample(range(10**9), num_products)]
    products: list[Product] = []
    for (kind, (one, two)), size in zip(families, sizes, strict=True):
        for price in _prices(size, rng):
            attributes = [kind.attributes[one], kind.attributes[two]]
            rng.shuffle(attributes)
            products.append(_product(asins[len(products)], kind, attributes, price, colors[kind.name], rng))
    rng.shuffle(products)
    return tuple(products)


def _prices(number: int, rng: Random) -> list[int]:
    """Of one family, ascending, with room for a budget between any two."""
    return list(itertools.accumulate((rng.randint(3, 15) for _ in range(number - 1)), initial=rng.randint(10, 50)))


def _product(asin: str, kind: Kind, attributes: list[str], price: int, colors: list[str], rng: Random) -> Product:
    groups = {"color": list(colors), kind.group: list(kind.values)}
    for values in groups.values():
        rng.shuffle(values)
    praised, num_praises = rng.choice(attributes), rng.choice(NUM_PRAISES)
    praises = [rng.choice(PRAISE).format(attribute=praised, kind=kind.name) for _ in range(num_praises)]
    sentences = praises + rng.sample(FILLER, NUM_SENTENCES - num_praises)
    return Product(
        asin=asin,
        title=f"{kind.maker} {attributes[0]} {attributes[1]} {kind.name}".title(),
        price=float(price),
        query=kind.name,
        product_category=kind.category,
        attributes=tuple(attributes),
        features=(f"A {kind.name} by {kind.maker}.", *sentences[::2]),
        description=" ".join(sentences[1::2]),
        options={name: tuple(values) for name, values in groups.items()},
        rating=f"{rng.randint(30, 50) / 10}",
    )


@dataclass(frozen=True, slots=True)
class Aim:
    """What a goal is about: a product that fits, with these options, at a price below that of the next in its family."""

    product: Product
    color: str
    value: str
    too_dear: float


class SyntheticGoals:
    """The goals of a catalogue, by seed: no two seeds have the same product and options."""

    def __init__(self, products: tuple[Product, ...], seed: int) -> None:
        self._seed = seed
        self._aims = _aims(products)
        Random(f"goals {seed}").shuffle(self._aims)

    def __len__(self) -> int:
        return len(self._aims)

    def __getitem__(self, seed: int) -> Goal:
        aim = self._aims[seed]
        rng = Random(f"goal {self._seed} {seed}")
        one, two = rng.sample(aim.product.attributes, 2)
        budget = rng.randrange(int(aim.product.price) + 1, int(aim.too_dear))
        kind, group = aim.product.query, list(aim.product.options)[1]
        said = {"kind": kind, "one": one, "two": two, "color": aim.color, "group": group, "value": aim.value, "budget": budget}
        return Goal(
            instruction=rng.choice(PHRASINGS).format(**said),
            brief="{kind} {one} {two}, {color} {value}, <{budget}".format(**said),
            wanted=aim.product,
            attributes=(one, two),
            options=(aim.color, aim.value),
            budget=float(budget),
        )


def _aims(products: tuple[Product, ...]) -> list[Aim]:
    """Every product that is in the cheaper half of its family, with every choice of options."""
    families = defaultdict(list)
    kinds = defaultdict(list)
    for product in products:
        families[product.query, frozenset(product.attributes)].append(product)
        kinds[product.query].append(product)
    aims = []
    for (kind, attributes), family in families.items():
        family.sort(key=lambda product: product.price)
        for product, dearer in itertools.pairwise(family[: len(family) // 2 + 1]):
            if any(other.price <= product.price and len(attributes & set(other.attributes)) == 1 for other in kinds[kind]):
                choices = itertools.product(*(sorted(values) for values in product.options.values()))
                aims += [Aim(product, color, value, dearer.price) for color, value in choices]
    return aims
