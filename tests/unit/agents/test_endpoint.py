"""The endpoint, against real agents in a process of their own (`agent_script`) and against clients that misbehave."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from scripted_engine import LEASE, ScriptedEngine, make_tokenizer

from drumroll.agents.endpoint import Endpoint
from drumroll.agents.process import Agent
from drumroll.agents.protocol import Refusal
from drumroll.agents.sessions import Failure, SessionLimits, SessionResult
from drumroll.text.tokenizer import Tokenizer
from drumroll.types import Chunk, Task

LIMITS = SessionLimits(context_tokens=2000, session_tokens=8000, max_calls=20)
SCRIPT = Path(__file__).with_name("agent_script.py")
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
SCENARIOS = ("single", "turns", "tools", "stream", "branches", "rewrite", "leaves", "failures")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rule(prompt: str) -> str:
    """The scripted policy: its answer depends on the last thing that it was told."""
    told = prompt.removesuffix("assistant=").rpartition("=")[2]
    if told == "tool please":
        return f"Let me add. {CALLS}"
    if told in ("hang", "DEADLINE", "ERROR", "ABORTED"):
        return told.upper()
    if told == "raise":
        raise RuntimeError("the device fell off")
    return f"I heard {told}, {len(prompt)} characters in all"


@asynccontextmanager
async def serving(tokenizer: Tokenizer, **options: Any) -> AsyncIterator[tuple[Endpoint, ScriptedEngine]]:
    endpoint = Endpoint(tokenizer, **options)
    await endpoint.start()
    try:
        async with asyncio.timeout(100):
            yield endpoint, ScriptedEngine(tokenizer, rule)
    finally:
        await endpoint.close()


@dataclass
class Seen:
    """What one scenario left: on the agent's side, in the engine, and as a result."""

    agent: Any
    engine: ScriptedEngine
    result: SessionResult


@pytest.fixture(scope="module")
def seen(tokenizer: Tokenizer) -> dict[str, Seen]:
    """All scenarios, by agents in one process, each with a session and an engine of its own."""

    async def main() -> dict[str, Seen]:
        async with serving(tokenizer) as (endpoint, _):
            engines = {name: ScriptedEngine(tokenizer, rule) for name in SCENARIOS}
            keys = {name: endpoint.open_session(LEASE, engine, LIMITS) for name, engine in engines.items()}
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(SCRIPT),
                json.dumps(keys),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "OPENAI_BASE_URL": endpoint.base_url},
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0
            while not engines["leaves"].dropped:
                await asyncio.sleep(0.01)
            said = json.loads(printed)
            return {name: Seen(said[name], engines[name], await endpoint.close_session(keys[name])) for name in SCENARIOS}

    return asyncio.run(main())


def trajectories(result: SessionResult) -> list[Any]:
    return [result.trajectory, *result.branches]


@pytest.mark.parametrize("name", SCENARIOS[:-1])
def test_what_is_recorded_is_what_the_engine_was_given_and_sampled(seen: dict[str, Seen], name: str) -> None:
    engine, result = seen[name].engine, seen[name].result
    assert engine.sampled
    for request_id, chunk in engine.sampled.items():
        prompt = list(engine.given[request_id].token_ids)
        start, end = len(prompt), len(prompt) + len(chunk.token_ids)
        holders = [each for each in trajectories(result) if each.token_ids[:end].tolist() == prompt + chunk.token_ids]
        owners = [each for each in holders if each.loss_mask[start:end].any()]
        assert len(owners) == 1
        assert owners[0].loss_mask[start:end].all()
        assert owners[0].logp[start:end].tolist() == np.float32(chunk.logp).tolist()
        assert owners[0].token_version[start:end].tolist() == chunk.token_version
    num_sampled = sum(len(chunk.token_ids) for chunk in engine.sampled.values())
    assert sum(each.num_new_tokens for each in trajectories(result)) == num_sampled, "nothing else is trained on"


def test_a_single_call(seen: dict[str, Seen]) -> None:
    said, engine, result = seen["single"].agent, seen["single"].engine, seen["single"].result
    (request,), (chunk,) = engine.given.values(), engine.sampled.values()
    assert said == ["I heard hello, 20 characters in all", "stop", len(request.token_ids), len(chunk.token_ids)]
    assert (request.sampling.temperature, request.deadline_s) == (1.0, LEASE.deadline_s), "the lease's settings rule"
    trajectory = result.trajectory
    assert (trajectory.sample_id, trajectory.group_id, trajectory.task, trajectory.attempt) == ("train/3/t7/0", "train/3/t7", LEASE.task, 1)
    assert (trajectory.reward, trajectory.success, trajectory.metrics["moves"], trajectory.stop_reason) == (1.0, True, 3.0, "done")
    assert trajectory.trainable


