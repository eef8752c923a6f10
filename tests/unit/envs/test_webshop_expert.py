"""The expert's demonstrations."""

import asyncio

import pytest

from drumroll.envs.webshop import WebShop, expert_episode
from drumroll.types import Task

FULL = WebShop.Config()
COMPACT = WebShop.Config(rules=False, chat=False, tag=None, page_size=5)


def replay(config, seed, replies):
    """The same replies in the environment: all that it says."""

    async def episode():
        env = WebShop(config)
        return [await env.start(Task("t", data={"seed": seed})), *[await env.step(reply) for reply in replies]]

    return asyncio.run(episode())


def replies(config, seed, detour=0.0):
    return [reply for _, reply in expert_episode(config, seed, detour).turns]


@pytest.mark.parametrize("config", [FULL, COMPACT])
def test_the_expert_buys_what_the_goal_asks_for(config):
    for seed in range(60):
        episode = expert_episode(config, seed)
        assert [*(step for step, _ in episode.turns), episode.last] == replay(config, seed, replies(config, seed))
        assert (episode.last.done, episode.last.success, episode.last.reward) == (True, True, 1.0)
        assert episode.last.metrics["invalid_actions"] == episode.last.metrics["malformed_replies"] == 0
        assert 5 <= len(episode.turns) <= 8


def test_the_replies_are_in_the_environments_own_form():
    assert replies(WebShop.Config(rules=False, tag=None), 39) == ["s mug matte thick", "1", "teal", "xl", "b"]
    assert replies(FULL, 39)[0] == "<answer>search[mug matte thick]</answer>"
    assert replies(FULL, 39)[-1] == "<answer>click[Buy Now]</answer>"


def test_a_compact_episode_is_short():
    lengths = [sum(len(shown) + len(reply) for shown, reply in expert_episode(COMPACT, seed).texts) for seed in range(100)]
    assert sum(lengths) / len(lengths) < 350
    assert max(lengths) < 600


def test_it_leafs_through_the_pages_where_it_must():
    config = WebShop.Config(rules=False, tag=None, page_size=1)
    assert expert_episode(config, 0).success
    assert any("n" in replies(config, seed) for seed in range(10))


def test_a_search_that_cannot_succeed_is_made_again():
    """With one result only, the right product may be out of reach: the expert tries its title, and buys what there is."""
    config = WebShop.Config(rules=False, tag=None, max_results=1)
    episodes = [replies(config, seed) for seed in range(10)]
    assert any("h" in episode for episode in episodes)
    assert all(episode[-1] == "b" for episode in episodes)


def test_detours_are_the_same_for_the_same_seed_and_make_it_worse():
    assert expert_episode(COMPACT, 3, detour=0.5) == expert_episode(COMPACT, 3, detour=0.5)
    results = {}
    for detour in (0.0, 0.3, 0.8):
        ends = [expert_episode(COMPACT, seed, detour).last for seed in range(100)]
        assert all(end.done for end in ends)
        assert not any(end.metrics["invalid_actions"] for end in ends)
        results[detour] = (sum(end.success for end in ends) / 100, sum(end.metrics["actions"] for end in ends) / 100)
    assert results[0.0][0] == 1.0
    assert 0.2 < results[0.3][0] < 0.7
    assert results[0.8][0] < 0.1
    assert results[0.0][1] < results[0.3][1]
