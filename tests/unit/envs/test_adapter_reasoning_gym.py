"""The adapter for reasoning-gym, against the real package and all of its tasks."""

import asyncio
import importlib
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

pytest.importorskip("reasoning_gym", reason="the extra 'reasoning-gym' is not installed")

from drumroll.config.models import EnvConfig
from drumroll.envs.adapters.reasoning_gym import FORMULAS, LISTS, is_harmless, task_names
from drumroll.envs.blocking import end_processes
from drumroll.errors import PluginError
from drumroll.registry import REGISTRY
from drumroll.types import Task

NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many answers, of which the package gives none."""
ANY_ANSWER = {"game_of_life_halting"}
"""Tasks of which the package takes any text for the answer True."""
GARBAGE = "no idea at all"


def build(**options):
    entry = REGISTRY.lookup("env", "reasoning_gym")
    return entry.target(entry.schema(EnvConfig)(kind="reasoning_gym", **options))


def begin(seed=0, **options):
    env = build(**options)
    return env, env.begin(Task("t", data={"seed": seed}))


def answer(env, text):
    return env.act(f"<think>So.</think> It is <answer>{text}</answer>")


@pytest.mark.parametrize("name", task_names())
def test_every_task_scores_its_own_reference_and_not_garbage(name):
    env, step = begin(7, task=name, size=8)
    assert env.item["question"] in step.messages[0]["content"]
    assert begin(7, task=name, size=8)[1] == step, "the seed alone decides"
    if name not in NO_REFERENCE:
        best = answer(env, env.item["answer"])
        assert (best.done, best.reward, best.success) == (True, 1.0, True)
    for reply in (GARBAGE, f"<answer>{GARBAGE}</answer>"):
        worst = env.act(reply)
        assert worst.done
        if name not in ANY_ANSWER or reply == GARBAGE:
            assert (worst.success, worst.reward < 0.5) == (False, True)


def test_there_are_about_a_hundred_tasks():
    assert len(task_names()) > 100
    assert set(task_names()) >= NO_REFERENCE | ANY_ANSWER | LISTS | FORMULAS


def test_an_answer_that_the_package_cannot_read_is_worth_nothing():
    env, _ = begin(task="prime_factorization")
    step = answer(env, "two times three")
    assert (step.reward, step.success, step.metrics["answered"]) == (0.0, False, 1.0)
    assert env.act("no tags").metrics == {"score": 0.0, "answered": 0.0, "refused_answers": 0.0}


def test_a_package_that_cannot_score_its_own_reference_has_failed(monkeypatch):
    env, _ = begin(task="spell_backward")
    monkeypatch.setattr(type(env.dataset), "score_answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answer(env, "x")


def test_an_answer_that_could_run_code_is_not_evaluated(tmp_path):
    mark = tmp_path / "mark"
    for name in LISTS | FORMULAS:
        env, _ = begin(task=name)
        step = answer(env, f"[open('{mark}', 'w')]")
        assert (step.reward, step.metrics["refused_answers"]) == (0.0, 1.0)
    assert not mark.exists()


BAD = [
    "__import__('os')", "open(x)", "(open)(x)", "x.__class__", "x . name", "f'{x}'", "sin('a')", "'%c' % 40", "lambda: 1", "[open][0](1)",
    "(lambda x: x)(1)", "sqrt (x) (1)", "ｏｐｅｎ(1)", "{1}", "x\\\n(1)", "#",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_could_run_code(text):
    assert not is_harmless(text, "puzzle24")


@given(st.text("xopen0123.,'\"[]()+*/ _\n", max_size=12))
def test_what_is_harmless_calls_nothing_but_functions_of_numbers(text):
    called = []

    class Names(dict):
        def __missing__(self, name):
            return lambda *given: called.append(name)

    for task in ("puzzle24", "n_queens"):
        if is_harmless(text, task) and "**" not in text:
            try:
                eval(text, {"__builtins__": {}}, Names())  # every name is a function here
            except Exception:
                continue
    assert not set(called) - {"exp", "sin"}


def test_several_tasks_by_weight():
    tasks = {"spell_backward": 3, "letter_counting": 1}
    options = {"tasks": tasks, "options": {"spell_backward": {"max_word_len": 4}}}
    names = [begin(seed, **options)[0].name for seed in range(200)]
    assert 120 < names.count("spell_backward") < 180
    words = [begin(seed, **options)[0].item["answer"] for seed in range(40) if names[seed] == "spell_backward"]
    assert max(map(len, words)) <= 4


def test_seeds_beyond_one_dataset_are_other_problems():
    questions = {begin(seed, task="basic_arithmetic", size=5)[1].messages[0]["content"] for seed in range(20)}
    assert len(questions) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "spell_backwards"}, "Did you mean 'spell_backward'"),
        ({"task": "composite"}, "reasoning-gym has no task 'composite'"),
        ({}, "give either `task`"),
        ({"task": "countdown", "tasks": {"countdown": 1}}, "give either `task`"),
        ({"tasks": {"countdown": 1}, "options": {"min_numbers": 3}}, "options are given by the names"),
        ({"task": "countdown", "runs_in": "thread"}, "Input should be 'process'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        build(**options)


def test_options_that_the_package_does_not_take_are_refused():
    with pytest.raises(PluginError, match=r"'countdown' does not take \{\"min_number\": 3\}"):
        begin(task="countdown", options={"min_number": 3})


def test_an_episode_in_its_process():
    async def episode():
        env = build(task="letter_counting", extract="boxed", instruction="", chat=False)
        try:
            first = await env.start(Task("t", data={"seed": 3}))
            last = await env.step(f"\\boxed{{{first.prompt.count('x') + 1000}}}")
            await env.close()
            return first, last
        finally:
            await end_processes()

    first, last = asyncio.run(episode())
    assert first.prompt.startswith("How many times")
    assert (last.done, last.success, last.metrics["answered"]) == (True, False, 1.0)


def test_a_missing_package_gives_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    module = importlib.import_module("drumroll.envs.adapters.reasoning_gym")
    with pytest.raises(PluginError, match=r"'reasoning_gym' is not installed: pip install 'drumroll\[reasoning-gym\]'"):
        exec(Path(module.__file__).read_text(), {"__name__": module.__name__})
