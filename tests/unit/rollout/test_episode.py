"""One episode, and the line to its engine, against an engine, an environment and a renderer that are played here: a token is a
character's code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config.models import EnvConfig, RewardConfig
from drumroll.envs.base import Env, Step
from drumroll.envs.single_turn import SingleTurn
from drumroll.errors import PolicyFault
from drumroll.life import check_order, unpack_life
from drumroll.registry import REGISTRY
from drumroll.rewards.compose import RewardSet
from drumroll.rollout import engine_client, episode
from drumroll.rollout.engine_client import EngineClient, EnginePoll
from drumroll.rollout.episode import Limits, Setting, Stage, run_episode
from drumroll.rollout.lease import Lease
from drumroll.types import Chunk, EngineLoad, GenRequest, Message, SampleInfo, Sampling, Task, Trajectory, Version

END = 0
LEASE = Lease("g/000", "g", Task("t7", prompt="2+2="), seed=41, sampling=Sampling(max_new_tokens=8), engine=0, deadline_s=5.0)


class Characters:
    """A renderer that notes what it was asked to encode."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def first(self, prompt: str | None, messages: Sequence[Message] | None, tools: Any = None) -> tuple[list[int], str]:
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

    async def generate(self, request: GenRequest, stall_s: float) -> Chunk:
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
        return Chunk(request.id, ids, logp, [3] * len(ids), "stop" if ids[-1] == END else "length", "", 5, 1e9, 1e9 + 1)


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


class Line:
    """The engine's end of the line to a client.

    Polls bring what the engine `says`; with `ticks`, each poll brings one of them, in virtual time: the engine is `paused`,
    `silent`, `busy` with other requests, or has a `part` or the `end` of r0's reply.
    """

    SLOT = (5, 4e9, 4e9 + 1)

    def __init__(self, *ticks: str, mute: bool = False, broken: str = "") -> None:
        self.ticks = list(ticks)
        self.mute, self.broken = mute, broken
        self.now = 0.0
        self.calls: list[tuple[str, float]] = []
        self.requests: list[str] = []
        self.aborted: list[str] = []
        self.inbox: list[Chunk] = []
        self.has_said = False
        self.load = EngineLoad(0, 0, 8, Version(0, 0))
        self.submitted, self.heard, self.news = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def client(self) -> EngineClient:
        return EngineClient(self.call, "me", clock=lambda: self.now)

    def says(self, request: str, text: str, finish: Any = None) -> None:
        slot = self.SLOT if finish and (text or self.heard.is_set()) else ()
        self.inbox.append(Chunk(request, [*map(ord, text)], [-1.0] * len(text), [3] * len(text), finish, "", *slot))
        self.news.set()

    async def call(self, method: str, client: str, argument: Any, *, deadline_s: float) -> Any:
        self.calls.append((method, deadline_s))
        await asyncio.sleep(0)
        if self.broken == method:
            raise ConnectionError("gone")
        if method == "poll":
            return await self.poll(argument)
        if method == "submit":
            self.requests += [request.id for request in argument]
            self.submitted.set()
        else:
            self.aborted += argument
            for request in [] if self.mute else argument:
                self.says(request, "", "aborted")
        return None

    async def poll(self, wait_s: float) -> EnginePoll:
        if self.ticks:
            tick = self.ticks.pop(0)
            self.now += wait_s
            progress = tick not in ("paused", "silent")
            self.load = replace(self.load, paused=tick == "paused", num_tokens_total=self.load.num_tokens_total + progress)
            if tick in ("part", "end"):
                self.says("r0", "x", "stop" if tick == "end" else None)
        else:
            if self.has_said:
                self.heard.set()
            await self.news.wait()
        chunks, self.inbox = self.inbox, []
        self.has_said = self.has_said or bool(chunks)
        self.news.clear()
        return EnginePoll(chunks, self.load)


class Reached(asyncio.Event):
    """A point that an episode comes to and never leaves by itself."""

    async def __call__(self, *_: Any) -> Any:
        self.set()
        await asyncio.Event().wait()


