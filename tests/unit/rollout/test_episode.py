"""One episode against an engine, an environment and a renderer that are played here: a token is a character's code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from drumroll.config.models import EnvConfig, RewardConfig
from drumroll.envs.base import Env, Step
from drumroll.envs.single_turn import SingleTurn
from drumroll.errors import PolicyFault
from drumroll.registry import REGISTRY
from drumroll.rewards.compose import RewardSet
from drumroll.rollout import episode
from drumroll.rollout.engine_client import EngineClient
from drumroll.rollout.episode import Limits, run_episode, unfinished
from drumroll.rollout.lease import Lease
from drumroll.types import Chunk, GenRequest, Message, SampleInfo, Sampling, Task, Trajectory

END = 0
LEASE = Lease("g/000", "g", Task("t7", prompt="2+2="), seed=41, sampling=Sampling(max_new_tokens=8), engine=0, deadline_s=5.0)


class Characters:
    """A renderer that notes what it was asked to encode."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def first(self, prompt: str | None, messages: Sequence[Message] | None) -> tuple[list[int], str]:
        assert prompt is not None
        self.encoded.append(prompt)
        return [ord(character) for character in prompt], prompt

    def next(self, prompt: str | None, messages: Sequence[Message] | None, last_token: int) -> tuple[list[int], str]:
        return self.first(prompt, messages)

    def reply_text(self, ids: Sequence[int], stop: Sequence[str], after: Sequence[int] = ()) -> str:
        return "".join(chr(token) for token in ids if token != END)


class Script:
    """An engine that says its lines, one for each request, and keeps the requests."""

    def __init__(self, *lines: str | Chunk | Exception, wait_s: float = 0.0) -> None:
        self.lines = list(lines)
        self.requests: list[GenRequest] = []
        self.wait_s = wait_s

    async def generate(self, request: GenRequest) -> Chunk:
        self.requests.append(request)
        await asyncio.sleep(self.wait_s)
        line = self.lines[len(self.requests) - 1]
        if isinstance(line, Exception):
            raise line
        return replace(line, id=request.id) if isinstance(line, Chunk) else self.spoken(request, line)

    def spoken(self, request: GenRequest, line: str) -> Chunk:
        """The line and an end token, as far as the budget goes."""
        ids = [*map(ord, line), END][: request.sampling.max_new_tokens]
        logp = [-0.1 * (place + 1) for place in range(len(ids))]
        return Chunk(request.id, ids, logp, [3] * len(ids), "stop" if ids[-1] == END else "length")


class Scenes(Env):
    """Answers each reply with the next scene: a step, or something to raise, or a coroutine function to await."""

    def __init__(self, *scenes: Step | Exception | Callable[[], Awaitable[Any]], closing: Exception | float | None = None) -> None:
        super().__init__(EnvConfig(kind="scenes"))
        self.scenes = list(scenes)
        self.replies: list[str] = []
        self.closing = closing
        self.num_closed = 0

    async def start(self, task: Task) -> Step:
        return await self.play()

    async def step(self, reply: str) -> Step:
        self.replies.append(reply)
        return await self.play()

    async def play(self) -> Step:
        scene = self.scenes.pop(0)
        if isinstance(scene, Exception):
            raise scene
        return scene if isinstance(scene, Step) else await scene()

    async def close(self) -> None:
        self.num_closed += 1
        if isinstance(self.closing, Exception):
            raise self.closing
        await asyncio.sleep(self.closing or 0)


def run(env: Env, engine: Any, *rewards: Callable[[Trajectory], Any], limits: Limits = Limits(4, 64), lease: Lease = LEASE) -> Trajectory:  # noqa: B008
    named = {f"judge{number}": function for number, function in enumerate(rewards)}
    with pytest.MonkeyPatch.context() as patch:
        for name, function in named.items():
            patch.setitem(REGISTRY.shipped, name, function)
        judges = RewardSet([RewardConfig(kind=f"python:{name}") for name in named])
        return asyncio.run(run_episode(lease, env, engine, Characters(), judges, limits))  # type: ignore[arg-type]


def single_turn() -> SingleTurn:
    return SingleTurn(EnvConfig())


