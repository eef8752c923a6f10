"""WebShop's reward, part by part."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.envs.webshop.catalogue import Goal, Product
from drumroll.envs.webshop.reward import fits_option, has_attribute, score, type_match, word_similarity

MUG = Product(
    "B1",
    "Norwell Soft Mug, 2 Pack",
    20.0,
    query="mug",
    product_category="Home › Kitchen › Cups",
    attributes=("soft", "long lasting"),
    features=("Dishwasher safe.",),
    description="It keeps tea warm.",
    options={"color": ("red", "dark blue"), "size": ("7", "7.5")},
)
GOAL = Goal("", "", MUG, ("soft", "warm"), ("dark blue", "7"), 25.0)
RIGHT = {"color": "dark blue", "size": "7"}


def test_a_purchase_that_fits_is_worth_exactly_one():
    verdict = score(MUG, RIGHT, GOAL)
    assert verdict.reward == 1.0
    assert verdict.parts() == {"r_att": 1.0, "r_opt": 1.0, "r_price": 1.0, "r_type": 1.0}


@pytest.mark.parametrize(
    ("product", "chosen", "reward", "part"),
    [
        (MUG, {}, 3 / 5, ("r_opt", 0.0)),
        (MUG, {"color": "dark blue"}, 4 / 5, ("r_opt", 0.5)),
        (MUG, {"color": "dark blue", "size": "7.5"}, 4 / 5, ("r_opt", 0.5)),
        (replace(MUG, price=25.0), RIGHT, 1.0, ("r_price", 1.0)),
        (replace(MUG, price=25.01), RIGHT, 4 / 5, ("r_price", 0.0)),
        (replace(MUG, description=""), RIGHT, 4 / 5, ("r_att", 0.5)),
        (replace(MUG, title="Something Else"), RIGHT, 0.0, ("r_type", 0.0)),
    ],
)
def test_each_part_counts(product, chosen, reward, part):
    verdict = score(product, chosen, GOAL)
    assert verdict.reward == pytest.approx(reward)
    assert verdict.parts()[part[0]] == part[1]


def test_a_goal_without_options_is_about_the_rest():
    assert score(MUG, {"color": "red"}, replace(GOAL, options=())).reward == 1.0


def test_a_value_that_nobody_asked_for_is_no_match():
    assert score(MUG, {"color": "red", "size": "7"}, GOAL).r_opt == 0.5


@pytest.mark.parametrize(
    ("title", "query", "category", "expected"),
    [
        ("Other Mug", "cup", "", 1.0),  # a half of the nouns
        ("Plate", "mug", "Home › Kitchen › Cups", 0.0),  # none, whatever the query
        ("Mug", "mug", "", 1.0),
    ],
)
def test_the_type_is_told_by_the_nouns_of_the_title(title, query, category, expected):
    assert type_match(Product("B2", title, 1.0, query=query, product_category=category), MUG) == expected


def test_few_nouns_in_common_need_the_query_or_the_category_to_agree():
    names = [f"noun{letter}" for letter in "abcdefghijk"]
    wanted = replace(MUG, title=" ".join(names[:10]))
    tenth = replace(MUG, title=names[0], query="other", product_category="Else › Where › There")
    assert type_match(tenth, wanted) == 0.5
    assert type_match(replace(tenth, query="MUG"), wanted) == 1.0
    assert type_match(replace(tenth, product_category="Kitchen › Home"), wanted) == 1.0
    assert type_match(replace(tenth, product_category="Home › Garden"), wanted) == 0.5
    assert type_match(replace(tenth, title=" ".join(names[:3])), wanted) == 1.0
    assert type_match(replace(tenth, query="mug"), replace(MUG, title=" ".join(names))) == 0.1


def test_an_attribute_may_stand_in_any_text_or_be_said_in_more_words():
    assert has_attribute(MUG, "Long-Lasting")
    assert has_attribute(MUG, "dishwasher safe")
    assert has_attribute(MUG, "lasting")
    assert not has_attribute(MUG, "hard")


def test_sizes_must_be_equal_and_other_options_similar():
    assert not fits_option("Size", "x large", "large")
    assert fits_option("color", "dark blue", "blue")
    assert not fits_option("color", "black", "blue")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("blue", "dark blue", 100),
        ("Blue!", "blue", 100),
        ("", "blue", 0),
        ("abc", "xyz", 0),
        ("pack of 2", "pack of 4", 89),
        ("kitten", "sitting", 62),
    ],
)
def test_word_similarity(one, other, expected):
    assert word_similarity(one, other) == expected


TEXT = st.text("abc 12", max_size=12)


@given(TEXT, TEXT)
def test_similarity_is_symmetric_and_bounded(one, other):
    assert word_similarity(one, other) == word_similarity(other, one)
    assert 0 <= word_similarity(one, other) <= 100
    assert word_similarity(one, one) == (100 if one.strip() else 0)


@given(
    st.lists(st.sampled_from(["soft", "warm", "hard"]), max_size=3),
    st.lists(st.sampled_from(["red", "dark blue", "7", "8"]), max_size=3),
    st.dictionaries(st.sampled_from(["color", "size", "style"]), st.sampled_from(["red", "dark blue", "7", "8"])),
    st.floats(1, 50),
)
def test_a_reward_is_one_only_if_every_part_is(attributes, options, chosen, price):
    verdict = score(replace(MUG, price=price), chosen, replace(GOAL, attributes=tuple(attributes), options=tuple(options)))
    assert 0 <= verdict.reward <= 1
    assert (verdict.reward == 1) == all(part == 1 for part in verdict.parts().values())
