"""WebShop as an environment: pages, actions, budgets, rewards, success; in full and compact, as chat and as text."""

import asyncio

import pytest
from pydantic import ValidationError

from drumroll.config.models import EnvConfig
from drumroll.envs.webshop.expert import expert_episode
from drumroll.envs.webshop.shop import open_shop
from drumroll.errors import DataError
from drumroll.registry import REGISTRY
from drumroll.types import Task

COMPACT = {"rules": False, "chat": False, "tag": None}
BARE = {"tag": None}


def build(**options):
    entry = REGISTRY.lookup("env", "webshop")
    return entry.target(entry.schema(EnvConfig)(kind="webshop", **options))


def play(replies, seed=0, **options):
    """All steps of an episode."""

    async def episode():
        env = build(**options)
        steps = [await env.start(Task("t", data={"seed": seed}))]
        for reply in replies:
            steps.append(await env.step(reply))
        await env.close()
        return steps

    return asyncio.run(episode())


def goal_of(seed=0, **options):
    return open_shop(build(**options).config.source).goal(seed)


def page(step):
    return step.messages[0]["content"]


def test_an_episode_in_full_leads_from_the_search_page_to_a_purchase():
    goal = goal_of()
    replies = [reply for _, reply in expert_episode(build().config, 0).turns]
    first, results, product, *_, last = play(replies)
    assert goal.instruction in page(first)
    assert "search[" in page(first)
    assert "<answer>" in page(first), "the rules say how to answer"
    assert page(results).count("\n[B") - 1 == 10, "products, below the button that leads back"
    assert "[Next >]" in page(results)
    assert "[< Prev]" not in page(results)
    for shown in (goal.wanted.title, "color: [", f"{list(goal.wanted.options)[1]}: [", "[Description] [Features] [Buy Now]"):
        assert shown in page(product)
    assert (last.done, last.reward, last.success) == (True, 1.0, True)
    assert last.metrics == {
        "actions": 5,
        "invalid_actions": 0,
        "malformed_replies": 0,
        "r_att": 1,
        "r_opt": 1,
        "r_price": 1,
        "r_type": 1,
    }


def test_pages_lead_back_and_forth():
    goal = goal_of()
    target = next(i for i, p in enumerate(open_shop(build().config.source).products) if p == goal.wanted)
    steps = play(
        [
            f"search[{goal.wanted.title}]",
            "click[next >]",
            "CLICK[< PREV]",
            f"click[{goal.wanted.asin}]",
            "click[Features]",
            "click[< Prev]",
            "click[Description]",
            "click[< Prev]",
            "click[< Prev]",
            "click[Back to Search]",
        ],
        **BARE,
    )
    search, first, second, again, product, features, product_2, description, product_3, results, home = steps
    assert page(first) != page(second)
    assert page(again) == page(first) == page(results)
    assert goal.wanted.features[-1] in page(features)
    assert goal.wanted.description in page(description)
    assert page(product) == page(product_2) == page(product_3)
    assert page(home) in page(search)
    assert [s.state for s in (again, results)] == [first.state] * 2
    assert (product.state, home.state) == (product_3.state, search.state)
    assert product.state.startswith(f"product {target}")
    assert len({s.state for s in (search, first, second, product, features, description)}) == 6


def test_options_are_kept_on_the_way_to_a_sub_page_and_can_be_changed():
    goal = goal_of()
    color, other = goal.wanted.options["color"][:2]
    there = [f"search[{goal.wanted.title}]", f"click[{goal.wanted.asin}]"]
    steps = play([*there, f"click[{color}]", "click[Features]", "click[< Prev]", f"click[{other}]"], **BARE)
    assert f"(chosen: {color})" in page(steps[3])
    assert page(steps[5]) == page(steps[3])
    assert f"(chosen: {other})" in page(steps[6])
    assert f"(chosen: {color})" not in page(steps[6])


def test_a_purchase_alone_is_no_success():
    goal = goal_of()
    last = play([f"search[{goal.wanted.title}]", f"click[{goal.wanted.asin}]", "click[Buy Now]"], **BARE)[-1]
    assert last.done
    assert last.success is False
    assert last.reward == pytest.approx(3 / 5), "two attributes and the price, of two attributes, two options and the price"
    assert last.metrics["r_opt"] == 0


@pytest.mark.parametrize("action", ["click[Buy Now]", "click[nothing]", "dance", "search[]", "click[B000000000]", "x" * 5000])
def test_an_invalid_action_is_a_counted_no_op_that_shows_the_page_again(action):
    first, second = play([action], **BARE)
    assert not second.done
    assert page(second).endswith(page(first).split("\n\n")[1])
    assert page(second).startswith("Nothing happened")
    assert len(page(second)) < 500
    assert (second.reward, second.success) == (0.0, False)
    assert (second.metrics["actions"], second.metrics["invalid_actions"]) == (1, 1)
    assert second.state == first.state


def test_searching_is_possible_on_the_search_page_only():
    _, results, again = play(["search[mug]", "search[bag]"], **BARE)
    assert again.metrics["invalid_actions"] == 1
    assert page(again).endswith(page(results))


