"""The environment protocol, by its simplest environment."""

import asyncio

import pytest

from drumroll.config.models import EnvConfig
from drumroll.envs.base import Env, Step
from drumroll.registry import REGISTRY
from drumroll.types import Task


def build():
    entry = REGISTRY.lookup("env", "single_turn")
    return entry.target(entry.schema(EnvConfig)(kind="single_turn"))


def test_it_shows_the_prompt_and_is_done_after_one_reply():
    async def episode():
        env = build()
        first = await env.start(Task("t", prompt="2+2="))
        last = await env.step("4")
        await env.close()
        return first, last

    first, last = asyncio.run(episode())
    assert (first.prompt, first.messages, first.done) == ("2+2=", None, False)
    assert (last.done, last.reward, last.success) == (True, None, None)


def test_it_shows_messages():
    messages = ({"role": "user", "content": "2+2?"},)
    assert asyncio.run(build().start(Task("t", messages=messages))).messages == messages


def test_it_needs_a_prompt():
    assert build().needs_prompt
    with pytest.raises(ValueError, match="must show a prompt"):
        asyncio.run(build().start(Task("t")))


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": []}, {"reward": 1.0}])
def test_steps_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError, match="a Step"):
        Step(**fields)


def test_an_environment_of_ones_own_needs_two_methods_and_a_config():
    class Guess(Env):
        class Config(EnvConfig):
            high: int = 100

        async def start(self, task):
            return Step(prompt=f"1 to {self.config.high}?")

        async def step(self, reply):
            return Step(done=reply == "7", prompt="Again.", reward=1.0, success=reply == "7", metrics={"tries": 1})

    env = Guess(Guess.Config(high=9))
    assert asyncio.run(env.start(Task("t"))).prompt == "1 to 9?"
    assert asyncio.run(env.step("7")).success
    assert not Guess.needs_prompt
