"""An agent as a program: started for one episode, pointed at the endpoint, ended with everything that it has started.

The program finds these in its environment:

    OPENAI_BASE_URL, OPENAI_API_KEY     where the policy is; the official clients read both by themselves
    DRUMROLL_TASK                       the task as JSON: {"id": …, "domain": …, "prompt": …, "messages": …, "data": {…}}

How it ends:

    it posts a reward with `"done": true` (the default)   the verdict stands, whatever becomes of the program
    it exits with 0                                        the posted rewards, or the reward functions of the config, are the verdict
    it exits with anything else, or is killed              no verdict: the sample is tried again, and never trains
    it takes longer than the lease allows                  the same, with stop reason `deadline`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt

from drumroll.agents.endpoint import Endpoint, Engine
from drumroll.agents.sessions import Failure, Order, SessionLimits, SessionResult
from drumroll.config.models import EnvConfig
from drumroll.registry import register
from drumroll.types import Task

EXIT_S = 5.0
"""A program whose session is over may take this long to come to its own end."""

PIPE_S = 1.0
"""How long the end of what an ended program has printed is waited for: a child that left its session may hold the pipe open."""

TAIL_BYTES = 2000
"""Of what a program prints, so much is kept to explain its failure."""


@register.env("agent")
class Agent:
    """A program that talks to the policy through an OpenAI client; built for one episode.

    An environment is asked for its next step; an agent asks. So it has a `run` where environments have `start` and `step`.
    """

    class Config(EnvConfig):
        kind: str = "agent"
        command: Annotated[tuple[str, ...], Field(min_length=1)]
        """The program and its arguments, for example `[python, my_agent.py]`; started anew for every episode."""
        folder: str | None = None
        """Where it is started; the run's working directory otherwise."""
        variables: Mapping[str, str] = {}
        """Added to its environment."""
        session_tokens: PositiveInt | None = None
        """Tokens of all its calls together; a call that continues an earlier one counts with what is new in it. Four times
        `rollout.max_tokens` otherwise."""
        max_parallel: PositiveInt = 8
        """Calls that it may have under way; others wait."""
        obeys_sampling: bool = False
        """Sample with the temperature and top_p that it asks for. Replies for which they differ from the run's are not trained on."""

    needs_prompt: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(
        self, order: Order, endpoint: Endpoint, engine: Engine, *, max_calls: int, max_tokens: int, is_judged: bool, rank: int = -1
    ) -> SessionResult:
        """The episode. `max_tokens` is for the prompt and the reply of one call. `is_judged`: reward functions follow.

        Whatever fails is in the result and not raised. When cancelled, the program is killed, and what was sampled so far comes back
        as aborted: cancelling ends the program and not the record of it."""
        config = self.config
        key = endpoint.open_session(
            order,
            engine,
            SessionLimits(max_tokens, config.session_tokens or 4 * max_tokens, max_calls, config.max_parallel),
            is_judged=is_judged,
            obeys_sampling=config.obeys_sampling,
            rank=rank,
        )
        try:
            failure = await _run(config, order, endpoint, key)
        except asyncio.CancelledError:
            failure = Failure("aborted", "")
        except Exception as error:  # no such program, a folder that is not there, a task that is no JSON or too long, …
            reason = f"the agent `{' '.join(config.command)}` cannot be run: {type(error).__name__}: {error}"
            failure = Failure("failed", reason, "environment")
        return await endpoint.close_session(key, failure)


async def _run(config: Agent.Config, order: Order, endpoint: Endpoint, key: str) -> Failure | None:
    """Start the program and wait for its end, or for the session's; then make sure that nothing of it is left."""
    process = await asyncio.create_subprocess_exec(
        *config.command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=config.folder,
        env={**os.environ, **config.variables, **_variables(endpoint.base_url, key, order.task)},
        start_new_session=True,
    )
    output = asyncio.create_task(_tail(process))
    exits, over = asyncio.create_task(process.wait()), asyncio.create_task(endpoint.session_over(key))
    try:
        await asyncio.wait({exits, over}, timeout=order.deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            await asyncio.wait({exits}, timeout=EXIT_S)
            return None
        if not exits.done():
            return Failure("deadline", f"the agent took longer than {order.deadline_s:g} s", "environment")
        return _verdict(exits.result(), await _printed(output))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        over.cancel()
        await asyncio.wait({exits})
        await asyncio.wait({output}, timeout=PIPE_S)  # the pipe is closed when its end has been read
        output.cancel()


def _verdict(code: int, printed: str) -> Failure | None:
    if code == 0:
        return None
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return Failure("failed", f"the agent {how}" + (f"; it printed:\n{printed}" if printed else ""), "environment")


def _variables(base_url: str, key: str, task: Task) -> dict[str, str]:
    host = urlsplit(base_url).hostname or ""
    others = [hosts for name in ("no_proxy", "NO_PROXY") if (hosts := os.environ.get(name))]
    direct = ",".join([*others, host])  # a proxy of this machine's cannot reach the endpoint
    told: dict[str, Any] = {
        "id": task.id,
        "domain": task.domain,
        "prompt": task.prompt,
        "messages": None if task.messages is None else [dict(message) for message in task.messages],
        "data": dict(task.data),
    }
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "DRUMROLL_TASK": json.dumps(told),
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    """The end of what a program prints. All of it is read, so that the program never waits for a reader."""
    assert process.stdout is not None, "the program was started with a pipe"
    tail = b""
    while piece := await process.stdout.read(65536):
        tail = (tail + piece)[-TAIL_BYTES:]
    return tail


async def _printed(output: asyncio.Task[bytes]) -> str:
    """What there is, once the program has ended. A child that it left behind may hold the pipe open: that one is not waited for."""
    await asyncio.wait({output}, timeout=PIPE_S)
    return output.result().decode(errors="replace").strip() if output.done() else ""