def assert_token_exact(trajectory: Trajectory, engine: Script) -> None:
    """The tokens under the mask are those that were sampled, each request's prompt is what stood before them, the rest is masked."""
    policy = [turn for turn in trajectory.turns if turn.author == "policy"]
    assert len(policy) == len(engine.requests)
    for turn, request, line in zip(policy, engine.requests, engine.lines, strict=False):
        said = line if isinstance(line, Chunk) else engine.spoken(request, str(line))
        assert trajectory.token_ids[: turn.start].tolist() == list(request.token_ids)
        assert trajectory.token_ids[turn.start : turn.end].tolist() == said.token_ids
        assert trajectory.logp[turn.start : turn.end].tolist() == np.asarray(said.logp, np.float32).tolist()
        assert trajectory.token_version[turn.start : turn.end].tolist() == said.token_version
        assert trajectory.loss_mask[turn.start : turn.end].all()
    assert int(trajectory.loss_mask.sum()) == sum(turn.end - turn.start for turn in policy)
    masked = ~trajectory.loss_mask
    assert (trajectory.logp[masked] == 0).all()
    assert (trajectory.token_version[masked] == -1).all()
    bounds = [(turn.start, turn.end) for turn in trajectory.turns]
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == len(trajectory.token_ids)


class TestSingleTurn:
    def test_a_reply_and_its_verdict(self) -> None:
        engine = Script("4")
        done = run(single_turn(), engine, lambda t: float(t.last_reply == "4"), limits=Limits(1, 64))
        assert_token_exact(done, engine)
        assert (done.text, done.last_reply, done.reward, done.stop_reason, done.error) == ("2+2=4", "4", 1.0, "stop", "")
        assert done.token_ids.tolist() == [*map(ord, "2+2=4"), END]
        assert done.reward_parts == {"<lambda>": 1.0}
        assert done.trainable
        assert (done.sample_id, done.group_id, done.seed) == ("g/000", "g", 41)
        assert engine.requests[0].seed == 41
        assert {"started", "generated", "ended", "generate_s", "reward_s"} <= done.timings.keys()

    def test_a_reply_that_is_cut_off(self) -> None:
        done = run(single_turn(), Script("a very long reply"), lambda t: 0.0, limits=Limits(1, 64))
        assert (done.stop_reason, done.num_new_tokens, done.trainable) == ("length", 8, True)

    def test_the_budget_of_tokens_counts_the_prompt(self) -> None:
        engine = Script("123456")
        done = run(single_turn(), engine, lambda t: 0.0, limits=Limits(1, 7))
        assert engine.requests[0].sampling.max_new_tokens == 3
        assert (len(done.token_ids), done.stop_reason) == (7, "length")

    def test_a_prompt_without_room_for_a_reply(self) -> None:
        done = run(single_turn(), Script(), limits=Limits(1, 4))
        assert done.stop_reason == "failed"
        assert "the prompt has 4 tokens, and an episode may have 4 (`rollout.max_tokens`" in done.error
        assert not done.trainable


class TestSeveralTurns:
    def test_only_what_was_sampled_is_trained_on(self) -> None:
        engine = Script("lo", "hi", "ok")
        env = Scenes(Step(prompt="say: "), Step(prompt="more"), Step(prompt="", reward=0.25), Step(done=True, reward=0.5, success=True))
        done = run(env, engine, lambda t: 1.0)
        assert_token_exact(done, engine)
        assert env.replies == ["lo", "hi", "ok"]
        assert [(turn.author, turn.text) for turn in done.turns] == [
            ("environment", "say: "), ("policy", "lo"), ("environment", "more"), ("policy", "hi"), ("environment", ""), ("policy", "ok"),
        ]  # fmt: skip
        assert done.stop_reason == "done"
        assert done.reward == pytest.approx(1.75)
        assert done.reward_parts == {"<lambda>": 1.0, "environment": 0.75}
        assert done.success is True
        assert env.num_closed == 1

    def test_each_turn_draws_its_own_noise_and_has_its_own_request(self) -> None:
        engine = Script("a", "b", "c")
        run(Scenes(Step(prompt="x"), Step(prompt="y"), Step(prompt="z"), Step(done=True)), engine)
        assert len({request.seed for request in engine.requests}) == len({request.id for request in engine.requests}) == 3
        again = Script("a", "b", "c")
        run(Scenes(Step(prompt="x"), Step(prompt="y"), Step(prompt="z"), Step(done=True)), again, lease=replace(LEASE, attempt=1))
        assert [request.seed for request in again.requests] == [request.seed for request in engine.requests]
        assert {request.id for request in again.requests}.isdisjoint({request.id for request in engine.requests})

    def test_the_budget_of_turns(self) -> None:
        engine = Script("a", "b", "c")
        done = run(Scenes(Step(prompt="x"), Step(prompt="y"), Step(prompt="never shown")), engine, lambda t: 0.5, limits=Limits(2, 64))
        assert (done.stop_reason, done.reward, done.trainable) == ("turns", 0.5, True)
        assert done.turns[-1].author == "policy"
        assert_token_exact(done, engine)

    @pytest.mark.parametrize("max_tokens", range(9, 16))
    def test_no_episode_outgrows_its_budget(self, max_tokens: int) -> None:
        """An observation that leaves no room for a reply is not shown: the model could not even hold it."""
        engine = Script("abc", "def")
        done = run(Scenes(Step(prompt="12345"), Step(prompt="678"), Step(done=True)), engine, lambda t: 1.0, limits=Limits(4, max_tokens))
        assert len(done.token_ids) <= max_tokens
        assert done.turns[-1].author == "policy"
        assert done.stop_reason == "length"
        assert done.trainable
        assert_token_exact(done, engine)

    def test_the_latest_metrics_and_statement_of_success_stand(self) -> None:
        env = Scenes(
            Step(prompt="x"), Step(prompt="y", success=True, metrics={"moves": 1, "bad": 1}), Step(done=True, metrics={"moves": 2})
        )
        done = run(env, Script("a", "b"))
        assert done.success is True
        assert done.metrics == {"moves": 2, "bad": 1}

    def test_an_environment_without_rewards_gives_no_verdict(self) -> None:
        done = run(Scenes(Step(prompt="x"), Step(done=True)), Script("a"))
        assert (done.reward, done.trainable, done.stop_reason) == (None, False, "done")