def test_several_turns_are_one_trajectory(seen: dict[str, Seen]) -> None:
    said, result = seen["turns"].agent, seen["turns"].result
    assert not result.branches
    assert [turn.text for turn in result.trajectory.turns if turn.author == "policy"] == said
    assert result.trajectory.turns[0].text == "system=be briefuser=oneassistant="
    assert result.trajectory.reward == 0.75


def test_tool_calls(seen: dict[str, Seen]) -> None:
    content, calls, last, finish = seen["tools"].agent
    assert (content, calls, finish) == ("Let me add.", [["add", {"a": 3, "b": 4}]], "stop")
    assert last.startswith("I heard 7,")
    result = seen["tools"].result
    assert not result.branches, "sent back, they continue"
    assert [turn.text for turn in result.trajectory.turns][1] == f"Let me add. {CALLS}"


def test_streams(seen: dict[str, Seen]) -> None:
    content, num_tokens, finish, arguments, last = seen["stream"].agent
    chunks = list(seen["stream"].engine.sampled.values())
    assert content.startswith("I heard a long story,")
    assert (num_tokens, finish, arguments) == (len(chunks[0].token_ids), "tool_calls", [{"a": 3, "b": 4}])
    assert last.startswith("I heard 7,")
    assert not seen["stream"].result.branches, "tool calls that come back without the text beside them continue"


def test_branches_run_in_parallel_and_share_the_verdict(seen: dict[str, Seen]) -> None:
    result = seen["branches"].result
    left, right, alone = seen["branches"].agent
    assert [each.last_reply for each in trajectories(result)] == [right, left, alone], "by the tokens sampled on the way to it"
    assert [each.sample_id for each in result.branches] == ["train/3/t7/0/b1", "train/3/t7/0/b2"]
    assert all((each.reward, each.group_id) == (1.0, "train/3/t7") for each in trajectories(result))
    assert result.trajectory.metrics["agent_branches"] == 3


def test_a_history_that_was_rewritten_is_a_branch_of_its_own(seen: dict[str, Seen]) -> None:
    result = seen["rewrite"].result
    (branch,) = result.branches
    assert "assistant=never said" in branch.turns[0].text
    assert branch.last_reply == seen["rewrite"].agent
    assert [turn.author for turn in result.trajectory.turns] == ["environment", "policy"] * 2


def test_an_agent_that_leaves_takes_its_request_out_of_the_engine(seen: dict[str, Seen]) -> None:
    engine, result = seen["leaves"].engine, seen["leaves"].result
    assert seen["leaves"].agent == "assistant", "the stream had begun"
    assert len(engine.dropped) == 1
    assert engine.running == 0
    trajectory = result.trajectory
    assert (trajectory.stop_reason, trajectory.fault, trajectory.reward) == ("failed", "environment", None)
    assert "without posting a reward" in trajectory.error
    assert trajectory.metrics["agent_dropped_calls"] == 1
    assert not trajectory.trainable


def test_everything_that_is_refused(seen: dict[str, Seen]) -> None:
    refused, models = seen["failures"].agent
    assert refused == {
        "another key": [401, "invalid_api_key"],
        "another key, reward": [401, "invalid_api_key"],
        "unknown path": [404, "unknown_url"],
        "two choices": [400, "invalid_value"],
        "a forced tool": [400, "invalid_value"],
        "no messages": [400, "invalid_value"],
        "an image": [400, "invalid_value"],
        "no token for it": [400, "invalid_messages"],
        "too long for the context": [400, "context_length_exceeded"],
        "100 MB": [413, "request_too_large"],
        "100 MB, another key": [401, "invalid_api_key"],
        "garbage": [400, "invalid_json"],
        "no number": [400, "invalid_value"],
    }
    assert models == ["policy"], "the endpoint is still there"
    assert not seen["failures"].engine.given
    trajectory = seen["failures"].result.trajectory
    assert (trajectory.stop_reason, trajectory.fault, trajectory.reward) == ("failed", "environment", None)
    assert "Requests refused: 9" in trajectory.error
    assert not trajectory.trainable


async def post(endpoint: Endpoint, key: str, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client:
        url, headers = endpoint.base_url + path, {"Authorization": f"Bearer {key}"}
        async with client.post(url, headers=headers, **({"json": body} if not isinstance(body, bytes) else {"data": body})) as answer:
            return answer.status, await answer.json() if answer.content_type == "application/json" else await answer.text()


def saying(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], **options}


