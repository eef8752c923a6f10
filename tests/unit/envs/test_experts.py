"""Experts' episodes: what the environment shows, answered in its own words."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll.config.models import EnvConfig
from drumroll.envs.experts import expert_episode
from drumroll.errors import PluginError
from drumroll.registry import REGISTRY
from drumroll.types import Task

GAMES = {
    "lake": ("frozen_lake", {"size": 5, "anywhere": True}),
    "bare lake": ("frozen_lake", {"chat": False, "rules": False, "tag": None, "moves": ["U", "D", "L", "R"]}),
    "one box": ("sokoban", {}),
    "two boxes": ("sokoban", {"width": 8, "height": 8, "boxes": 2, "max_actions_per_turn": 4, "symbols": "letters"}),
}


def played(kind, options, seed, replies):
    """The same replies through the environment as a run builds it."""
    entry = REGISTRY.lookup("env", kind)
    env = entry.target(entry.schema(EnvConfig).model_validate({**options, "kind": kind}))

    async def episode():
        return [await env.start(Task("t", data={"seed": seed})), *[await env.step(reply) for reply in replies]]

    return asyncio.run(episode())


@pytest.mark.parametrize("game", GAMES)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**9), detour=st.sampled_from([0.0, 0.3]))
def test_an_expert_wins_in_the_environments_own_words(game, seed, detour):
    kind, options = GAMES[game]
    episode = expert_episode(kind, options, seed, detour=detour)
    steps = played(kind, options, seed, [reply for _, reply in episode.turns])
    assert [step for step, _ in episode.turns] == steps[:-1]
    assert episode.last == steps[-1]
    assert (episode.success, episode.last.done) == (True, True)
    assert episode.last.metrics["invalid_actions"] == episode.last.metrics["malformed_replies"] == 0


def test_detours_are_a_share_of_the_moves_and_drawn_from_the_seed():
    def moves(detour):
        episodes = [expert_episode("frozen_lake", {"size": 6}, seed, detour=detour) for seed in range(60)]
        return sum(episode.last.metrics["moves"] for episode in episodes)

    least, more = moves(0.0), moves(0.2)
    assert moves(0.2) == more
    assert 1.2 * least < more < 2 * least  # a wasted move, and often one more to make up for it


def test_a_detour_is_never_as_good_as_the_experts_move():
    options = {"size": 5, "hole_ratio": 0.0, "chat": False, "rules": False, "anywhere": True}
    for seed in range(10):
        episode = expert_episode("frozen_lake", options, seed, detour=1.0, max_turns=8)
        boards = [step.state.replace("\n", "") for step, _ in episode.turns]
        places = [(divmod(board.index("P"), 5), divmod(board.index("G"), 5)) for board in boards]
        distances = [abs(row - goal_row) + abs(column - goal_column) for (row, column), (goal_row, goal_column) in places]
        assert distances == sorted(distances)
        assert not episode.success


def test_without_a_detour_the_way_is_the_shortest():
    for seed in range(20):
        assert expert_episode("frozen_lake", {"size": 8, "hole_ratio": 0.0}, seed).last.metrics["moves"] == 14


def test_an_episode_as_a_conversation_and_as_text():
    chat = expert_episode("frozen_lake", {"map": "4x4", "max_actions_per_turn": 4}, 0)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in chat.messages][1::2] == [
        "<answer>Down||Down||Right||Down</answer>",
        "<answer>Right||Right</answer>",
    ]
    bare = expert_episode(*GAMES["bare lake"], 0)
    assert "".join(shown + reply for shown, reply in bare.texts).count("\n>") == len(bare.turns)
    assert all(len(reply) == 1 for _, reply in bare.texts)


def test_turns_and_moves_are_limited():
    assert len(expert_episode("sokoban", {"min_pushes": 4}, 0, max_turns=2).turns) == 2
    short = expert_episode("sokoban", {"min_pushes": 4, "max_moves": 2}, 0)
    assert (len(short.turns), short.success, short.last.done) == (2, False, True)


def test_on_slippery_ice_the_expert_plans_again():
    episodes = [expert_episode("frozen_lake", {"slippery": True, "hole_ratio": 0.0}, seed) for seed in range(20)]
    assert all(episode.success for episode in episodes)
    assert max(episode.last.metrics["moves"] for episode in episodes) > 6


def test_there_is_no_episode_without_a_solution(tmp_path):
    levels = tmp_path / "levels.txt"
    levels.write_text("; 0\n######\n#$  .#\n#  @ #\n######\n")
    assert expert_episode("sokoban", {"levels": str(levels)}, 0) is None


def test_other_environments_have_no_expert():
    with pytest.raises(PluginError, match="only board games"):
        expert_episode("single_turn", {}, 0)


def test_an_expert_that_hesitates_waits_and_plays_on():
    options = {"chat": False, "rules": False, "tag": None, "moves": ["U", "D", "L", "R"], "wait": "W"}
    patient = expert_episode("sokoban", options, 5, hesitation=0.5)
    assert patient.success
    replies = [reply for _, reply in patient.turns]
    assert [reply for reply in replies if reply != "W"] == [reply for _, reply in expert_episode("sokoban", options, 5).turns]
    for (shown, reply), (next_shown, _) in pairwise(patient.turns):
        assert (shown.state == next_shown.state) == (reply == "W")
    assert patient.last.metrics["invalid_actions"] == 0
    with pytest.raises(PluginError, match="`wait`"):
        expert_episode("sokoban", options | {"wait": None}, 5, hesitation=0.5)


def test_a_name_for_waiting_must_be_its_own():
    with pytest.raises(ValidationError, match="different names"):
        expert_episode("frozen_lake", {"wait": "left"}, 1)
