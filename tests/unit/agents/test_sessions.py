"""Calls of an agent as a tree of tokens: what was sampled stays, and is trained on exactly once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import BOS, EOS, LEASE, PAD, make_tokenizer, sampled_ids

from drumroll.agents.protocol import ChatRequest, Refusal, Reply, RewardPost, make_reply, read_chat, read_reward
from drumroll.agents.sessions import Call, Failure, Session, SessionLimits, SessionResult
from drumroll.life import check_order
from drumroll.text.chat import continuation_ids, messages_to_ids
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, FinishReason, Message, Sampling

LIMITS = SessionLimits(context_tokens=1000, session_tokens=4000, max_calls=20)
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def chat(*messages: Message, **options: Any) -> ChatRequest:
    return ChatRequest(tuple(messages), **options)


class Play:
    """An agent and an engine in one: every sampled token gets a log-probability of its own."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.session = Session(LEASE, **{"limits": LIMITS, "is_judged": True, **options})
        self.num_sampled = 0

    def begin(self, request: ChatRequest) -> Call:
        return self.session.begin(self.session.compose(request, self.tokenizer), request)

    def finish(self, call: Call, text: str, reads_calls: bool = False, finish: FinishReason = "stop") -> Reply:
        ids = sampled_ids(self.tokenizer, text)[: call.sampling.max_new_tokens]
        logp = [-(self.num_sampled + number + 1) / 1024 for number in range(len(ids))]
        self.num_sampled += len(ids)
        reply = make_reply(text, reads_calls=reads_calls, cut=finish == "length", name=call.name)
        self.session.finish(call, Chunk("id", ids, logp, [call.number] * len(ids), finish), reply, text)
        return reply

    def call(self, request: ChatRequest, text: str) -> tuple[Call, Message]:
        call = self.begin(request)
        return call, self.finish(call, text, request.reads_calls).message


def all_of(result: SessionResult) -> list[Any]:
    return [result.trajectory, *result.branches]


def check_tokens(result: SessionResult, calls: Sequence[Call]) -> None:
    """Every sampled token stands in its place behind its prompt, and is trained on exactly once, at its own log-probability."""
    trajectories = all_of(result)
    trained = np.concatenate([trajectory.logp[trajectory.loss_mask] for trajectory in trajectories])
    sampled = np.asarray([value for call in calls for value in call.chunk.logp], np.float32)
    assert sorted(trained) == sorted(sampled)
    for call in calls:
        start, end = len(call.prompt_ids), len(call.token_ids)
        holders = [trajectory for trajectory in trajectories if trajectory.token_ids[:end].tolist() == call.token_ids]
        owners = [trajectory for trajectory in holders if trajectory.loss_mask[start:end].all()]
        assert any(trajectory.logp[start:end].tolist() == np.float32(call.chunk.logp).tolist() for trajectory in owners)
    for trajectory in trajectories:
        assert len(trajectory.token_ids) == len(trajectory.logp) == len(trajectory.token_version) == len(trajectory.loss_mask)
        ends = [0, *(turn.end for turn in trajectory.turns)]
        assert [turn.start for turn in trajectory.turns] == ends[:-1]
        assert ends[-1] == len(trajectory.token_ids)
        for turn in trajectory.turns:
            assert (turn.author == "policy") == bool(trajectory.loss_mask[turn.start : turn.end].any())
        assert (trajectory.token_version >= 0).tolist() == trajectory.loss_mask.tolist()


