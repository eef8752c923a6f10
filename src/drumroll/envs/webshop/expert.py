"""Demonstrations: a buyer who knows what to look for, and who slips when asked to."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from random import Random

from drumroll.envs.actions import write_actions
from drumroll.envs.experts import ExpertEpisode
from drumroll.envs.webshop.catalogue import Goal, Product
from drumroll.envs.webshop.reward import fits_option, has_attribute, type_match
from drumroll.envs.webshop.shop import open_shop
from drumroll.envs.webshop.site import Choose, Click, Command, Open, Search
from drumroll.envs.webshop.visit import Visit, VisitConfig


def expert_episode(config: VisitConfig, seed: int, detour: float = 0.0) -> ExpertEpisode:
    """The seed's goal as the expert shops for it, in the environment's own words.

    The expert searches for the kind of thing with its attributes, leafs to the first product that fits and is cheap enough, looks at its
    features where the results do not say enough, chooses the options, and buys.

    `detour` is the probability of each slip: a search without the attributes, of which it sees the first page; opening a wrong product, to
    come back from it or to buy it; an option that is forgotten, wrong, or wrong at first.

    Example, compact: `[reply for _, reply in expert_episode(config, 39).turns] == ["s mug matte thick", "1", "teal", "xl", "b"]`.
    """
    shop = open_shop(config.source)
    visit = Visit(config, shop, shop.goal(seed))
    step = visit.begin()
    turns = []
    for command in _shopping(visit, Random(f"detour {seed}"), detour):
        reply = write_actions([visit.words.write(command, visit.view)], config)
        turns.append((step, reply))
        step = visit.answer(reply)
        if step.done:
            break
    return ExpertEpisode(tuple(turns), step)


def _shopping(visit: Visit, rng: Random, detour: float) -> Iterator[Command]:
    """What the expert does, one command after another; the visit has moved on when the next one is asked for."""
    goal, products = visit.goal, visit.shop.products
    product = None
    if rng.random() < detour:
        yield Search(goal.wanted.query)
        product = _seen(visit)
    for words in (f"{goal.wanted.query} {' '.join(goal.attributes)}", goal.wanted.title):
        if product is None:
            if visit.view.place != "search":
                yield Click.HOME
            yield Search(words)
            product = yield from _leaf(visit)
    if not visit.view.hits:
        return
    results = visit.view.shown(visit.config.page_size)
    if product is None:
        product = results[0]
    wrong = [other for other in results if not fits(products[other], goal)]
    if wrong and rng.random() < detour:
        yield Open(rng.choice(wrong))
        if rng.random() < 0.5:
            yield Click.PREV
            yield Open(product)
    else:
        yield Open(product)
    if any(attribute.lower() not in visit.words.result(products[product]).lower() for attribute in goal.attributes):
        yield Click.FEATURES
        yield Click.PREV
    yield from _choices(products[visit.view.product], goal, rng, detour)
    yield Click.BUY


def _leaf(visit: Visit) -> Generator[Command, None, int | None]:
    """Go on to the first page with a product that fits; the product, or None when no page has one."""
    while (product := _seen(visit)) is None and Click.NEXT in visit.words.names(visit.view).values():
        yield Click.NEXT
    return product


def _seen(visit: Visit) -> int | None:
    """The first product on this page that fits."""
    shown = visit.view.shown(visit.config.page_size)
    return next((product for product in shown if fits(visit.shop.products[product], visit.goal)), None)


def _choices(product: Product, goal: Goal, rng: Random, detour: float) -> Iterator[Choose]:
    """The wanted value of each group that has one, unless there is a slip."""
    for group, values in product.options.items():
        right = next((value for value in values if any(fits_option(group, value, wanted) for wanted in goal.options)), None)
        if right is None:
            continue
        slip = rng.choice(["forgotten", "wrong", "wrong at first"]) if rng.random() < detour else ""
        if slip.startswith("wrong"):
            yield Choose(group, rng.choice([value for value in values if value != right] or values))
        if slip in ("", "wrong at first"):
            yield Choose(group, right)


def fits(product: Product, goal: Goal) -> bool:
    """Whether buying it, with the right options, is worth 1."""
    values = [(group, value) for group, values in product.options.items() for value in values]
    return (
        product.price <= goal.budget
        and type_match(product, goal.wanted) == 1.0
        and all(has_attribute(product, wanted) for wanted in goal.attributes)
        and all(any(fits_option(group, value, wanted) for group, value in values) for wanted in goal.options)
    )
