"""Products and goals from WebShop's own files.

    products     items_shuffle*.json    a list of products
    attributes   items_ins_v2*.json     asin → what was found to be true of the product, and an instruction for it
    goals        items_human_ins.json   asin → instructions that people wrote for the product

Of a product, `asin` and `name` are needed; whatever else is missing is taken to be empty. A product without a price costs 100 dollars. One
with a range of prices has some price in it, which depends on the seed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from drumroll.envs.webshop.catalogue import Goal, Product
from drumroll.errors import DataError

Record = Mapping[str, Any]

DEFAULT_PRICE = 100.0

NO_BUDGET = 1_000_000.0

LONGEST_ASIN = 10


def read_products(path: str, attributes: Mapping[str, Any], seed: int) -> tuple[Product, ...]:
    """All products of the file, the first of each name."""
    records = _read(path, list, "a list of products")
    products: dict[str, Product] = {}
    for number, record in enumerate(records):
        place = f"'{path}', product {number}"
        if not isinstance(record, dict):
            raise DataError(f"{place}: {type(record).__name__} was found; an object with `asin` and `name` was expected.")
        asin = str(_needed(record, "asin", place))
        if asin == "nan" or len(asin) > LONGEST_ASIN or asin in products:
            continue
        products[asin] = _product(asin, record, attributes.get(asin) or {}, place, seed)
    if not products:
        raise DataError(f"'{path}' holds no product. WebShop's items_shuffle.json was expected.")
    return tuple(products.values())


def read_by_asin(path: str) -> dict[str, Any]:
    """A file of attributes or of goals."""
    found: dict[str, Any] = _read(path, dict, "an object whose keys are the products' asins")
    return found


def human_goals(products: Iterable[Product], written: Mapping[str, Any], path: str, seed: int) -> list[Goal]:
    """One for each instruction that names attributes, in an order that depends on the seed."""
    goals = []
    for product in products:
        for number, record in enumerate(written.get(product.asin) or ()):
            place = f"'{path}', {product.asin}, instruction {number}"
            wanted = _strings(_needed(record, "instruction_attributes", place))
            if wanted:
                options = _strings(record.get("instruction_options") or ())
                goals.append(_goal(str(_needed(record, "instruction", place)), product, wanted, options, seed))
    return _shuffled(goals, path, "an instruction with `instruction_attributes`", seed)


def attribute_goals(products: Iterable[Product], attributes: Mapping[str, Any], path: str, seed: int) -> list[Goal]:
    """One for each choice of options of each product with an instruction, in an order that depends on the seed."""
    goals = []
    for product in products:
        record = attributes.get(product.asin) or {}
        wanted = _strings(record.get("instruction_attributes") or ())
        if not record.get("instruction") or not wanted:
            continue
        groups = sorted(product.options)
        for choice in itertools.product(*(product.options[group] for group in groups)):
            said = ", and ".join(f"{group}: {value}" for group, value in zip(groups, choice, strict=True))
            instruction = f"{record['instruction']} with {said}" if said else str(record["instruction"])
            goals.append(_goal(instruction, product, wanted, choice, seed))
    return _shuffled(goals, path, "an `instruction` with `instruction_attributes`", seed)


def _goal(instruction: str, product: Product, attributes: tuple[str, ...], options: tuple[str, ...], seed: int) -> Goal:
    """With a budget: the larger of two of the next four multiples of ten dollars, up to 990."""
    above = [10.0 * tens for tens in range(1, 100) if 10.0 * tens > product.price][:4]
    text = instruction.strip().rstrip(".")
    if len(above) < 2:
        return Goal(text, text, product, attributes, options, NO_BUDGET)
    budget = max(Random(f"budget {seed} {product.asin} {text}").sample(above, 2))
    text = f"{text}, and price lower than {budget:.2f} dollars"
    return Goal(text, text, product, attributes, options, budget)


def _shuffled(goals: list[Goal], path: str, needed: str, seed: int) -> list[Goal]:
    if not goals:
        raise DataError(f"'{path}' holds no goal: {needed} was expected for at least one of the products.")
    Random(f"goals {seed}").shuffle(goals)
    return goals


def _product(asin: str, record: Record, known: Record, place: str, seed: int) -> Product:
    features = record.get("small_description") or ()
    prices = _prices(record.get("pricing"), place)
    return Product(
        asin=asin,
        title=str(_needed(record, "name", place)),
        price=prices[0] if len(prices) == 1 else round(Random(f"price {seed} {asin}").uniform(*sorted(prices)), 2),
        price_tag=" to ".join(f"${price:.2f}" for price in prices),
        query=str(record.get("query") or "").strip().lower(),
        product_category=str(record.get("product_category") or ""),
        attributes=_strings(known.get("attributes") or ()),
        features=(features,) if isinstance(features, str) else _strings(features),
        description=str(record.get("full_description") or ""),
        options=dict(_options(record.get("customization_options") or {}, place)),
        rating=str(record.get("average_rating") or ""),
    )


def _prices(pricing: object, place: str) -> list[float]:
    """One price, or the ends of a range. In the file it is text, such as `$12.99` or `$9.99$19.99`."""
    if isinstance(pricing, (int, float)) and not isinstance(pricing, bool):
        return [float(pricing)]
    if isinstance(pricing, list):
        pricing = "".join(f"${price}" for price in pricing)
    if not isinstance(pricing, (str, type(None))):
        raise DataError(f"{place}: `pricing` is {pricing!r}; text such as '$12.99' was expected.")
    found = re.findall(r"\d+(?:\.\d+)?", (pricing or "").replace(",", ""))
    return [float(price) for price in found[:2]] or [DEFAULT_PRICE]


def _options(groups: object, place: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Option groups with their values: objects with a `value`, or texts."""
    if not isinstance(groups, dict):
        raise DataError(f"{place}: `customization_options` is {groups!r}; an object of option groups was expected.")
    for name, contents in groups.items():
        values = [content.get("value") if isinstance(content, dict) else content for content in contents or ()]
        named = dict.fromkeys(str(value).strip().replace("/", " | ").lower() for value in values if value)
        if named:
            yield str(name).lower(), tuple(named)


def _strings(found: object) -> tuple[str, ...]:
    """The texts of a list, or of an object's values."""
    items = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else [found]
    return tuple(text for item in items if (text := str(item).strip()))


def _needed(record: Record, name: str, place: str) -> Any:
    if name not in record:
        raise DataError(f"{place}: `{name}` is missing; there are {', '.join(record) or 'no fields'}.")
    return record[name]


def _read(path: str, kind: type, expected: str) -> Any:
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error}. It is a path of env webshop, relative to the working directory.") from error
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON: {error}. One of WebShop's own files was expected.") from error
    if not isinstance(found, kind):
        raise DataError(f"'{path}' holds {type(found).__name__}; {expected} was expected.")
    return found