def run(
    env: Env | Callable[[], Env],
    engine: Any,
    *rewards: Callable[[Trajectory], Any],
    limits: Limits = Limits(4, 64),  # noqa: B008
    lease: Lease = LEASE,
    abort_at: asyncio.Event | None = None,
) -> Trajectory:
    """The episode on worker 2, which is aborted when it has reached that point."""
    named = {f"judge{number}": function for number, function in enumerate(rewards)}

    async def play(judges: RewardSet) -> Trajectory:
        unwanted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        make_env = (lambda: env) if isinstance(env, Env) else env
        stage = Stage(2, {"*": Setting(make_env, judges)}, [engine], Characters(), limits)  # type: ignore[arg-type]
        running = asyncio.create_task(run_episode(lease, stage, unwanted))
        if abort_at is not None:
            await abort_at.wait()
            unwanted.set_result(None)
        return await asyncio.wait_for(running, 20)

    with pytest.MonkeyPatch.context() as patch:
        for name, function in named.items():
            patch.setitem(REGISTRY.shipped, name, function)
        done = asyncio.run(play(RewardSet([RewardConfig(kind=f"python:{name}") for name in named])))
    check_life(done, lease.engine)
    assert done.attempt == lease.attempt
    return done


def check_life(trajectory: Trajectory, engine: int) -> None:
    """Whatever the end: only ways that exist, never back in time, and `done` exactly where there is a verdict."""
    last = check_order("leased", trajectory.life)
    stamps = unpack_life(trajectory.life)
    assert [stamp.time for stamp in stamps] == sorted(stamp.time for stamp in stamps)
    assert {stamp.place for stamp in stamps if stamp.state in ("environment", "reward")} <= {2}
    assert {stamp.place for stamp in stamps if stamp.state in ("waiting", "generating")} <= {engine}
    cut_short = trajectory.stop_reason in ("aborted", "deadline", "failed")
    assert (last == "done") != cut_short
    assert not cut_short or trajectory.reward is None