class TestFailures:
    """Whatever fails is in the trajectory, which never trains; the environment is closed once."""

    def failed(self, trajectory: Trajectory, *said: str) -> None:
        assert trajectory.stop_reason == "failed"
        assert not trajectory.trainable
        assert SampleInfo.of(trajectory).stop_reason == "failed"
        for text in said:
            assert text in trajectory.error

    def test_a_fault_of_the_policy_is_a_verdict(self) -> None:
        env = Scenes(Step(prompt="x"), Step(prompt="y", reward=0.5), PolicyFault(-1.0, "left the board"))
        done = run(env, Script("a", "b"))
        assert (done.stop_reason, done.reward, done.error, done.trainable) == ("policy_fault", -0.5, "left the board", True)
        assert env.num_closed == 1

    def test_the_rewards_judge_faults_too(self) -> None:
        done = run(Scenes(Step(prompt="x"), PolicyFault(-1.0)), Script("a"), lambda t: 0.25 if t.stop_reason == "policy_fault" else 9.0)
        assert done.reward == -0.75

    @pytest.mark.parametrize("scenes", [(ValueError("no board"),), (Step(prompt="x"), ValueError("no board"))])
    def test_an_environment_that_raises(self, scenes: tuple[Any, ...]) -> None:
        env = Scenes(*scenes)
        self.failed(run(env, Script("a")), "ValueError: no board", "task t7", "env Scenes", "in play")
        assert env.num_closed == 1

    def test_a_timeout_of_the_environments_own_is_not_the_episodes_deadline(self) -> None:
        self.failed(run(Scenes(Step(prompt="x"), TimeoutError("the browser")), Script("a")), "TimeoutError: the browser")

    def test_a_step_that_shows_nothing(self) -> None:
        async def nothing() -> Any:
            return Step()

        self.failed(run(Scenes(Step(prompt="x"), nothing), Script("a")), "must show a prompt")

    def test_an_engine_that_raises(self) -> None:
        self.failed(run(single_turn(), Script(ConnectionError("engine gone"))), "ConnectionError: engine gone")

    def test_an_engine_that_refuses(self) -> None:
        refusal = Chunk("", [], [], [], "error", "the prompt is too long")
        self.failed(run(single_turn(), Script(refusal)), "the engine refused the request: the prompt is too long")

    def test_an_abort(self) -> None:
        asked: list[Trajectory] = []
        done = run(single_turn(), Script(Chunk("", [65], [-1.0], [0], "aborted")), asked.append)
        assert (done.stop_reason, done.reward, done.trainable, asked) == ("aborted", None, False, [])
        assert done.token_ids.tolist() == [*map(ord, "2+2="), 65]

    @pytest.mark.parametrize("slow", ["engine", "environment", "engine's own deadline"])
    def test_the_deadline(self, slow: str) -> None:
        engine = Script("a", wait_s=30 if slow == "engine" else 0)
        if slow == "engine's own deadline":
            engine = Script(Chunk("", [65], [-1.0], [0], "deadline"))
        env = Scenes(Step(prompt="x"), (lambda: asyncio.sleep(30)) if slow == "environment" else Step(done=True))
        done = run(env, engine, lambda t: 1.0, lease=replace(LEASE, deadline_s=0.05))
        assert (done.stop_reason, done.error, done.trainable) == ("deadline", "the episode took longer than 0.05 s", False)
        assert env.num_closed == 1

    def test_a_slow_reward_counts_as_part_of_the_episode(self) -> None:
        async def slow(trajectory: Trajectory) -> float:
            await asyncio.sleep(30)
            return 1.0

        assert run(single_turn(), Script("a"), slow, lease=replace(LEASE, deadline_s=0.05)).stop_reason == "deadline"

    def test_a_sample_comes_back_though_its_environment_does_not_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = run(Scenes(Step(prompt="x"), Step(done=True, reward=1.0), closing=OSError("disk")), Script("a"))
        assert (done.stop_reason, done.reward, done.trainable) == ("done", 1.0, True)
        assert done.error == "closing env Scenes failed: OSError: disk"
        monkeypatch.setattr(episode, "CLOSE_S", 0.01)
        self.failed(run(Scenes(ValueError("no board"), closing=30.0), Script()), "no board", "closing env Scenes failed: TimeoutError")

    def test_a_sample_that_got_no_environment(self) -> None:
        self.failed(unfinished(LEASE, "no environment"), "no environment")