@pytest.mark.parametrize(
    ("told", "stop", "fault", "error"),
    [
        ("ERROR", "failed", "engine", "no reply from the engine: said so"),
        ("raise", "failed", "engine", "no reply from the engine: RuntimeError: the device fell off"),
        ("DEADLINE", "deadline", "engine", "said so"),
        ("ABORTED", "aborted", "engine", "the engine dropped the reply"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_never_the_agents_fault(
    tokenizer: Tokenizer, told: str, stop: str, fault: str, error: str, stream: bool
) -> None:
    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            key = endpoint.open_session(LEASE, engine, LIMITS)
            assert (await post(endpoint, key, "/chat/completions", saying("fine")))[0] == 200
            status, body = await post(endpoint, key, "/chat/completions", saying(told, stream=stream))
            if stream:
                assert status == 200
                events = [json.loads(line.removeprefix("data: ")) for line in body.strip().split("\n\n")[:-1]]
                body = events[-1]
            else:
                assert status == 503
            assert body["error"]["code"] == "engine_failed"
            await endpoint.session_over(key)
            status, body = await post(endpoint, key, "/reward", {"reward": 1})
            assert (status, body["error"]["code"]) == (503, "session_failed")
            trajectory = (await endpoint.close_session(key, Failure("failed", "exit code 1", "environment"))).trajectory
            assert (trajectory.stop_reason, trajectory.fault, trajectory.error, trajectory.reward) == (stop, fault, error, None)

    asyncio.run(main())


def test_an_engine_that_answers_a_cancelled_call_with_what_it_has(tokenizer: Tokenizer) -> None:
    """Tokens of a reply that the agent has not waited for are not trained on, and are no failure of the engine."""

    class Answering(ScriptedEngine):
        async def generate(self, request: Any, stall_s: float) -> Chunk:
            try:
                return await super().generate(request, stall_s)
            except asyncio.CancelledError:
                return Chunk(request.id, [5, 6], [-0.5, -0.5], [1, 1], "aborted")

    async def main() -> None:
        async with serving(tokenizer) as (endpoint, _):
            engine = Answering(tokenizer, rule)
            key = endpoint.open_session(LEASE, engine, LIMITS)
            leaving = asyncio.create_task(post(endpoint, key, "/chat/completions", saying("hang")))
            await engine.hangs.wait()
            leaving.cancel()
            while not engine.dropped:
                await asyncio.sleep(0)
            assert (await post(endpoint, key, "/chat/completions", saying("fine")))[0] == 200
            assert (await post(endpoint, key, "/reward", {"reward": 1})) == (200, {"reward": 1.0, "done": True})
            result = await endpoint.close_session(key)
            assert result.trajectory.trainable
            assert result.trajectory.metrics["agent_dropped_calls"] == 1
            assert not result.branches

    asyncio.run(main())


def test_a_session_that_has_ended_takes_nothing_and_waits_for_nothing(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            key = endpoint.open_session(LEASE, engine, LIMITS)
            await post(endpoint, key, "/chat/completions", saying("fine"))
            waiting = asyncio.create_task(post(endpoint, key, "/chat/completions", saying("hang")))
            await engine.hangs.wait()
            await post(endpoint, key, "/reward", {"reward": 1})
            await endpoint.session_over(key)
            status, body = await waiting
            assert (status, body["error"]["code"]) == (401, "session_ended")
            for path, sent in (("/chat/completions", saying("x")), ("/reward", {"reward": 5})):
                status, body = await post(endpoint, key, path, sent)
                assert (status, body["error"]["code"]) == (401, "session_ended")
            result = await endpoint.close_session(key)
            assert result.trajectory.reward == 1.0
            assert (await post(endpoint, key, "/chat/completions", saying("x")))[0] == 401
            with pytest.raises(Refusal, match="opens no session"):
                await endpoint.close_session(key)

    asyncio.run(main())


def test_a_session_closed_by_its_owner_leaves_the_engine(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            key = endpoint.open_session(LEASE, engine, LIMITS)
            other = endpoint.open_session(replace(LEASE, sample_id="other"), engine, LIMITS)
            waiting = asyncio.create_task(post(endpoint, key, "/chat/completions", saying("hang")))
            await engine.hangs.wait()
            result = await endpoint.close_session(key, Failure("deadline", "600 s are over", "environment"))
            assert engine.running == 0
            assert (result.trajectory.stop_reason, result.trajectory.error) == ("deadline", "600 s are over")
            assert (await waiting)[0] == 401
            assert (await post(endpoint, other, "/chat/completions", saying("fine")))[0] == 200, "others are not touched"

    asyncio.run(main())


def test_calls_beyond_the_limit_wait_for_their_turn(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            key = endpoint.open_session(LEASE, engine, replace(LIMITS, max_parallel=2))
            bodies = [saying(f"question {number}") for number in range(9)]
            answers = await asyncio.gather(*(post(endpoint, key, "/chat/completions", body) for body in bodies))
            assert [status for status, _ in answers] == [200] * 9
            texts = [body["choices"][0]["message"]["content"] for _, body in answers]
            assert [text.split(",")[0] for text in texts] == [f"I heard question {number}" for number in range(9)]
            assert engine.most_running <= 2

    asyncio.run(main())


def test_budgets_of_a_session(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            key = endpoint.open_session(LEASE, engine, SessionLimits(2000, 60, max_calls=5))
            status, body = await post(endpoint, key, "/chat/completions", saying("x", max_tokens=10))
            assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
            assert body["usage"]["completion_tokens"] == 10
            status, body = await post(endpoint, key, "/chat/completions", saying("x" * 30))
            assert (status, body["error"]["code"]) == (400, "session_budget_exceeded")
            await post(endpoint, key, "/reward", {"reward": 0})
            trajectory = (await endpoint.close_session(key)).trajectory
            assert (trajectory.stop_reason, trajectory.reward, trajectory.trainable) == ("length", 0.0, True)

    asyncio.run(main())


def test_bodies_without_a_length_are_limited_too(tokenizer: Tokenizer) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 65536

    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine), aiohttp.ClientSession() as client:
            key = endpoint.open_session(LEASE, engine, LIMITS)
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(f"{endpoint.base_url}/chat/completions", data=endless(), headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (413, "request_too_large")
            assert (await post(endpoint, key, "/chat/completions", saying("fine")))[0] == 200

    asyncio.run(main())


def test_bytes_that_are_no_request_leave_the_endpoint_up(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            key = endpoint.open_session(LEASE, engine, LIMITS)
            host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            for sent in (b"\x00\xff\xfe" * 100 + b"\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                await writer.drain()
                writer.close()
            assert (await post(endpoint, key, "/chat/completions", saying("fine")))[0] == 200

    asyncio.run(main())


def test_a_mistake_of_this_program_fails_the_session(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr("drumroll.agents.endpoint.make_reply", broken)

    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            for stream in (False, True):
                key = endpoint.open_session(LEASE, engine, LIMITS, is_judged=True)
                _, body = await post(endpoint, key, "/chat/completions", saying("fine", stream=stream))
                assert "internal_error" in str(body)
                trajectory = (await endpoint.close_session(key)).trajectory
                assert (trajectory.stop_reason, trajectory.fault) == ("failed", "")
                assert "KeyError: 'a mistake'" in trajectory.error
                engine.given.clear()

    asyncio.run(main())


def test_it_listens_on_this_machine_alone_and_keys_are_long(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as (endpoint, engine):
            assert endpoint.base_url.startswith("http://127.0.0.1:")
            keys = {endpoint.open_session(LEASE, engine, LIMITS) for _ in range(100)}
            assert len(keys) == 100
            assert min(map(len, keys)) > 40
            for header in ({}, {"Authorization": "Bearer "}, {"Authorization": next(iter(keys)).swapcase()}, {"Authorization": "Bearer é"}):
                async with aiohttp.ClientSession() as client, client.get(endpoint.base_url + "/models", headers=header) as answer:
                    assert answer.status == 401

    asyncio.run(main())


# Agents as programs. They use the standard library alone, which starts faster than the official client.
HEAD = """
import json, os, sys, time, urllib.request
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def ask(text):
    return post("/chat/completions", {"messages": [{"role": "user", "content": text}]})["choices"][0]["message"]["content"]
"""


def run_program(
    tokenizer: Tokenizer,
    program: str,
    act: Callable[[asyncio.Task[SessionResult], ScriptedEngine], Awaitable[None]] | None = None,
    is_judged: bool = False,
    **lease: Any,
) -> tuple[SessionResult, ScriptedEngine]:
    agent = Agent(Agent.Config(command=(sys.executable, "-c", HEAD + program), variables={"GREETING": "hello"}))

    async def main() -> tuple[SessionResult, ScriptedEngine]:
        async with serving(tokenizer) as (endpoint, engine):
            order = replace(LEASE, **lease)
            episode = asyncio.create_task(agent.run(order, endpoint, engine, max_calls=9, max_tokens=2000, is_judged=is_judged))
            if act is not None:
                await act(episode, engine)
            return await episode, engine

    return asyncio.run(main())


def test_an_agent_as_a_program(tokenizer: Tokenizer) -> None:
    program = """
task = json.loads(os.environ["DRUMROLL_TASK"])
assert task == {"id": "t", "domain": "d", "prompt": None, "messages": [{"role": "user", "content": "hi"}], "data": {"seed": 3}}, task
reply = ask(os.environ["GREETING"])
post("/reward", {"reward": float(reply.startswith("I heard hello")), "success": True})
sys.exit(3)
"""
    task = Task("t", messages=({"role": "user", "content": "hi"},), domain="d", data={"seed": 3})
    result, _ = run_program(tokenizer, program, task=task)
    trajectory = result.trajectory
    assert (trajectory.error, trajectory.reward, trajectory.success, trajectory.task) == ("", 1.0, True, task), "the verdict stands"


@pytest.mark.parametrize(
    ("program", "is_judged", "error"),
    [
        ('ask("x"); print("good bye"); sys.exit(3)', True, "the agent ended with exit code 3; it printed:\ngood bye"),
        ('ask("x"); os.kill(os.getpid(), 9)', True, "the agent was ended by signal 9"),
        ('ask("x")', False, "the agent ended without posting a reward, and no reward is configured."),
        ("", True, "the agent got no reply from the policy."),
        ('ask("x"); post("/reward", {"reward": 1, "done": False}); 1 / 0', False, "ZeroDivisionError: division by zero"),
    ],
)
def test_programs_that_give_no_verdict(tokenizer: Tokenizer, program: str, is_judged: bool, error: str) -> None:
    trajectory = run_program(tokenizer, program, is_judged=is_judged)[0].trajectory
    assert (trajectory.stop_reason, trajectory.fault, trajectory.reward) == ("failed", "environment", None)
    assert error in trajectory.error


def test_a_program_that_reward_functions_judge(tokenizer: Tokenizer) -> None:
    trajectory = run_program(tokenizer, 'ask("x")', is_judged=True)[0].trajectory
    assert (trajectory.stop_reason, trajectory.error, trajectory.reward) == ("done", "", None)


def test_a_program_that_does_not_end_is_killed_with_its_children(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The child holds a lock on a file for as long as it lives."""
    lock = tmp_path / "lock"
    program = f"""
import fcntl
held = open({str(lock)!r}, "w")
fcntl.flock(held, fcntl.LOCK_EX)
if os.fork() == 0:
    time.sleep(1000)
ask("x")
time.sleep(1000)
"""

    async def act(episode: asyncio.Task[SessionResult], engine: ScriptedEngine) -> None:
        while not engine.sampled:
            await asyncio.sleep(0.01)
        episode.cancel()

    result, _ = run_program(tokenizer, program, act)
    assert (result.trajectory.stop_reason, result.trajectory.reward) == ("aborted", None)
    assert result.trajectory.num_new_tokens > 0, "what it has comes back"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # waits for ever while the child lives


def test_a_program_that_takes_too_long(tokenizer: Tokenizer) -> None:
    trajectory = run_program(tokenizer, "time.sleep(1000)", deadline_s=0.2)[0].trajectory
    assert (trajectory.stop_reason, trajectory.fault, trajectory.error) == ("deadline", "environment", "the agent took longer than 0.2 s")


def test_a_program_whose_engine_fails_is_not_blamed(tokenizer: Tokenizer) -> None:
    trajectory = run_program(tokenizer, 'ask("ERROR")')[0].trajectory
    assert (trajectory.stop_reason, trajectory.fault) == ("failed", "engine")


@pytest.mark.parametrize(
    ("config", "task", "error"),
    [
        ({"command": ("/no/such/program",)}, LEASE.task, "FileNotFoundError"),
        ({"command": ("true",), "folder": "/no/such/folder"}, LEASE.task, "FileNotFoundError"),
        ({"command": ("true",)}, Task("t", data={"x": object()}), "TypeError"),
        ({"command": ("true",)}, Task("t", data={"x": "y" * 1_000_000}), "OSError"),
    ],
)
def test_programs_that_cannot_be_started(tokenizer: Tokenizer, config: dict[str, Any], task: Task, error: str) -> None:
    async def main() -> SessionResult:
        async with serving(tokenizer) as (endpoint, engine):
            agent, order = Agent(Agent.Config(**config)), replace(LEASE, task=task)
            return await agent.run(order, endpoint, engine, max_calls=9, max_tokens=2000, is_judged=False)

    trajectory = asyncio.run(main()).trajectory
    assert (trajectory.stop_reason, trajectory.fault) == ("failed", "environment")
    assert f"cannot be run: {error}" in trajectory.error
