"""Environments of verifiers (`verifiers.v1`): its rows are the tasks, its rewards the reward, and the policy gives the replies.

    env: {kind: verifiers, taskset: my_taskset}
    data: {train: {seeds: 0-799}, heldout: {seeds: 800-999}}      # numbers of the taskset's rows

A taskset without an environment of its own is one turn. An environment of its own talks in its `run` to its only agent; here, that agent is
the policy: each of its turns ends up as the next step, and no endpoint, harness program or server is started.

    start ──► run(task, agents) ──► turn(message) ──► what the model sees
    step(reply) ──► the turn's reply ──► turn(message) … ──► finalize, rewards ──► done

The code of verifiers is asynchronous and runs in the event loop of the episodes. What is random in it must follow from the row.

Refused: environments with several agents or several conversations in an episode, tools, skills, containers, images, `@intercept` hooks,
`start` and `stop` of an environment's own, and conversations whose earlier messages change.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from pydantic import PositiveInt

from drumroll.config.models import EnvConfig
from drumroll.envs.base import Env, Step, seed_of
from drumroll.errors import DataError, PluginError, RolloutError
from drumroll.registry import REGISTRY, register, require
from drumroll.types import Message, Task

require("verifiers", extra="verifiers")


@register.env("verifiers")
class Verifiers(Env):
    """One episode of an environment of verifiers. The task's seed is the number of the taskset's row."""

    class Config(EnvConfig):
        kind: str = "verifiers"
        taskset: str
        """The module that exports the taskset, and its environment if it has one, by `__all__`: an installed package, or `./file.py`."""
        env: str = ""
        """Another environment of verifiers to play the taskset with."""
        options: dict[str, Any] = {}
        """The rest of the section `env` of verifiers' own config, for example `{taskset: {level: hard}}`."""
        max_turns: PositiveInt | None = None
        """The conversation ends after this many replies, and is scored as it stands. Not more than `rollout.max_turns`, which ends it
        without a score."""
        success_at: float = 1.0
        """The episode is a success when its reward is at least this much."""

    config: Config
    _play: asyncio.Task[Any] | None = None

    async def start(self, task: Task) -> Step:
        options = json.dumps(self.config.options, sort_keys=True)
        env, row = await asyncio.to_thread(_row, self.config.taskset, self.config.env, options, seed_of(task))
        self._talk = _Talk()
        self._play = asyncio.create_task(_play(env, row, self._talk, self.config.max_turns))
        return await self._next()

    async def step(self, reply: str) -> Step:
        self._talk.replies.put_nowait(reply)
        return await self._next()

    async def close(self) -> None:
        if self._play is not None:
            self._play.cancel()
            await asyncio.wait({self._play})
            if not self._play.cancelled():
                self._play.exception()  # whoever asked for the last step knows it

    async def _next(self) -> Step:
        """What the conversation comes to: another turn, or its end."""
        assert self._play is not None
        turn = asyncio.create_task(self._talk.turns.get())
        try:
            await asyncio.wait({turn, self._play}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            turn.cancel()
        if turn.done() and not turn.cancelled():
            return Step(messages=turn.result())
        return self._verdict(self._play.result())

    def _verdict(self, trace: Any) -> Step:
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Step(
            done=True,
            reward=trace.reward if parts else None,
            success=trace.reward >= self.config.success_at if parts else None,
            metrics={**metrics, **parts, "turns": float(trace.num_turns)},
        )


class _Talk:
    """Between the environment, which asks, and the policy, which replies."""

    def __init__(self) -> None:
        self.turns: asyncio.Queue[Sequence[Message]] = asyncio.Queue()
        self.replies: asyncio.Queue[str] = asyncio.Queue()
        self.begun = False

    def begin(self) -> None:
        if self.begun:
            raise PluginError("the environment of verifiers begins a second conversation in one episode; only one can be trained on")
        self.begun = True

    async def ask(self, messages: Sequence[Message]) -> str:
        self.turns.put_nowait(messages)
        return await self.replies.get()


class _Rows:
    """The rows of a taskset, read as far as they are needed."""

    def __init__(self, taskset: Any) -> None:
        self._rest: Iterator[Any] = iter(taskset)
        self._rows: list[Any] = []
        self._lock = threading.Lock()

    def row(self, number: int) -> Any:
        with self._lock:
            while len(self._rows) <= number:
                try:
                    self._rows.append(next(self._rest))
                except StopIteration:
                    raise DataError(
                        f"the taskset of verifiers has {len(self._rows)} rows, and row {number} was asked for. "
                        f"`seeds` are the numbers of its rows, from 0."
                    ) from None
            return self._rows[number]


_OPENING = threading.Lock()


def _row(taskset: str, env: str, options: str, number: int) -> tuple[Any, Any]:
    """The environment and one of its rows."""
    with _OPENING:
        opened, rows = _open(taskset, env, options)
    return opened, rows.row(number)


@cache
def _open(taskset: str, env: str, options: str) -> tuple[Any, _Rows]:
    """The environment and its rows, for all episodes of this process."""
    import verifiers.v1 as vf

    name = REGISTRY.load_file(taskset).__name__ if taskset.endswith(".py") else taskset
    section = json.loads(options)
    section |= {"id": env, "taskset": {**section.get("taskset", {}), "id": name}}
    try:
        opened = vf.load_environment(vf.resolve_env_config(section))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise PluginError(f"`env.taskset: {taskset}` cannot be opened by verifiers: {error}") from error
    _refuse(opened, taskset)
    return opened, _Rows(opened.taskset)


def _refuse(env: Any, name: str) -> None:
    """A `PluginError` for what cannot be played."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.decorators import discover_decorated

    task_type = type(env.taskset).task_type()
    seats = agent_config_fields(env.config)
    uses = {
        f"has the agents {', '.join(seats)}": len(seats) != 1,
        "has tools": bool(task_type.toolsets(env.taskset.config.task) or env.taskset.toolsets(env.taskset.config)),
        "needs a container": task_type.NEEDS_CONTAINER,
        "has `@intercept` hooks": bool(discover_decorated(object.__new__(task_type), "intercept")),
        "has a `start` or `stop` of its own": type(env).start is not vf.Env.start or type(env).stop is not vf.Env.stop,
    }
    for use, found in uses.items():
        if found:
            raise PluginError(f"`env.taskset: {name}`: the environment of verifiers {use}, which drumroll cannot play.")


async def _play(env: Any, task: Any, talk: _Talk, max_turns: int | None) -> Any:
    """One episode of verifiers with the policy as its agent; the trace, with its rewards."""
    import verifiers.v1 as vf

    if task.data.skills or task.data.image is not None:
        raise PluginError(f"row {task.data.idx} of verifiers' taskset needs skills or an image, which drumroll cannot give it.")
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=about)
    update = {"runtime": vf.SubprocessConfig(), "harness": vf.HarnessConfig(id="null"), "model": "policy"}
    if max_turns is not None:
        update["max_turns"] = max_turns
    agents = vf.Agents(env.config, lambda _, seat: _agent_type()(seat.model_copy(update=update), talk, episode.traces))
    await env.setup(agents)
    await env.run(task, agents)
    if not episode.traces:
        raise PluginError("the environment of verifiers ended without any conversation")
    trace = episode.traces[0]
    if trace.ok:
        await env.finalize(task, episode)
        return trace
    error = trace.last_error
    raise RolloutError(f"the environment of verifiers failed: {error.type}: {error.message}" if error else "verifiers gave no reason")


@cache
def _agent_type() -> Any:
    """The agent of verifiers whose replies are the policy's. Its classes exist only where the package does."""
    import verifiers.v1 as vf
    from verifiers.v1 import graph
    from verifiers.v1.interception import Interception
    from verifiers.v1.types import content_text

    done = vf.ProgramResult(0, "", "")

    class Line(Interception):  # type: ignore[misc]
        """In place of the server between a program and a model: the session at hand."""

        async def start(self) -> None:
            """There is nothing to start."""

        @asynccontextmanager
        async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
            self.session = session
            yield "http://policy", "", ""

    class Turns(vf.Harness):  # type: ignore[misc]
        """In place of a program: each launch is one turn of the policy."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        def __init__(self, config: Any, line: Line, talk: _Talk) -> None:
            super().__init__(config)
            self._line = line
            self._talk = talk

        async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any) -> Any:
            session = self._line.session
            if await session.refused() is not None:
                return done
            system, prompt = self.resolve_prompt(data)
            messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
            if system is not None:
                messages.insert(0, vf.SystemMessage(content=system))
            request, _, stop = await session.rewrite_request(vf.Request(messages=messages))
            turn = graph.prepare_turn(trace, request.messages, [])
            if stop is not None:
                turn.commit_prompt()
                trace.stop(stop)
                return done
            if turn.tail_start != len(trace.nodes):
                raise PluginError("the environment of verifiers changes what was said before, which cannot be trained on")
            reply = await self._talk.ask([_shown(message) for message in turn.tail])
            message = vf.AssistantMessage(content=reply)
            response = vf.Response(id="policy", created=0, model="policy", message=message, finish_reason="stop")
            response, _, stop = await session.rewrite_response(response)
            turn.commit(response)
            if stop is not None:
                trace.stop(stop)
            return done

    def _shown(message: Any) -> Message:
        if not isinstance(message.content, str) and any(part.type != "text" for part in message.content):
            raise PluginError("the environment of verifiers shows images; only text can be shown")
        return {"role": message.role, "content": content_text(message.content)}

    class Policy(vf.Agent):  # type: ignore[misc]
        """The agent. What it has played is put among the episode's traces, whichever way it was asked to play."""

        def __init__(self, config: Any, talk: _Talk, traces: list[Any]) -> None:
            line = Line()
            super().__init__(config, interception=line)
            self.harness = Turns(self.config.harness, line, talk)
            self._talk = talk
            self._traces = traces

        async def run(self, task: Any, **rest: Any) -> Any:
            self._talk.begin()
            trace = await super().run(task, **rest)
            self._traces.append(trace)
            return trace

        @asynccontextmanager
        async def interaction(self, task: Any, **rest: Any) -> AsyncIterator[Any]:
            self._talk.begin()
            async with super().interaction(task, **rest) as interaction:
                yield interaction
            self._traces.append(interaction.trace)

    return Policy