class TestVerdicts:
    def test_none_is_no_verdict(self) -> None:
        done = run(single_turn(), Script("a"), lambda t: None, limits=Limits(1, 64))
        assert (done.reward, done.stop_reason, done.trainable, done.reward_parts) == (None, "stop", False, {})

    def test_none_beside_a_number_leaves_the_number(self) -> None:
        assert run(single_turn(), Script("a"), lambda t: None, lambda t: 0.5).reward == 0.5

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), "good", 1e9])
    def test_what_is_no_number_is_a_failure_and_not_a_zero(self, value: Any) -> None:
        done = run(single_turn(), Script("a"), lambda t: value)
        assert (done.stop_reason, done.reward, done.trainable) == ("failed", None, False)
        assert "task 't7'" in done.error

    @pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e9])
    def test_neither_is_it_from_an_environment(self, value: float) -> None:
        done = run(Scenes(Step(prompt="x"), Step(done=True, reward=value)), Script("a"))
        assert (done.stop_reason, done.trainable) == ("failed", False)
        assert "the environment's rewards add up to" in done.error

    def test_a_reward_that_raises(self) -> None:
        def judge(trajectory: Trajectory) -> float:
            raise RuntimeError("asleep")

        done = run(single_turn(), Script("a"), judge)
        assert (done.stop_reason, done.reward) == ("failed", None)
        assert "reward 'judge' failed on task 't7': RuntimeError: asleep" in done.error


class TestEngineClient:
    """The line to one engine: many episodes, one submit and one poll at a time."""

    class Engine:
        def __init__(self, *, mute: bool = False, broken: str = "") -> None:
            self.pending: list[GenRequest] = []
            self.calls: list[str] = []
            self.aborted: list[str] = []
            self.mute = mute
            self.broken = broken

        async def call(self, method: str, client: str, *arguments: Any) -> Any:
            self.calls.append(method)
            if self.broken == method:
                raise ConnectionError("gone")
            if method == "submit":
                self.pending += arguments[0]
                return None
            if method == "abort":
                self.aborted += arguments[0]
                await asyncio.sleep(30)
            await asyncio.sleep(0.001)
            if self.mute:
                return []
            chunks = []
            for request in self.pending:  # a reply in two parts
                chunks += [Chunk(request.id, [1, 2], [-1.0, -2.0], [0, 0]), Chunk(request.id, [3], [-3.0], [1], "stop")]
            self.pending = []
            return chunks

    @staticmethod
    def request(number: int) -> GenRequest:
        return GenRequest(f"r{number}", [1], Sampling(), seed=number)

    def test_replies_are_joined_and_requests_travel_together(self) -> None:
        engine = self.Engine()

        async def ask() -> list[Chunk]:
            client = EngineClient(engine.call, "me")
            return await asyncio.gather(*(client.generate(self.request(number)) for number in range(50)))

        chunks = asyncio.run(ask())
        assert [chunk.id for chunk in chunks] == [f"r{number}" for number in range(50)]
        assert {(*chunk.token_ids, *chunk.logp, *chunk.token_version, chunk.finish) for chunk in chunks} == {
            (1, 2, 3, -1, -2, -3, 0, 0, 1, "stop")
        }
        assert engine.calls.count("submit") == 1

    @pytest.mark.parametrize("broken", ["submit", "poll"])
    def test_an_engine_that_is_gone_fails_everyone_who_waits(self, broken: str) -> None:
        async def ask() -> list[Any]:
            client = EngineClient(self.Engine(broken=broken).call, "me")
            return await asyncio.gather(*(client.generate(self.request(number)) for number in range(3)), return_exceptions=True)

        assert [str(error) for error in asyncio.run(ask())] == ["the engine did not answer: gone"] * 3

    def test_a_caller_whose_time_is_up_is_let_go_though_the_engine_is_silent(self) -> None:
        engine = self.Engine(mute=True)

        async def ask() -> None:
            client = EngineClient(engine.call, "me")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.generate(self.request(7))
            await asyncio.sleep(0)

        asyncio.run(asyncio.wait_for(ask(), 5))
        assert engine.aborted == ["r7"]