def test_a_malformed_reply_costs_the_penalty_and_a_step_but_is_no_action():
    steps = play(["I want a mug", "<answer>search[mug]</answer>"], format_penalty=0.25, max_steps=2)
    assert steps[1].reward == -0.25
    assert (steps[1].metrics["malformed_replies"], steps[1].metrics["actions"]) == (1, 0)
    assert "<answer>" in page(steps[1])
    assert (steps[2].done, steps[2].reward, steps[2].success) == (True, 0.0, False)


def test_the_penalty_does_not_take_the_success_away():
    turns = [reply for _, reply in expert_episode(build(**BARE).config, 0).turns]
    last = play(["||".join(turns)], **BARE, max_actions_per_turn=5)[-1]
    assert (last.reward, last.success) == (1.0, True)
    last = play(["||".join([*turns, "click[more]"])], **BARE, max_actions_per_turn=5, format_penalty=0.5)[-1]
    assert (last.reward, last.success) == (0.5, True)


def test_the_budget_of_actions_ends_an_episode_without_a_purchase():
    steps = play(["search[mug]", "click[Back to Search]", "search[bag]"], **BARE, max_steps=3)
    assert [s.done for s in steps] == [False, False, False, True]
    assert (steps[-1].reward, steps[-1].success) == (0.0, False)
    assert steps[-1].metrics["r_type"] == 0
    four = "search[mug]||click[Back to Search]||search[bag]||click[Back to Search]"
    several = play([four], **BARE, max_steps=3, max_actions_per_turn=9)[-1]
    assert several.done
    assert several.metrics["actions"] == 3


def test_a_search_without_results_says_so():
    assert "Nothing was found." in page(play(["search[qqq zzz]"], **BARE)[1])
    assert "Nothing was found." in page(play(["search[!?]"], **BARE)[1])
    assert play(["s qqq"], **COMPACT)[1].prompt == "\n-\n>"


def test_compact_pages_hold_everything_in_a_few_characters():
    goal = goal_of(**COMPACT)
    replies = [reply for _, reply in expert_episode(build(**COMPACT).config, 0).turns]
    first, results, *_ = play(replies, **COMPACT)
    assert first.prompt == f"{goal.brief}\n>"
    for wanted in (goal.wanted.query, *goal.attributes, *goal.options, f"<{goal.budget:g}"):
        assert wanted in goal.brief
    lines = results.prompt.strip("\n>").split("\n")
    assert [line.split()[0] for line in lines] == [str(n) for n in range(1, 11)]
    assert all(line.split()[-1].isdigit() for line in lines), "each has a price"
    color = goal.options[0]
    pages = [step.prompt.strip("\n>").split("\n") for step in play(replies, **COMPACT) if step.prompt]
    _, *groups = next(lines for lines in pages if len(lines) == 3 and color in lines[1].split())
    assert [line.split() for line in groups] == [list(values) for values in goal.wanted.options.values()]


def test_a_compact_choice_is_answered_in_short_and_a_mistake_shows_the_page_again():
    *before, _ = (reply for _, reply in expert_episode(build(**COMPACT).config, 0).turns)
    steps = play([*before, "Q", "p", "n", "h"], **COMPACT)
    chosen, wrong, results = steps[-5], steps[-4], steps[-3]
    color, value = goal_of(**COMPACT).options
    assert chosen.prompt == f"\n{color} {value}\n>"
    assert wrong.prompt.startswith("\n!\n")
    assert f"{color}*" in wrong.prompt
    assert f"{value}*" in wrong.prompt
    assert results.prompt.startswith("\n1 ")
    assert steps[-1].prompt == f"\n{goal_of(**COMPACT).brief}\n>"


@pytest.mark.parametrize("rules", [True, False])
def test_chat_and_text_show_the_same(rules):
    chat, text = play(["x"], **BARE, rules=rules), play(["x"], **BARE, rules=rules, chat=False)
    for one, other in zip(chat, text, strict=True):
        assert one.messages[0]["role"] == "user"
        assert page(one) == other.prompt.removesuffix("\n>").removeprefix("\n")


def test_pages_have_as_many_results_as_asked_for():
    steps = play(["s mug", "n", "n"], **COMPACT, page_size=4, max_results=7)
    assert steps[1].prompt.count("mug") == 4
    assert steps[2].prompt.count("mug") == 3
    assert steps[3].prompt.startswith("\n!"), "there is no third page"


def test_many_episodes_start_at_once():
    async def episodes():
        envs = [build(catalogue_seed=91) for _ in range(200)]
        return await asyncio.gather(*(env.start(Task("t", data={"seed": i % 2})) for i, env in enumerate(envs)))

    steps = asyncio.run(episodes())
    assert len({page(step) for step in steps}) == 2, "a group shares its seed, and so its goal"


def test_a_task_needs_a_seed_that_has_a_goal():
    with pytest.raises(DataError, match="no `seed`"):
        asyncio.run(build().start(Task("t")))
    with pytest.raises(DataError, match=r"seed 99999999: this webshop has \d+ goals"):
        play([], seed=99_999_999)


@pytest.mark.parametrize("options", [{"products": "p.json"}, {"goals": "g.json"}, {"num_products": 10}, {"max_steps": 0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValidationError):
        build(**options)