def states(trajectory: Trajectory) -> list[str]:
    return [stamp.state for stamp in unpack_life(trajectory.life)]


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

    def test_an_environment_gives_a_reply_a_budget(self) -> None:
        engine = Script("abcdef", "ghijkl", "mnopqr")
        done = run(
            Scenes(Step(prompt="x", max_new_tokens=2), Step(prompt="y"), Step(prompt="z", max_new_tokens=99), Step(done=True)), engine
        )
        budget = LEASE.sampling.max_new_tokens
        assert [request.sampling.max_new_tokens for request in engine.requests] == [2, budget, budget]
        assert next(turn.text for turn in done.turns if turn.author == "policy") == "ab"
        with pytest.raises(ValueError, match="at least 1"):
            Step(prompt="x", max_new_tokens=0)

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

    def failed(self, trajectory: Trajectory, fault: str, *said: str) -> None:
        assert (trajectory.stop_reason, trajectory.fault) == ("failed", fault)
        assert not trajectory.trainable
        assert (SampleInfo.of(trajectory).stop_reason, SampleInfo.of(trajectory).fault) == ("failed", fault)
        for text in said:
            assert text in trajectory.error

    def test_a_fault_of_the_policy_is_a_verdict(self) -> None:
        env = Scenes(Step(prompt="x"), Step(prompt="y", reward=0.5), PolicyFault(-1.0, "left the board"))
        done = run(env, Script("a", "b"))
        assert (done.stop_reason, done.reward, done.error, done.trainable) == ("policy_fault", -0.5, "left the board", True)
        assert done.fault == ""
        assert env.num_closed == 1

    def test_the_rewards_judge_faults_too(self) -> None:
        done = run(Scenes(Step(prompt="x"), PolicyFault(-1.0)), Script("a"), lambda t: 0.25 if t.stop_reason == "policy_fault" else 9.0)
        assert done.reward == -0.75

    @pytest.mark.parametrize("scenes", [(ValueError("no board"),), (Step(prompt="x"), ValueError("no board"))])
    def test_an_environment_that_raises(self, scenes: tuple[Any, ...]) -> None:
        env = Scenes(*scenes)
        self.failed(run(env, Script("a")), "environment", "ValueError: no board", "task t7", "env Scenes", "in play")
        assert env.num_closed == 1

    def test_a_timeout_of_the_environments_own_is_not_the_episodes_deadline(self) -> None:
        env = Scenes(Step(prompt="x"), TimeoutError("the browser"))
        self.failed(run(env, Script("a")), "environment", "TimeoutError: the browser")

    def test_neither_is_a_cancellation_of_its_own_an_abort(self) -> None:
        async def cancelled() -> Any:
            raise asyncio.CancelledError("by a library")

        self.failed(run(Scenes(Step(prompt="x"), cancelled), Script("a")), "environment", "CancelledError: by a library")

    def test_a_step_that_shows_nothing(self) -> None:
        async def nothing() -> Any:
            return Step()

        self.failed(run(Scenes(Step(prompt="x"), nothing), Script("a")), "environment", "must show a prompt")

    def test_an_environment_that_cannot_be_built(self) -> None:
        def build() -> Env:
            raise OSError("no display")

        done = run(build, Script())
        self.failed(done, "environment", "OSError: no display (task t7, turn 0, building the environment)")
        assert states(done) == ["environment"]

    def test_a_fault_of_the_workers_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Characters, "first", lambda self, *shown: 1 / 0)
        self.failed(run(single_turn(), Script()), "", "ZeroDivisionError")

    def test_an_engine_that_raises(self) -> None:
        self.failed(run(single_turn(), Script(ConnectionError("engine gone"))), "engine", "ConnectionError: engine gone")

    def test_an_engine_that_does_not_exist(self) -> None:
        self.failed(run(single_turn(), Script("a"), lease=replace(LEASE, engine=1)), "engine", "IndexError")

    def test_an_engine_that_refuses(self) -> None:
        refusal = Chunk("", [], [], [], "error", "the prompt is too long")
        self.failed(run(single_turn(), Script(refusal)), "engine", "no reply from the engine: the prompt is too long")

    def test_an_abort(self) -> None:
        asked: list[Trajectory] = []
        done = run(single_turn(), Script(Chunk("", [65], [-1.0], [0], "aborted")), asked.append)
        assert (done.stop_reason, done.reward, done.trainable, asked) == ("aborted", None, False, [])
        assert done.token_ids.tolist() == [*map(ord, "2+2="), 65]

    @pytest.mark.parametrize("slow", ["engine", "environment", "reward", "engine's own deadline"])
    def test_the_deadline(self, slow: str) -> None:
        engine = Script("a", wait_s=30 if slow == "engine" else 0)
        if slow == "engine's own deadline":
            engine = Script(Chunk("", [65], [-1.0], [0], "deadline"))
        env = Scenes(Step(prompt="x"), Reached() if slow == "environment" else Step(done=True))
        judge = Reached().__call__ if slow == "reward" else lambda t: 1.0
        done = run(env, engine, judge, lease=replace(LEASE, deadline_s=0.05))
        assert (done.stop_reason, done.error, done.trainable) == ("deadline", "the episode took longer than 0.05 s", False)
        assert done.fault == slow.split("'")[0]
        assert env.num_closed == 1

    @pytest.mark.parametrize("scenes", [(Reached(),), (Step(prompt="x"), Reached())])
    def test_an_environment_that_is_late(self, scenes: tuple[Any, ...]) -> None:
        done = run(Scenes(*scenes), Script("a"), limits=Limits(4, 64, env_deadline_s=0.01))
        assert (done.stop_reason, done.fault) == ("deadline", "environment")
        assert done.error == "env Scenes took longer than 0.01 s for one answer"

    def test_an_engine_that_is_late(self) -> None:
        done = run(single_turn(), Script(Chunk("", [65], [-1.0], [0], "deadline", "no token for 60 s")))
        assert (done.stop_reason, done.fault, done.error) == ("deadline", "engine", "no token for 60 s")
        assert done.token_ids.tolist() == [*map(ord, "2+2="), 65]

    def test_an_environment_that_cannot_be_stopped_is_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def stubborn() -> Any:
            while not let_go.is_set():
                with suppress(asyncio.CancelledError):
                    await let_go.wait()

        let_go = asyncio.Event()
        monkeypatch.setattr(episode, "GRACE_S", 0.01)
        env = Scenes(stubborn)
        monkeypatch.setattr(env, "close", AsyncMock(side_effect=lambda: let_go.set()))
        done = run(env, Script(), lease=replace(LEASE, deadline_s=0.01))
        assert (done.stop_reason, done.fault) == ("deadline", "environment")

    def test_a_sample_comes_back_though_its_environment_does_not_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = run(Scenes(Step(prompt="x"), Step(done=True, reward=1.0), closing=OSError("disk")), Script("a"))
        assert (done.stop_reason, done.reward, done.trainable) == ("done", 1.0, True)
        assert done.error == "closing env Scenes failed: OSError: disk"
        monkeypatch.setattr(episode, "CLOSE_S", 0.01)
        done = run(Scenes(ValueError("no board"), closing=30.0), Script())
        self.failed(done, "environment", "no board", "closing env Scenes took longer than 0.01 s")


