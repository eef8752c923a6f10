"""WebShop's own files, in small."""

import asyncio
import json

import pytest

from drumroll.envs.webshop import WebShop, expert_episode
from drumroll.envs.webshop.shop import _open, open_shop
from drumroll.errors import DataError
from drumroll.types import Task

SHOE = {
    "asin": "B08SHOE001",
    "name": "Acme Running Shoe for Men",
    "category": "fashion",
    "query": "Running Shoe ",
    "product_category": "Clothing › Men › Shoes",
    "full_description": "A shoe with arch support.",
    "small_description": ["Rubber sole", "Machine wash"],
    "pricing": "$45.50",
    "customization_options": {
        "Size": [{"value": "7", "is_selected": False}, {"value": "7.5"}],
        "Color": [{"value": "Black/White", "image": None}, {"value": "Red"}],
        "style": None,
    },
    "average_rating": 4.4,
    "images": ["x.jpg"],
}
SOAP = {
    "asin": "B08SOAP001",
    "name": "Cedar Hand Soap",
    "query": "soap",
    "product_category": "Beauty › Bath › Soap",
    "small_description": "Fragrance free",
    "pricing": "$3.99$1,009.00",
    "customization_options": {},
    "full_description": None,
}
BARE = {"asin": "B08BARE001", "name": "Plain Thing"}
PRODUCTS = [SHOE, SOAP, BARE, {**SOAP, "name": "Again"}, {"asin": "nan", "name": "none"}]
ATTRIBUTES = {
    "B08SHOE001": {
        "attributes": ["rubber sole", "arch support", "long lasting"],
        "instruction": "Find me a running shoe with rubber sole",
        "instruction_attributes": ["rubber sole"],
    },
    "B08SOAP001": {"attributes": ["fragrance free"], "instruction": None},
    "B0GONE0001": {"attributes": ["x"]},
}
GOALS = {
    "B08SHOE001": [
        {
            "instruction": "i want a long lasting shoe in size 7 that is black and white.",
            "instruction_attributes": ["long lasting"],
            "instruction_options": ["black | white", "7"],
        },
        {"instruction": "nothing in particular", "instruction_attributes": [], "instruction_options": []},
    ],
    "B08SOAP001": [{"instruction": "i need soap", "instruction_attributes": ["fragrance free"], "instruction_options": {}}],
}


