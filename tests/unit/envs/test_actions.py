"""Actions are read from replies by clear rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll.envs.actions import ActionConfig, explain_form, read_actions, write_actions


@pytest.mark.parametrize(
    ("reply", "actions"),
    [
        ("<answer>Up</answer>", ("Up",)),
        ("I go up. <answer> Up\n</answer> Done.", ("Up",)),
        ("<answer>Up||Down</answer>", ("Up", "Down")),
        ("<answer>Up || || Down ||</answer>", ("Up", "Down")),
        ("<answer>Up|Down</answer>", ("Up|Down",)),
        ("<think><answer>Up</answer></think><answer>Down</answer>", ("Down",)),
        ("<think>a</think><answer>Up</answer></think> <answer>Down</answer>", ("Down",)),
        ("no opening</think><answer>Up</answer>", ("Up",)),
    ],
)
def test_actions_of_a_reply_in_form(reply, actions):
    reading = read_actions(reply, ActionConfig(max_actions_per_turn=2))
    assert (reading.actions, reading.problem) == (actions, "")


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("", "no <answer>…</answer>"),
        ("Up", "no <answer>…</answer>"),
        ("<answer>Up", "no <answer>…</answer>"),
        ("Up</answer>", "no <answer>…</answer>"),
        ("</answer>Up<answer>", "no <answer>…</answer>"),
        ("<Answer>Up</Answer>", "no <answer>…</answer>"),
        ("<answer>Up</answer></think>", "no <answer>…</answer>"),
        ("<answer>Up</answer><answer>Up</answer>", "2 times"),
        ("<answer><answer>Up</answer>", "2 times"),
        ("<answer>Up</answer></answer>", "2 times"),
        ("<answer> || </answer>", "no action"),
    ],
)
def test_a_reply_out_of_form_has_no_action(reply, problem):
    reading = read_actions(reply, ActionConfig())
    assert reading.actions == ()
    assert problem in reading.problem


def test_of_too_many_actions_the_first_are_taken():
    reading = read_actions("<answer>a||b||c</answer>", ActionConfig(max_actions_per_turn=2))
    assert reading.actions == ("a", "b")
    assert "3 actions" in reading.problem
    assert "at most 2" in reading.problem


def test_without_a_tag_the_whole_reply_is_the_actions():
    config = ActionConfig(tag=None, separator=",", max_actions_per_turn=3)
    assert read_actions("<think>hm</think> U, D\n", config).actions == ("U", "D")
    assert read_actions("</think>  ", config).problem == "The answer holds no action."


@given(
    actions=st.lists(
        st.text(st.characters(blacklist_characters="<>|,;"), min_size=1).filter(lambda text: text == text.strip()), min_size=1
    ),
    tag=st.sampled_from(["answer", "action", None]),
    separator=st.sampled_from(["||", ",", ";"]),
)
def test_what_is_written_is_read_again(actions, tag, separator):
    config = ActionConfig(tag=tag, separator=separator, max_actions_per_turn=len(actions))
    reading = read_actions(write_actions(actions, config), config)
    assert (reading.actions, reading.problem) == (tuple(actions), "")


@given(reply=st.lists(st.sampled_from(["<answer>", "</answer>", "</think>", "||", "a", " "])).map("".join) | st.text())
def test_any_text_has_either_actions_or_a_problem(reply):
    config = ActionConfig(max_actions_per_turn=2)
    reading = read_actions(reply, config)
    assert len(reading.actions) <= 2
    assert reading.actions or reading.problem
    assert all(action == action.strip() != "" for action in reading.actions)


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("tag", ["answer", None])
def test_the_explained_example_is_in_form(most, tag):
    config = ActionConfig(tag=tag, max_actions_per_turn=most)
    example = explain_form(config, ["Up", "Left"]).rpartition(": ")[2]
    assert read_actions(example, config).problem == ""
    assert read_actions(example, config).actions == ("Up", "Left")[:most]


@pytest.mark.parametrize(
    "options", [{"tag": "think"}, {"tag": ""}, {"tag": "a b"}, {"separator": ""}, {"max_actions_per_turn": 0}, {"format_penalty": -1.0}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValidationError):
        ActionConfig(**options)