class TestLife:
    """When the sample was where. `run` checks every life for its order, its times, its places and its end."""

    def test_one_turn(self) -> None:
        said = Chunk("", [65, END], [-1.0, -1.0], [7, 8], "stop", "", 5, 4e9, 4e9 + 1)
        done = run(single_turn(), Script(said), lambda t: 1.0, lease=replace(LEASE, attempt=3))
        stamps = unpack_life(done.life)
        assert [stamp.state for stamp in stamps] == ["environment", "waiting", "generating", "environment", "reward", "done"]
        assert stamps[2] == ("generating", 4e9, 7, 0, 5)
        assert stamps[3] == ("environment", 4e9 + 1, -1, 2, -1)
        assert {stamp.time for stamp in stamps[4:]} == {4e9 + 1}, "the engine's clock is ahead, and nothing goes back"
        assert SampleInfo.of(done).life == done.life

    def test_several_turns(self) -> None:
        done = run(Scenes(Step(prompt="x"), Step(prompt="y"), Step(done=True)), Script("a", "b"))
        turn = ["environment", "waiting", "generating"]
        assert states(done) == [*turn, *turn, "environment", "reward", "done"]

    def test_a_request_that_never_got_a_slot(self) -> None:
        done = run(single_turn(), Script(Chunk("", [], [], [], "deadline", "no slot")))
        assert states(done) == ["environment", "waiting", "environment"]
        assert [turn.author for turn in done.turns] == ["environment"]

    def test_the_slot_of_a_reply_that_was_cut_short_is_given_back_in_time(self) -> None:
        """Otherwise the timeline would show two samples in one slot."""
        done = run(single_turn(), Script(Chunk("", [65], [-1.0], [7], "aborted", "", 5, 4e9, 4e9 + 1)))
        assert unpack_life(done.life)[-1] == ("environment", 4e9 + 1, -1, 2, -1)