@pytest.fixture
def paths(tmp_path):
    def write(**files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return {name: str(tmp_path / f"{name}.json") for name in files}

    return write


def shop_of(options):
    return open_shop(WebShop.Config(**options).source)


def test_products_are_read_as_webshop_reads_them(paths):
    shop = shop_of(paths(products=PRODUCTS, attributes=ATTRIBUTES))
    shoe, soap, bare = shop.products
    assert (shoe.title, shoe.query, shoe.price, shoe.price_tag) == ("Acme Running Shoe for Men", "running shoe", 45.5, "$45.50")
    assert shoe.options == {"size": ("7", "7.5"), "color": ("black | white", "red")}
    assert shoe.features == ("Rubber sole", "Machine wash")
    assert shoe.attributes == ("rubber sole", "arch support", "long lasting")
    assert shoe.rating == "4.4"
    assert (soap.title, soap.features, soap.description, soap.price_tag) == (
        "Cedar Hand Soap",
        ("Fragrance free",),
        "",
        "$3.99 to $1009.00",
    )
    assert 3.99 <= soap.price <= 1009
    assert (bare.price, bare.options, bare.attributes) == (100.0, {}, ())


def test_goals_of_people(paths):
    shop = shop_of(paths(products=PRODUCTS, attributes=ATTRIBUTES, goals=GOALS))
    goals = {shop.goal(seed).wanted.asin: shop.goal(seed) for seed in range(2)}
    assert len(shop.goals) == 2
    goal = goals["B08SHOE001"]
    assert goal.attributes == ("long lasting",)
    assert goal.options == ("black | white", "7")
    assert goal.budget in (60.0, 70.0, 80.0)
    assert (
        goal.instruction == f"i want a long lasting shoe in size 7 that is black and white, and price lower than {goal.budget:.2f} dollars"
    )


def test_goals_from_the_attributes_have_every_choice_of_options(paths):
    shop = shop_of(paths(products=PRODUCTS, attributes=ATTRIBUTES))
    goals = [shop.goal(seed) for seed in range(len(shop.goals))]
    assert sorted(goal.options for goal in goals) == sorted([(c, s) for c in ("black | white", "red") for s in ("7", "7.5")])
    assert all("with color: " in goal.instruction and ", and size: " in goal.instruction for goal in goals)


def test_goals_and_products_are_the_same_for_the_same_seed(paths):
    files = paths(products=PRODUCTS, attributes=ATTRIBUTES)
    one, again = (_open.__wrapped__(WebShop.Config(**files).source) for _ in range(2))
    assert one.products == again.products
    assert [one.goal(seed) for seed in range(4)] == [again.goal(seed) for seed in range(4)]


@pytest.mark.parametrize("rules", [True, False])
def test_an_episode_with_a_goal_of_people(paths, rules):
    config = WebShop.Config(**paths(products=PRODUCTS, attributes=ATTRIBUTES, goals=GOALS), rules=rules, tag=None)
    seed = next(seed for seed in range(2) if open_shop(config.source).goal(seed).options)

    async def episode():
        env = WebShop(config)
        step = await env.start(Task("t", data={"seed": seed}))
        for _, reply in expert_episode(config, seed).turns:
            step = await env.step(reply)
        return step

    last = asyncio.run(episode())
    assert (last.done, last.reward, last.success) == (True, 1.0, True)
    replies = [reply for _, reply in expert_episode(config, seed).turns]
    assert ("click[Features]" in replies) == rules, "the title does not say that it lasts; compact results show attributes"


def test_a_large_shop_searches_in_a_thread(paths, monkeypatch):
    monkeypatch.setattr("drumroll.envs.webshop.env.LARGE", 1)
    config = WebShop.Config(**paths(products=PRODUCTS, attributes=ATTRIBUTES), tag=None)

    async def episode():
        env = WebShop(config)
        await env.start(Task("t", data={"seed": 0}))
        return await env.step("search[soap]")

    assert "B08SOAP001" in asyncio.run(episode()).messages[0]["content"]


def test_an_option_with_the_name_of_a_button_or_of_another_option_is_named_with_its_group(paths):
    odd = {**SHOE, "customization_options": {"a": ["Features", "x"], "b": ["x", "y"]}}
    config = WebShop.Config(**paths(products=[odd], attributes=ATTRIBUTES), tag=None)

    async def episode():
        env = WebShop(config)
        await env.start(Task("t", data={"seed": 0}))
        await env.step("search[shoe]")
        await env.step("click[B08SHOE001]")
        await env.step("click[x]")
        return (await env.step("click[b: x]")).messages[0]["content"]

    shown = asyncio.run(episode())
    assert "a: [a: features] [x] (chosen: x)" in shown
    assert "b: [b: x] [y] (chosen: x)" in shown


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"products": "{", "attributes": {}}, r"products.json' is not JSON"),
        ({"products": {}, "attributes": {}}, "holds dict; a list of products was expected"),
        ({"products": [], "attributes": {}}, "holds no product"),
        ({"products": [3], "attributes": {}}, "product 0: int was found"),
        ({"products": [{"name": "x"}], "attributes": {}}, "product 0: `asin` is missing; there are name"),
        ({"products": [{"asin": "B1"}], "attributes": {}}, "product 0: `name` is missing"),
        ({"products": [{**BARE, "pricing": {}}], "attributes": {}}, "`pricing` is {}"),
        ({"products": [{**BARE, "customization_options": ["x"]}], "attributes": {}}, "`customization_options` is"),
        ({"products": PRODUCTS, "attributes": []}, "holds list; an object whose keys"),
        ({"products": PRODUCTS, "attributes": {}}, "holds no goal"),
        ({"products": PRODUCTS, "goals": {"B08SHOE001": [{"instruction": "x"}]}}, "instruction 0: `instruction_attributes` is missing"),
    ],
)
def test_broken_files_are_named_with_what_is_wrong(paths, files, message):
    with pytest.raises(DataError, match=message):
        shop_of(paths(**files))


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(DataError, match="cannot be read"):
        shop_of({"products": "/nowhere/items.json", "attributes": "/nowhere/ins.json"})