def test_a_call_that_continues_keeps_what_was_sampled(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    first, reply = play.call(chat(user("2+2?")), "four")
    second, _ = play.call(chat(user("2+2?"), reply, user("sure?")), "yes")
    assert second.parent is first
    assert first.prompt_ids == messages_to_ids(tokenizer, [user("2+2?")])
    assert first.token_ids[-7:] == [tokenizer.encode("f")[0], BOS, PAD, *tokenizer.encode("our"), EOS]
    assert second.prompt_ids == first.token_ids + continuation_ids(tokenizer, [user("sure?")], EOS)
    assert second.prompt_ids != messages_to_ids(tokenizer, [user("2+2?"), reply, user("sure?")]), "a rendering would lose tokens"
    result = play.session.result()
    check_tokens(result, [first, second])
    assert [(turn.author, turn.text) for turn in result.trajectory.turns] == [
        ("environment", "user=2+2?assistant="),
        ("policy", "four"),
        ("environment", "user=sure?assistant="),
        ("policy", "yes"),
    ]
    assert result.trajectory.last_reply == "yes"


def test_a_reply_that_was_cut_short_is_closed_by_the_template(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    call = play.begin(chat(user("q"), max_new_tokens=4))
    reply = play.finish(call, "four", finish="length")
    assert reply.finish == "length"
    second = play.begin(chat(user("q"), reply.message, user("go on")))
    assert second.added_ids[0] == EOS
    assert second.prompt_ids[: len(call.token_ids)] == call.token_ids


@pytest.mark.parametrize(
    ("change", "continues"),
    [
        ({}, True),
        ({"content": "Let me see."}, True),
        ({"content": " Let me see.\n"}, True),
        ({"content": ""}, True),
        ({"content": "I never said that."}, False),
        ({"tool_calls": []}, False),
        ({"name": "bob"}, False),
    ],
)
def test_tool_calls_that_come_back_continue(tokenizer: Tokenizer, change: dict[str, Any], continues: bool) -> None:
    play = Play(tokenizer)
    request = chat(user("q"), tools=(TOOL,), reads_calls=True)
    first, reply = play.call(request, 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 3, "b": [1.5, "x"]}}</tool_call>')
    assert reply["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3, "b": [1.5, "x"]}}
    assert reply["tool_calls"][0]["id"].isalnum()
    assert len(reply["tool_calls"][0]["id"]) == 9
    back = {**reply, **change}
    result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"] if back["tool_calls"] else "", "content": "7"}
    second = play.begin(chat(user("q"), back, result, tools=(TOOL,)))
    assert (second.parent is first) == continues
    assert (second.prompt_ids[: len(first.token_ids)] == first.token_ids) == continues


def test_other_tools_begin_another_branch(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    _, reply = play.call(chat(user("q")), "a")
    second, _ = play.call(chat(user("q"), reply, user("r"), tools=(TOOL,)), "b")
    assert second.parent is None
    check_tokens(play.session.result(), play.session.calls)


def test_messages_that_render_to_known_tokens_continue_them(tokenizer: Tokenizer) -> None:
    """A reply of no tokens but the end is spelled alike whoever says it."""
    play = Play(tokenizer)
    call = play.begin(chat(user("q")))
    play.session.finish(call, Chunk("id", [EOS], [-0.5], [1], "stop"), Reply("", (), "stop"), "")
    renamed = play.begin(chat(user("q"), {"role": "assistant", "content": "", "name": "bob"}, user("r")))
    assert renamed.parent is call
    assert renamed.prompt_ids == messages_to_ids(tokenizer, [user("q"), {"role": "assistant", "content": ""}, user("r")])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["continue", "fresh", "rewrite", "drop", "repeat"]), st.integers(0, 100), st.text("ab", max_size=4)),
        min_size=1,
        max_size=12,
    )
)
def test_every_sampled_token_is_trained_on_exactly_once(tokenizer: Tokenizer, plan: list[tuple[str, int, str]]) -> None:
    """Whatever an agent does: goes on from any earlier call, begins again, makes up history, leaves, asks the same twice."""
    play = Play(tokenizer)
    talks: list[tuple[Call, list[Message], list[Message]]] = []  # call, its messages, the same with the reply
    for action, choice, text in plan:
        messages = [user(text)]
        known = talks[choice % len(talks)] if talks else None
        if known and action == "continue":
            messages = [*known[2], user(text)]
        elif known and action == "rewrite":
            messages = [*known[1], {"role": "assistant", "content": "made up " + text}, user("and?")]
        elif known and action == "repeat":
            messages = known[1]
        call = play.begin(chat(*messages))
        if action == "drop":
            play.finish(call, text, finish="aborted")
            continue
        if known and action == "continue":
            assert call.prompt_ids[: len(known[0].token_ids)] == known[0].token_ids
            assert call.parent is not None
        reply = play.finish(call, text)
        talks.append((call, messages, [*messages, reply.message]))
    result = play.session.result()
    if talks:
        check_tokens(result, [call for call, _, _ in talks])
        assert [trajectory.sample_id for trajectory in result.branches] == [
            f"{LEASE.sample_id}/b{n + 1}" for n in range(len(result.branches))
        ]
        sizes = [sum(len(call.reply_ids) for call in talk[0].path) for talk in talks]
        assert result.trajectory.loss_mask.sum() == max(sizes), "the main branch has the most sampled tokens, and all of them"
    else:
        assert result.trajectory.stop_reason == "failed"


