"""The catalogue that is made from a seed: it is the same everywhere, holds what goals ask for, and is no toy."""

import hashlib
import os
import subprocess
import sys
from random import Random

import pytest

from drumroll.envs.webshop.expert import fits
from drumroll.envs.webshop.reward import SIMILAR, fits_option, has_attribute, score, type_match, word_similarity
from drumroll.envs.webshop.shop import open_shop
from drumroll.envs.webshop.site import Choose, Search
from drumroll.envs.webshop.synthetic import KINDS, SyntheticGoals, make_products
from drumroll.envs.webshop.visit import Visit, VisitConfig

CONFIG = VisitConfig(tag=None, max_steps=15)
SHOP = open_shop(CONFIG.source)
SOME_GOALS = range(200)

FINGERPRINT = """
import hashlib
from drumroll.envs.webshop.shop import Source, open_shop
shop = open_shop(Source(1000, 0))
shown = repr([shop.products, [shop.goal(seed) for seed in range(50)], [shop.index.search(shop.goal(s).instruction, 50) for s in range(50)]])
print(hashlib.sha256(shown.encode()).hexdigest())
"""


def test_it_is_the_same_in_every_process():
    command = [sys.executable, "-c", FINGERPRINT]
    theirs = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout.strip()
        for seed in ("1", "2")
    ]
    goals = [SHOP.goal(seed) for seed in range(50)]
    shown = repr([SHOP.products, goals, [SHOP.index.search(goal.instruction, 50) for goal in goals]])
    assert theirs == [hashlib.sha256(shown.encode()).hexdigest()] * 2


def test_another_seed_makes_another_one():
    assert make_products(100, 1) != make_products(100, 2)
    products = make_products(1000, 0)
    assert SyntheticGoals(products, 1)[0] != SyntheticGoals(products, 2)[0]


@pytest.mark.parametrize("number", [50, 137, 1000, 1003, 3000])
def test_it_has_as_many_products_as_asked_for(number):
    products = make_products(number, 0)
    assert len(products) == len({product.asin for product in products}) == number
    assert len(SyntheticGoals(products, 0)) > 0


def test_every_product_has_two_attributes_two_option_groups_and_a_place():
    for product in SHOP.products:
        assert len(set(product.attributes)) == 2
        assert [len(values) == len(set(values)) >= 4 for values in product.options.values()] == [True, True]
        assert product.product_category.count("›") == 2
        assert product.price > 0


def test_a_product_has_the_attributes_that_it_is_said_to_have_and_no_others():
    everything = {attribute for kind in KINDS for attribute in kind.attributes}
    for product in SHOP.products:
        assert {attribute for attribute in everything if has_attribute(product, attribute)} == set(product.attributes)


def test_attributes_and_option_values_are_never_taken_for_one_another():
    for kind in KINDS:
        assert all(word_similarity(a, b) <= SIMILAR for a in kind.attributes for b in kind.attributes if a != b)
    for product in SHOP.products:
        values = [(group, value) for group, values in product.options.items() for value in values]
        assert all(fits_option(group, value, other) == (value == other) for group, value in values for _, other in values)


def test_another_kind_of_thing_is_worth_nothing():
    one_of_each = {product.query: product for product in SHOP.products}.values()
    for bought in one_of_each:
        for wanted in one_of_each:
            assert type_match(bought, wanted) == float(bought is wanted)


def test_no_two_seeds_have_the_same_goal():
    assert len(SHOP.goals) > 8000
    goals = [SHOP.goal(seed) for seed in range(len(SHOP.goals))]
    assert len({(goal.wanted.asin, goal.options) for goal in goals}) == len(goals)