class TestAbort:
    """No longer wanted: wherever the episode stands, it is back at once, with the tokens that it has."""

    def aborted(self, trajectory: Trajectory, *life: str) -> None:
        assert (trajectory.stop_reason, trajectory.fault, trajectory.error, trajectory.trainable) == ("aborted", "", "", False)
        assert states(trajectory) == list(life)

    def test_before_it_begins(self) -> None:
        at_once = asyncio.Event()
        at_once.set()
        self.aborted(run(Scenes(Reached()), Script(), abort_at=at_once), "environment")

    def test_in_its_environment(self) -> None:
        start, step = Reached(), Reached()
        env = Scenes(start)
        self.aborted(run(env, Script(), abort_at=start), "environment")
        done = run(Scenes(Step(prompt="x"), step), Script("ab"), abort_at=step)
        self.aborted(done, "environment", "waiting", "generating", "environment")
        assert (done.text, done.num_new_tokens) == ("xab", 3)
        assert env.num_closed == 1

    def test_in_an_environment_that_catches_everything(self) -> None:
        async def careless() -> Step:
            try:
                await start()
            except BaseException:
                return Step(prompt="x")
            raise AssertionError

        start, engine = Reached(), Script("a")
        self.aborted(run(Scenes(careless), engine, abort_at=start), "environment")
        assert engine.requests == []

    def test_in_its_rewards(self) -> None:
        judge = Reached()
        done = run(single_turn(), Script("4"), judge.__call__, abort_at=judge)
        self.aborted(done, "environment", "waiting", "generating", "environment", "reward")
        assert done.reward is None

    def test_in_the_engines_queue(self) -> None:
        engine = Line()
        self.aborted(run(single_turn(), engine.client(), abort_at=engine.submitted), "environment", "waiting", "environment")
        assert engine.aborted == ["g/000/0/0"]

    @pytest.mark.parametrize("mute", [False, True])
    def test_while_it_generates(self, mute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tokens that were sampled before the abort are there, whether or not the engine still answers."""
        monkeypatch.setattr(engine_client, "LAST_CHUNK_S", 0.01)
        engine = Line(mute=mute)
        engine.says("g/000/0/0", "ab")
        done = run(single_turn(), engine.client(), abort_at=engine.heard)
        assert (done.text, done.num_new_tokens) == ("2+2=ab", 2)
        in_slot = [] if mute else ["generating"]
        self.aborted(done, "environment", "waiting", *in_slot, "environment")
        assert engine.aborted == ["g/000/0/0"]

    def test_a_sample_that_has_ended_stays_as_it_is(self) -> None:
        async def close() -> None:
            closing.set()
            await asyncio.sleep(0)

        closing = asyncio.Event()
        env = single_turn()
        env.close = close  # type: ignore[method-assign]
        assert run(env, Script("4"), lambda t: 1.0, abort_at=closing).stop_reason in ("stop", "done")


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
        assert (done.stop_reason, done.trainable, done.fault) == ("failed", False, "environment")
        assert "the environment's rewards add up to" in done.error

    def test_a_reward_that_raises(self) -> None:
        def judge(trajectory: Trajectory) -> float:
            raise RuntimeError("asleep")

        done = run(single_turn(), Script("a"), judge)
        assert (done.stop_reason, done.reward, done.fault) == ("failed", None, "reward")
        assert "reward 'judge' failed on task 't7': RuntimeError: asleep" in done.error


class TestEngineClient:
    """The line to one engine: many episodes, one submit and one poll at a time."""

    @staticmethod
    def request(number: int) -> GenRequest:
        return GenRequest(f"r{number}", [1], Sampling(), seed=number)

    def ask(self, engine: Line, count: int = 1, stall_s: float = 60.0) -> list[Chunk]:
        async def ask() -> list[Chunk]:
            client = engine.client()
            chunks = await asyncio.gather(*(client.generate(self.request(number), stall_s) for number in range(count)))
            while client._sender is not None:
                await asyncio.sleep(0)
            return chunks

        return asyncio.run(asyncio.wait_for(ask(), 20))

    def test_replies_are_joined_and_requests_travel_together(self) -> None:
        engine = Line()
        for number in range(50):
            engine.says(f"r{number}", "ab")
            engine.says(f"r{number}", "c", "stop")
        chunks = self.ask(engine, 50)
        assert chunks == [
            Chunk(f"r{number}", [*map(ord, "abc")], [-1.0] * 3, [3] * 3, "stop", "", *Line.SLOT) for number in range(50)
        ]  # fmt: skip
        assert engine.calls.count(("submit", 30.0)) == 1
        assert {call for call in engine.calls if call[0] != "submit"} == {("poll", 32.0)}

    @pytest.mark.parametrize("broken", ["submit", "poll"])
    def test_an_engine_that_is_out_of_reach_fails_everyone_who_waits(self, broken: str) -> None:
        engine = Line(broken=broken)
        assert [(chunk.finish, chunk.error) for chunk in self.ask(engine, 3)] == [("lost", "it did not answer: gone")] * 3
        assert engine.aborted == ["r0", "r1", "r2"], "should it come back, nothing of it is wanted any more"

    def test_so_does_one_that_cannot_be_told_to_abort(self) -> None:
        late, failed = self.ask(Line("part", *["busy"] * 100, broken="abort"), 2)
        assert (late.finish, failed.finish) == ("deadline", "lost")

    def test_a_frozen_engine_is_noticed_by_the_deadline_of_a_call(self) -> None:
        async def frozen(method: str, *arguments: Any, deadline_s: float) -> Any:
            async with asyncio.timeout(deadline_s / 1000):
                await asyncio.Event().wait()

        engine = Line()
        engine.call = frozen  # type: ignore[method-assign, assignment]
        assert [chunk.finish for chunk in self.ask(engine, 2)] == ["lost"] * 2

    def test_a_silent_engine_at_work_is_late(self) -> None:
        engine = Line(*["silent"] * 100)
        chunk = self.ask(engine)[0]
        assert (chunk.finish, chunk.token_ids) == ("deadline", [])
        assert chunk.error == "the engine was at work and gave no token of the reply for 60 s"
        assert engine.aborted == ["r0"]
        assert 60 < engine.now <= 70

    def test_a_short_stall_is_noticed_as_exactly(self) -> None:
        engine = Line(*["silent"] * 100)
        assert self.ask(engine, stall_s=1.0)[0].finish == "deadline"
        assert 1 < engine.now <= 2.25

    def test_tokens_that_came_before_the_silence_are_kept(self) -> None:
        chunk = self.ask(Line("part", "part", *["silent"] * 100))[0]
        assert (chunk.finish, chunk.token_ids, chunk.slot) == ("deadline", [ord("x")] * 2, -1)

    @pytest.mark.parametrize(
        "ticks",
        [
            ["paused"] * 500,
            ["busy"] * 500,
            ["part"] * 500,
            ["silent", "paused", "paused"] * 20,
            ["part", *["paused"] * 500, *["silent"] * 20],
            [*["silent"] * 20, "busy"] * 20,
        ],
    )
    def test_an_engine_that_is_paused_or_busy_or_slow_is_not_late(self, ticks: list[str]) -> None:
        engine = Line(*ticks, "end")
        assert self.ask(engine)[0].finish == "stop"
        assert engine.aborted == []

    def test_tokens_of_others_do_not_excuse_silence_about_a_reply_that_has_begun(self) -> None:
        engine = Line("part", *["busy"] * 100)
        assert self.ask(engine)[0].finish == "deadline"
        assert 60 < engine.now <= 70

    @given(st.lists(st.sampled_from(["paused", "silent", "silent", "silent", "busy", "part"]), max_size=40))
    def test_late_is_who_is_silent_for_too_long(self, ticks: list[str]) -> None:
        silence, longest, begun = 0.0, 0.0, False
        for tick in ticks[1:] if ticks[:1] != ["part"] else ticks:  # time counts from the first poll on
            begun = begun or tick == "part"
            news = tick == "part" or (tick == "busy" and not begun)
            silence = 0.0 if news else silence + (tick != "paused")
            longest = max(longest, silence)
        late = self.ask(Line(*ticks, "end"), stall_s=4.0)[0].finish == "deadline"  # polls are one second apart
        assert late == (longest > 4)

    def test_many_that_are_no_longer_wanted_leave_the_engine_together(self) -> None:
        engine = Line()

        async def ask() -> list[Chunk]:
            client = engine.client()
            callers = [asyncio.create_task(client.generate(self.request(number), 60.0)) for number in range(20)]
            for number in range(20):
                engine.says(f"r{number}", "ab")
            await engine.heard.wait()
            for caller in callers:
                caller.cancel()
            return await asyncio.gather(*callers)

        chunks = asyncio.run(asyncio.wait_for(ask(), 20))
        assert {(chunk.finish, len(chunk.token_ids), chunk.slot) for chunk in chunks} == {("aborted", 2, 5)}
        assert [method for method, _ in engine.calls].count("abort") == 1
        assert engine.aborted == engine.requests == [f"r{number}" for number in range(20)]

    def test_what_is_cancelled_before_it_is_sent_never_gets_to_the_engine(self) -> None:
        engine = Line()

        async def ask() -> list[Chunk]:
            client = engine.client()
            callers = [asyncio.create_task(client.generate(self.request(number), 60.0)) for number in range(2)]
            asyncio.get_running_loop().call_soon(callers[0].cancel)
            engine.says("r1", "a", "stop")
            return await asyncio.gather(*callers)

        first, second = asyncio.run(asyncio.wait_for(ask(), 20))
        assert (first.finish, second.finish) == ("aborted", "stop")
        assert (engine.requests, engine.aborted) == (["r1"], [])

    def test_a_reply_that_ends_while_it_is_aborted_is_aborted(self) -> None:
        engine = Line(mute=True)

        async def ask() -> Chunk:
            caller = asyncio.create_task(engine.client().generate(self.request(0), 60.0))
            await engine.submitted.wait()
            caller.cancel()
            engine.says("r0", "ab", "stop")
            return await caller

        chunk = asyncio.run(asyncio.wait_for(ask(), 20))
        assert (chunk.finish, len(chunk.token_ids), chunk.slot) == ("aborted", 2, 5)