def test_a_branch_shares_verdict_and_group_and_takes_shared_replies_as_context(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    first, plan = play.call(chat(user("plan")), "the plan")
    left, _ = play.call(chat(user("plan"), plan, user("left")), "short")
    right, _ = play.call(chat(user("plan"), plan, user("right")), "rather longer")
    play.session.post(RewardPost(0.5, True, {}, done=True))
    result = play.session.result()
    check_tokens(result, [first, left, right])
    main, (branch,) = result.trajectory, result.branches
    assert (main.last_reply, branch.last_reply) == ("rather longer", "short")
    assert [turn.author for turn in main.turns] == ["environment", "policy", "environment", "policy"]
    assert [turn.author for turn in branch.turns] == ["environment", "environment", "environment", "policy"]
    assert (branch.sample_id, branch.group_id, branch.reward, branch.success) == (f"{LEASE.sample_id}/b1", LEASE.group_id, 0.5, True)
    judged = result.judged(replace(main, reward=0.75, success=False, reward_parts={"x": 0.25}))
    assert [(each.reward, each.success, each.reward_parts) for each in all_of(judged)] == [(0.75, False, {"x": 0.25})] * 2


def test_nothing_depends_on_the_order_in_which_parallel_calls_arrive(tokenizer: Tokenizer) -> None:
    def seen(texts: list[str]) -> Any:
        play = Play(tokenizer)
        calls = {text: play.begin(chat(user(text))) for text in texts}
        for text in sorted(texts):
            play.finish(calls[text], text * 2)
        result = play.session.result()
        return {text: (call.seed, call.name) for text, call in calls.items()}, [each.last_reply for each in all_of(result)]

    texts = ["one", "two", "three", "four"]
    assert seen(texts) == seen(texts[::-1])
    assert len({seed for seed, _ in seen(texts)[0].values()}) == 4


def test_seeds_of_equal_prompts(tokenizer: Tokenizer) -> None:
    """Asked twice, the policy may answer differently; asked again after the client left, it answers as it would have."""
    play = Play(tokenizer)
    dropped = play.begin(chat(user("q")))
    play.finish(dropped, "", finish="aborted")
    again, twice = play.begin(chat(user("q"))), play.begin(chat(user("q")))
    assert dropped.seed == again.seed != twice.seed
    other = Play(tokenizer)
    other.session.order = replace(LEASE, seed=42)
    assert other.begin(chat(user("q"))).seed != again.seed


def test_budgets_are_the_smallest_of_all(tokenizer: Tokenizer) -> None:
    prompt = len(messages_to_ids(tokenizer, [user("q")]))
    for wish, context, session, expected in [
        (None, 1000, 4000, 200),
        (7, 1000, 4000, 7),
        (500, 1000, 4000, 200),
        (None, prompt + 9, 4000, 9),
        (None, 1000, prompt + 5, 5),
    ]:
        play = Play(tokenizer, limits=SessionLimits(context, session, max_calls=9))
        assert play.begin(chat(user("q"), max_new_tokens=wish)).sampling.max_new_tokens == expected


def refused(play: Play, request: ChatRequest) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        play.begin(request)
    play.session.note_refusal(caught.value)
    return caught.value.status, caught.value.code


def test_what_does_not_fit_is_refused(tokenizer: Tokenizer) -> None:
    prompt = len(messages_to_ids(tokenizer, [user("q")]))
    assert refused(Play(tokenizer, limits=SessionLimits(prompt, 4000, 9)), chat(user("q"))) == (400, "context_length_exceeded")
    spent = Play(tokenizer, limits=SessionLimits(1000, prompt + 60, 9))
    call = spent.begin(chat(user("q"), max_new_tokens=20))
    assert refused(spent, chat(user("x" * 40))) == (400, "session_budget_exceeded"), "a call under way may still take its share"
    spent.finish(call, "")
    assert spent.begin(chat(user("x" * 19), max_new_tokens=1)), "what it did not take is free again"
    busy = Play(tokenizer, limits=SessionLimits(1000, 4000, max_calls=1))
    busy.call(chat(user("q")), "a")
    assert refused(busy, chat(user("r"))) == (400, "session_budget_exceeded")
    assert busy.session.result().trajectory.stop_reason == "turns"


def test_a_call_that_continues_costs_what_is_new(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    _, reply = play.call(chat(user("x" * 500)), "a")
    play.call(chat(user("x" * 500), reply, user("y")), "b")
    assert play.session._spent == len(play.session.result().trajectory.token_ids)


def test_the_settings_of_the_lease_rule(tokenizer: Tokenizer) -> None:
    request = chat(user("q"), temperature=0.0, top_p=0.5, stop=("Observation:",))
    play = Play(tokenizer)
    play.session.order = replace(LEASE, sampling=Sampling(max_new_tokens=9, temperature=0.9, stop=("END",), top_k=7))
    call = play.begin(request)
    assert call.sampling == Sampling(max_new_tokens=9, temperature=0.9, stop=("END", "Observation:"), top_k=7)
    assert call.trains


def test_replies_to_settings_of_the_agents_own_are_context(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer, obeys_sampling=True)
    greedy, reply = play.call(chat(user("q"), temperature=0.0), "greedy")
    assert (greedy.sampling.temperature, greedy.sampling.top_p) == (0.0, 1.0)
    own, _ = play.call(chat(user("q"), reply, user("r"), temperature=1.0), "own")
    trajectory = play.session.result().trajectory
    assert trajectory.token_ids.tolist() == own.token_ids
    assert trajectory.loss_mask.sum() == len(own.reply_ids)
    assert not trajectory.logp[: len(own.prompt_ids)].any()

    only = Play(tokenizer, obeys_sampling=True)
    only.call(chat(user("q"), top_p=0.5), "x")
    failed = only.session.result().trajectory
    assert (failed.stop_reason, failed.trainable) == ("failed", False)
    assert "nothing to train on" in failed.error


def test_rewards_add_up_and_belong_to_the_reply_before(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer, is_judged=False)
    _, reply = play.call(chat(user("q")), "a")
    play.session.post(RewardPost(0.25, None, {"moves": 1.0}, done=False))
    play.call(chat(user("q"), reply, user("r")), "b")
    play.session.post(RewardPost(0.5, True, {"moves": 2.0}, done=True))
    trajectory = play.session.result().trajectory
    assert (trajectory.reward, trajectory.success, trajectory.stop_reason, trajectory.error) == (0.75, True, "done", "")
    assert [turn.reward for turn in trajectory.turns if turn.author == "policy"] == [0.25, 0.5]
    assert trajectory.metrics == {
        "moves": 2.0, "agent_calls": 2.0, "agent_branches": 1.0, "agent_refusals": 0.0, "agent_dropped_calls": 0.0,
    }  # fmt: skip
    assert refused(play, chat(user("late"))) == (401, "session_ended")
    with pytest.raises(Refusal, match="ended"):
        play.session.post(RewardPost(1.0, None, {}, done=True))


def test_sessions_without_a_verdict_never_train(tokenizer: Tokenizer) -> None:
    def outcome(play: Play, failure: Failure | None = None) -> tuple[Any, ...]:
        result = play.session.result(failure)
        assert all(each.reward is None and not each.trainable for each in all_of(result))
        return result.trajectory.stop_reason, result.trajectory.fault, result.trajectory.error

    silent = Play(tokenizer)
    assert outcome(silent) == ("failed", "environment", "the agent got no reply from the policy.")

    unjudged = Play(tokenizer, is_judged=False)
    unjudged.call(chat(user("q")), "a")
    assert refused(unjudged, chat(user("x" * 1000)))[1] == "context_length_exceeded"
    stop, fault, error = outcome(unjudged)
    assert (stop, fault) == ("failed", "environment")
    assert "without posting a reward" in error
    assert "Requests refused: 1; the last one because: the messages have 10" in error

    broken = Play(tokenizer)
    broken.call(chat(user("q")), "a")
    broken.session.post(RewardPost(1.0, True, {}, done=False))
    broken.session.fail(Failure("deadline", "no token for 60 s", "engine"))
    broken.session.fail(Failure("failed", "a later one"))
    assert refused(broken, chat(user("r"))) == (503, "session_failed")
    assert outcome(broken, Failure("failed", "exit code 1", "environment")) == ("deadline", "engine", "no token for 60 s")

    crashed = Play(tokenizer)
    crashed.call(chat(user("q")), "a")
    assert outcome(crashed, Failure("failed", "exit code 1", "environment")) == ("failed", "environment", "exit code 1")


def test_a_session_that_reward_functions_judge_needs_no_posted_reward(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    play.call(chat(user("q")), "a")
    trajectory = play.session.result().trajectory
    assert (trajectory.reward, trajectory.stop_reason, trajectory.error) == (None, "done", "")


def test_the_life_of_a_session(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer)
    call = play.begin(chat(user("q")))
    chunk = Chunk("id", [EOS], [-0.5], [7], "stop", slot=3, started=call.asked + 1, ended=call.asked + 2)
    play.session.finish(call, chunk, Reply("", (), "stop"), "")
    play.begin(chat(user("under way")))
    assert check_order("leased", play.session.result().trajectory.life) == "environment"


def test_a_tool_call_that_cannot_be_read_stays_in_the_text() -> None:
    reply = make_reply("<tool_call>{oops</tool_call>", reads_calls=True, cut=False, name="0123456789abcdef")
    assert reply == Reply("<tool_call>{oops</tool_call>", (), "stop")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user("x")], "n": 2}, "n"),
        ({"messages": [user("x")], "logprobs": True}, "logprobs"),
        ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format.type"),
        ({"messages": [user("x")], "max_tokens": 0}, "max_tokens"),
        ({"messages": [user("x")], "temperature": "hot"}, "temperature"),
        ({"messages": [user("x")], "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ],
)
def test_requests_that_cannot_be_served(body: Any, param: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_chat(json.dumps(body).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("reward", ["NaN", "1e9", "true", '"1"', "null", "Infinity"])
def test_rewards_that_are_none(reward: str) -> None:
    with pytest.raises(Refusal, match="reward"):
        read_reward(f'{{"reward": {reward}}}'.encode())


@given(st.binary(max_size=60))
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        read_chat(body)


def test_messages_are_read_into_one_form() -> None:
    sent = {
        "model": "any", "max_tokens": 9, "max_completion_tokens": 5, "stop": "END", "user": "ignored",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{x"}},
            ]},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
        ],
    }  # fmt: skip
    request = read_chat(json.dumps(sent).encode())
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{x"}},
    ]
    assert request == ChatRequest(
        messages=(
            {"role": "system", "content": "ab"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ),
        max_new_tokens=5,
        stop=("END",),
    )


def test_a_folder_without_a_template_says_so(tmp_path: Path) -> None:
    bare = make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(Exception, match="no chat template"):
        Session(LEASE, LIMITS).compose(chat(user("q")), Tokenizer(bare.folder))