def test_the_wanted_productfits_and_instructions_say_everything():
    phrasings = set()
    for seed in SOME_GOALS:
        goal = SHOP.goal(seed)
        groups = goal.wanted.options
        assert score(goal.wanted, dict(zip(groups, goal.options, strict=True)), goal).reward == 1.0
        for said in (goal.wanted.query, *goal.attributes, *goal.options, f"{goal.budget:g}"):
            assert said in goal.instruction
            assert said in goal.brief
        phrasings.add(goal.instruction[:4])
    assert len(phrasings) >= 4


def test_every_goal_has_distractors_that_differ_in_price_or_attributes_only():
    for seed in SOME_GOALS:
        goal = SHOP.goal(seed)
        same_kind = [p for p in SHOP.products if p.query == goal.wanted.query and not fits(p, goal)]
        for other in same_kind:
            assert other.product_category == goal.wanted.product_category
            assert {group: set(values) for group, values in other.options.items()} == {g: set(v) for g, v in goal.wanted.options.items()}
        too_dear = [p for p in same_kind if set(p.attributes) == set(goal.attributes)]
        lacking = [p for p in same_kind if p.price <= goal.budget and len(set(p.attributes) & set(goal.attributes)) == 1]
        assert len(too_dear) >= 3
        assert all(p.price > goal.budget for p in too_dear), "'less than' and 'at most' mean the same here"
        assert lacking


def test_what_the_goal_asks_for_is_found_on_the_pages():
    for seed in range(20):
        goal = SHOP.goal(seed)
        visit = Visit(CONFIG, SHOP, goal)
        visit.begin()
        results = visit.answer(f"search[{goal.wanted.query} {' '.join(goal.attributes)}]")
        pages = [results]
        while f"[{goal.wanted.asin}]" not in pages[-1].messages[0]["content"]:
            pages.append(visit.answer("click[Next >]"))
        product = visit.answer(f"click[{goal.wanted.asin}]").messages[0]["content"]
        assert f"${goal.wanted.price:.2f}" in product
        assert all(attribute in product.lower() for attribute in goal.attributes)
        assert all(f"[{value}]" in product for value in goal.options)


def finish(visit, actions):
    visit.begin()
    return [visit.answer(action) for action in actions][-1]


def buy_first(seed, with_options):
    """Search for the instruction, open the first result, choose what the instruction says, or nothing, and buy."""
    goal = SHOP.goal(seed)
    first = SHOP.products[SHOP.index.search(goal.instruction, 1)[0]]
    options = [f"click[{value}]" for value in goal.options if with_options and any(value in group for group in first.options.values())]
    return finish(Visit(CONFIG, SHOP, goal), [f"search[{goal.instruction}]", f"click[{first.asin}]", *options, "click[Buy Now]"])


@pytest.mark.parametrize("with_options", [False, True])
def test_to_search_and_buy_the_first_is_right_in_at_most_four_of_ten(with_options):
    verdicts = [buy_first(seed, with_options) for seed in SOME_GOALS]
    assert sum(verdict.success for verdict in verdicts) / len(verdicts) <= 0.40
    assert all(verdict.metrics["r_type"] == 1 for verdict in verdicts), "it is the right kind of thing"


@pytest.mark.parametrize("only_options", [False, True])
def test_random_play_is_right_in_at_most_one_of_twenty(only_options):
    """Clicks at random; or a random product, with a random value of each option, so that luck alone decides."""
    wins = 0
    for seed in SOME_GOALS:
        rng = Random(seed)
        visit = Visit(CONFIG, SHOP, SHOP.goal(seed))
        step = visit.begin()
        while not step.done:
            command = Search(visit.goal.instruction)
            if visit.view.place != "search":
                named = list(visit.words.names(visit.view).values())
                command = rng.choice(named)
                if only_options and visit.view.place == "product":
                    open_groups = [c for c in named if isinstance(c, Choose) and c.group not in visit.view.chosen]
                    command = rng.choice(open_groups) if open_groups else named[-1]
            step = visit.answer(visit.words.write(command, visit.view))
        wins += step.success
    assert wins / len(SOME_GOALS) <= 0.05
